"""A name in a config, looked up in a table of what exists."""

import difflib
from collections.abc import Mapping


def lookup[T](table: Mapping[str, T], name: str, key: str) -> T:
    """`table[name]`, or a ValueError that names the config key, the nearest name and all names."""
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), table, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{key}={name!r} is unknown: {hint}there are {', '.join(map(repr, table))}")
