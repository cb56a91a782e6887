"""What a folder of arrays must hold: JSON beside them with every leaf's path, shape, dtype and checksum.

A manifest has a checksum of itself, so that damage and another model are told apart: a leaf that differs from the
manifest is damaged; a manifest that differs from what is wanted belongs to another model.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from hyjax.train.checksum import device_checksums
from hyjax.train.optimizer import leaf_paths

VERSION = 1


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    checksum: str | None  # None: written before there were any


class DamageError(ValueError):
    """What is on disk is not what was written: one sentence that names the leaf or the file."""


def describe(tree: Any) -> dict[str, Leaf]:
    """Path → Leaf of a tree of arrays; waits for them."""
    checksums = device_checksums(tree)
    leaves = zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    return {path: Leaf(tuple(leaf.shape), str(np.dtype(leaf.dtype)), checksums[path]) for path, leaf in leaves}


def seal(leaves: Mapping[str, Leaf], **entries: Any) -> dict[str, Any]:
    """The manifest of these leaves, and whatever else it shall say, as a JSON object."""
    listed = {path: list(leaf) for path, leaf in leaves.items()}
    plain = json.loads(json.dumps({"version": VERSION, "leaves": listed, **entries}))
    return {"sha256": digest(plain), "manifest": plain}


def unseal(sealed: Any) -> tuple[dict[str, Leaf], dict[str, Any]]:
    """(leaves, the other entries) of what `seal` gave; raises DamageError where it is not that any more."""
    entries = sealed.get("manifest") if isinstance(sealed, dict) else None
    if entries is None or sealed.get("sha256") != digest(entries):
        raise DamageError("its manifest differs from what was saved")
    if entries["version"] != VERSION:
        raise DamageError(f"its manifest is of version {entries['version']}; this hyjax reads {VERSION}")
    leaves = {path: Leaf(tuple(shape), dtype, checksum) for path, (shape, dtype, checksum) in entries["leaves"].items()}
    return leaves, {key: value for key, value in entries.items() if key != "leaves"}


def digest(plain: Any) -> str:
    """sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def read_json(file: Path) -> Any:
    """The file's JSON; raises DamageError that names it by its last two parts ("extra/metadata is missing")."""
    name = f"{file.parent.name}/{file.name}"
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        raise DamageError(f"{name} is missing") from None
    except OSError as error:
        raise DamageError(f"{name} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise DamageError(f"{name} is not JSON") from None


def refuse_differences(leaves: Mapping[str, Leaf], target: Any, partial: bool, what: str) -> None:
    """Raises ValueError naming the leaves whose presence, shape or dtype differs. Orbax would cast to the target's
    dtype in silence: int32 2²⁴ + 1 into float32 loses the one. With `partial`, keys at the top that the target lacks
    are no difference."""
    wanted = dict(zip(leaf_paths(target), jax.tree.leaves(target), strict=True))
    if partial:
        parts = {path.split("/", 1)[0] for path in wanted}
        leaves = {path: leaf for path, leaf in leaves.items() if path.split("/", 1)[0] in parts}
    faults = [f"{path} is not in it" for path in wanted if path not in leaves]
    faults += [f"it holds {path}, which is not wanted" for path in leaves if path not in wanted]
    for path in [path for path in wanted if path in leaves]:
        there, here = leaves[path], wanted[path]
        if there.shape != tuple(here.shape):
            faults.append(f"{path} has shape {there.shape} there and {tuple(here.shape)} here")
        if there.dtype != str(np.dtype(here.dtype)):
            faults.append(f"{path} is {there.dtype} there and {np.dtype(here.dtype)} here")
    if faults:
        more = f" (and {len(faults) - 3} more differences)" if len(faults) > 3 else ""
        raise ValueError(f"{what} is of another state: {'; '.join(faults[:3])}{more}")
