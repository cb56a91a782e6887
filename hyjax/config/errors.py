"""What is wrong with a config, in one sentence, and the right value nearest to the wrong one."""

import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any


class ConfigError(ValueError):
    """Something in a config, an override or a config's argument is wrong: one sentence that names the key."""


show = reprlib.Repr(maxstring=80, maxother=80).repr  # a value for a message, on one line and not too long


def clip(key: str) -> str:
    """A key for a message: anything that can't be a key is quoted."""
    return key if re.fullmatch(r"[\w.-]{1,80}", key) else show(key)


def near(word: str, words: Iterable[str], prefix: str = "") -> str:
    """`"; did you mean ...?"` where one of `words` is close to `word`, else the empty string."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def lookup[T](table: Mapping[str, T], name: Any, key: str) -> T:
    """`table[name]`, or a ValueError that names the config key, all names and the nearest."""
    if name in table:
        return table[name]
    raise ValueError(f"{key} is {name!r}, not one of {', '.join(sorted(table))}{near(str(name), table)}")


def multiples_near(value: int, unit: int) -> str:
    """`"128 or 132"`: the multiples of `unit` on both sides of `value`, which is none."""
    low = value - value % unit
    return f"{low} or {low + unit}" if low else f"{unit}"


def divisors_near(value: int, wanted: int) -> str:
    """`"2 or 4"`: the divisors of `value` on both sides of `wanted`, which is none."""
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    divisors = small + [value // d for d in small]
    below, above = max(d for d in divisors if d < wanted), [d for d in divisors if d > wanted]
    return f"{below} or {min(above)}" if above else f"{below}"
