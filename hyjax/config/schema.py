"""The check of a config: the names of its keys, and the type and range of each value.

Plain dicts here; what a mixer's own fields may be, the models know. What goes together is in together.py.
"""

import copy
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from hyjax import layout as layout_language
from hyjax.config.defaults import ABOVE_ZERO, CHOICES, DEFAULTS, ELEMENTS, ONE_UP, RANGES
from hyjax.config.errors import ConfigError, clip, near, show
from hyjax.config.together import check_model, check_together

LEAST_FLOAT32, MOST_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers: others become 0 or infinite

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", tuple: "a tuple"}


def flatten(config: Mapping, prefix: str = "") -> dict[str, Any]:
    """`{"model.width": 128, ...}`; an empty mapping (a legend) stays as a value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def plain(value: Any) -> Any:
    """A mapping of any kind (ConfigDict, FrozenDict) as nested dicts, lists as tuples: JSON has no tuple."""
    if hasattr(value, "items"):
        return {key: plain(item) for key, item in value.items()}
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


KEYS = flatten(DEFAULTS)


def validate_model(model: Mapping) -> dict[str, Any]:
    """A whole model section as a plain dict: `model` (any mapping, any part) over the defaults, checked.

    Raises ConfigError. Needs no ml_collections. Lists become tuples.
    """
    checked = merge(DEFAULTS["model"], plain(model), "model.")
    check_model(checked)
    return checked


def check(config: Mapping) -> dict[str, Any]:
    """A whole config as a plain dict: `config` (any mapping, any part) over the defaults, every check made.

    Raises ConfigError. Needs no ml_collections. Lists become tuples.
    """
    checked = merge(DEFAULTS, plain(config))
    check_together(checked)
    if plain(json.loads(json.dumps(checked, allow_nan=False))) != checked:
        raise ConfigError("this config changes on its way through JSON; use only scalars, strings and tuples")
    return checked


def merge(defaults: Mapping, given: Any, prefix: str = "") -> dict[str, Any]:
    """`defaults` with the values of `given` (plain) in their place; names, types and ranges checked."""
    if not isinstance(given, dict):
        name, example = prefix.rstrip(".") or "a config", f"{prefix}{next(iter(defaults))}"
        raise ConfigError(f"{name} holds keys such as {example}, it can't be {show(given)}")
    merged = copy.deepcopy(dict(defaults))
    for key, value in given.items():
        name = f"{prefix}{key}"
        if key not in defaults:
            raise unknown(name)
        if name == "model.legend":
            merged[key] = _check_legend(value)
        elif isinstance(defaults[key], dict):
            merged[key] = merge(defaults[key], value, f"{name}.")
        else:
            merged[key] = check_value(name, value, name)
    return merged


def unknown(key: str) -> ConfigError:
    """The error for a dotted key that DEFAULTS doesn't have, with the nearest one that it has."""
    section, _, last = key.rpartition(".")
    moved = [name for name in KEYS if name.rpartition(".")[2] == last]  # the right name in the wrong section
    siblings = DEFAULTS.get(section) if section else DEFAULTS
    if moved:
        hint = f"; did you mean {moved[0]}?"
    elif isinstance(siblings, dict):
        hint = near(last, siblings, f"{section}.".lstrip("."))
        hint = hint or f"; {section or 'a config'} has {', '.join(siblings)}"
    else:
        hint = near(key, KEYS) or f"; a config has {', '.join(DEFAULTS)}"
    return ConfigError(f"{clip(key)} is not a key of the config{hint}")


# ------------------------------------------------------------------------------------------------ one value


def check_value(key: str, value: Any, like: str) -> Any:
    """`value` as the key `like` of DEFAULTS may hold it (a whole number becomes a float there); else ConfigError."""
    kind = type(KEYS[like])
    if kind is not tuple:
        return _check_scalar(key, value, kind, like)
    elements = enumerate(typed(key, value, tuple))
    return tuple(_check_scalar(f"{key}[{i}]", element, ELEMENTS[like], like) for i, element in elements)


