"""A config as text: JSON to store it, lines to read and compare it, and a fingerprint."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hyjax.config.errors import ConfigError
from hyjax.config.load import frozen
from hyjax.config.schema import check, flatten

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict


def to_json(config: Mapping) -> str:
    """The whole config as one JSON object with sorted keys; `from_json` reads it."""
    return json.dumps(check(config), sort_keys=True, indent=1, allow_nan=False)


def from_json(text: str) -> "FrozenConfigDict":
    """The config that `to_json` wrote, checked; a key it lacks takes its default. Raises ConfigError."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the stored config is not JSON: {error}") from None
    return frozen(config)


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
