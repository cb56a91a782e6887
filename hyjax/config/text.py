"""A config as text: JSON to store it, lines to read and compare it, and a fingerprint."""

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hyjax.config.errors import ConfigError
from hyjax.config.load import frozen
from hyjax.config.schema import KEYS, check, flatten, plain

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict


def to_json(config: Mapping) -> str:
    """The whole config as one JSON object with sorted keys; `from_json` reads it."""
    return json.dumps(check(config), sort_keys=True, indent=1, allow_nan=False)


def from_json(text: str) -> "FrozenConfigDict":
    """The config that `to_json` wrote, checked. Raises ConfigError.

    A key that an older hyjax did not have takes its default, and a warning says which did (`defaulted` lists them).
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the stored config is not JSON: {error}") from None
    result = frozen(config)
    if keys := defaulted(config):
        values = ", ".join(f"{key}={KEYS[key]!r}" for key in keys)
        _warn_once(f"the stored config is older than some keys, which take their defaults: {values}")
    return result


def defaulted(stored: Mapping) -> list[str]:
    """The keys that a whole config, stored before there were such keys, leaves to their defaults; sorted."""
    given = plain(stored)
    return sorted(key for key in KEYS if not _holds(given, key.split(".")))


def _holds(config: Any, path: list[str]) -> bool:
    for name in path:
        if not isinstance(config, dict) or name not in config:
            return False
        config = config[name]
    return True


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logging.getLogger(__name__).warning(message)


def resolved_text(config: Mapping) -> str:
    """One line a key, sorted: `model.width = 128`. What the golden files hold."""
    return "".join(f"{key} = {value!r}\n" for key, value in sorted(flatten(check(config)).items()))


def fingerprint(config: Mapping) -> str:
    """16 hex digits that differ where any value of two configs differs."""
    return hashlib.sha256(to_json(config).encode()).hexdigest()[:16]


def diff(a: Mapping, b: Mapping) -> list[tuple[str, Any, Any]]:
    """(key, value in a, value in b) where two configs differ; "(absent)" for a legend field one lacks."""
    left, right = flatten(check(a)), flatten(check(b))
    keys = sorted(left.keys() | right.keys())
    pairs = [(key, left.get(key, "(absent)"), right.get(key, "(absent)")) for key in keys]
    return [(key, x, y) for key, x, y in pairs if repr(x) != repr(y)]