def _check_scalar(key: str, value: Any, kind: type, like: str) -> Any:
    value = typed(key, value, kind)
    if kind is str and value not in (choices := CHOICES.get(like, (value,))):
        raise ConfigError(f"{key} must be one of {', '.join(choices)}, not {show(value)}{near(value, choices)}")
    if kind in (int, float):
        words, holds = RANGES.get(like, ONE_UP if kind is int else ABOVE_ZERO)
        if not holds(value):
            raise ConfigError(f"{key} must be {words}, not {value}")
    return value


def typed(key: str, value: Any, kind: Any) -> Any:
    """`value` if it is of type `kind` (a whole number does for float) and of a size for arrays; else ConfigError."""
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    bits = 53 if kind is float else 32 if key == "seed" else 31
    if isinstance(value, int) and abs(value) >= 2**bits:
        raise ConfigError(f"{key} must be less than 2**{bits} in size")
    if type(value) is not kind:
        raise _wrong_type(key, value, kind)
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{key} must be a finite number, not {value}")
    if kind is float and value and not LEAST_FLOAT32 <= abs(value) <= MOST_FLOAT32:
        raise ConfigError(f"{key} must be 0 or from 1.2e-38 to 3.4e38 in size, which float32 holds, not {value}")
    if kind is str and any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(f"{key} must be text that UTF-8 can hold, not {show(value)}")
    return value


def _wrong_type(key: str, value: object, kind: type) -> ConfigError:
    """The error for a value of another type than `kind`, with what to write instead where that is plain."""
    wanted = f"{key} must be {_TYPES[kind]} ({kind.__name__})"
    if value is None:
        return ConfigError(f"{wanted}; None stands for nothing in a config")
    hint = f"; write {int(value)}" if kind is int and isinstance(value, float) and value.is_integer() else ""
    return ConfigError(f"{wanted}, not {show(value)} ({type(value).__name__}){hint}")


# ------------------------------------------------------------------------------------------------ the legend


def _check_legend(legend: Any) -> dict[str, dict[str, Any]]:
    """The legend (plain) with its letters and fields checked."""
    if not isinstance(legend, dict):
        raise ConfigError(f"model.legend must be a dict such as dict(A=dict(heads=2)), not {show(legend)}")
    checked: dict[str, dict[str, Any]] = {}
    for letter, entry in legend.items():
        key = f"model.legend.{clip(str(letter))}"
        if not (isinstance(letter, str) and layout_language.is_letter(letter)):
            raise ConfigError(f"{key} is not a layer's letter: use one ASCII letter or '-'")
        if not isinstance(entry, dict):
            raise ConfigError(f"{key} must be a dict of fields such as dict(kv_heads=2), not {show(entry)}")
        checked[letter] = {name: check_field(f"{key}.{name}", name, value) for name, value in entry.items()}
    return checked


def check_field_name(key: str, name: Any) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", str(name)) or name in ("layout", "legend"):
        raise ConfigError(f"{clip(key)}: {show(name)} can't be the name of a field")


def check_field(key: str, name: Any, value: Any) -> Any:
    """One field of a legend entry: one that the model section has too is checked as there."""
    check_field_name(key, name)
    if name in ("mixer", "ffn"):
        return _check_part(key, name, value)
    if f"model.{name}" in KEYS:
        return check_value(key, value, f"model.{name}")
    for element in value if type(value) is tuple else (value,):
        if type(element) not in (bool, int, float, str):
            raise ConfigError(f"{key} must be numbers, strings, true or false, not {show(value)}")
        typed(key, element, type(element))
    return value


def _check_part(key: str, name: str, value: Any) -> Any:
    """What `mixer` and `ffn` may be: a name, None for none, and for several mixers side by side a tuple of names."""
    names = value if type(value) is tuple and value and name == "mixer" else (value,)
    if value is not None and not all(type(part) is str and part for part in names):
        wanted = "a name, a tuple of names" if name == "mixer" else "a name"
        raise ConfigError(f"{key} must be {wanted} or None, not {show(value)}")
    return value
