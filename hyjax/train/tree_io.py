"""Trees of arrays in a folder, through Orbax: nested by path, read onto any mesh, compared with their manifest."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from hyjax.train.checksum import device_checksums, host_checksum
from hyjax.train.manifest import DamageError, Leaf
from hyjax.train.optimizer import leaf_paths


def handler() -> ocp.PyTreeCheckpointHandler:
    """Without compression: float32 weights and moments give 8 % for four times the seconds (400 MB: 0.6 s, 2.5 s)."""
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def read(folder: Path, leaves: Mapping[str, Leaf], target: Any) -> Any:
    """The arrays in `folder` in the form of `target`, arrays or `jax.ShapeDtypeStruct`s, whose shardings (if any) the
    result takes. The target's leaves must be among `leaves`, the manifest's.

    Raises DamageError naming a leaf that can't be read or whose bits are not those that were saved.
    """
    nested = nest(jax.tree.map(_abstract, target))
    restore_args = ocp.checkpoint_utils.construct_restore_args(nested)
    args = ocp.args.PyTreeRestore(nested, restore_args=restore_args, partial_restore=True)
    try:
        result = jax.block_until_ready(_unnest(handler().restore(folder, args=args), target))
    except Exception as error:  # damage shows as almost any: JSON's, KeyError, tensorstore's ValueError
        compare(folder, {path: leaves[path] for path in leaf_paths(target)})  # names the leaf, if it is one
        raise DamageError(reason(error)) from error
    for path, checksum in device_checksums(result).items():
        if leaves[path].checksum not in (None, checksum):
            raise DamageError(f"{path} differs from what was saved")
    return result


def compare(folder: Path, leaves: Mapping[str, Leaf]) -> None:
    """Reads leaf after leaf into host memory and compares; raises DamageError naming the first that fails."""
    reader = handler()
    for path, leaf in leaves.items():
        nested = nest_paths({path: jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))})
        restore_args = nest_paths({path: ocp.RestoreArgs(restore_type=np.ndarray)})
        args = ocp.args.PyTreeRestore(nested, restore_args=restore_args, partial_restore=True)
        try:
            array = jax.tree.leaves(reader.restore(folder, args=args))[0]
        except Exception as error:  # as above
            raise DamageError(f"{path} can't be read: {reason(error)}") from error
        if (tuple(array.shape), str(array.dtype)) != (leaf.shape, leaf.dtype):
            raise DamageError(f"{path} is {array.dtype}{array.shape}, not {leaf.dtype}{leaf.shape} as it was saved")
        if leaf.checksum not in (None, host_checksum(array)):
            raise DamageError(f"{path} differs from what was saved")


def listed(folder: Path) -> dict[str, Leaf]:
    """Path → Leaf as Orbax's own list has them, without checksums; raises DamageError."""
    try:
        tree = handler().metadata(folder).tree
        leaves = zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
        return {path: Leaf(tuple(leaf.shape), str(np.dtype(leaf.dtype)), None) for path, leaf in leaves}
    except Exception as error:  # as above
        raise DamageError(f"{folder.name}/_METADATA can't be read: {reason(error)}") from error


def drop_from_cache(folder: Path) -> None:
    """Asks the kernel to forget the files' pages, so that reading them back asks the disk (or the file server)."""
    if not hasattr(os, "posix_fadvise"):  # macOS: the pages are read
        return
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # only what is written out can be forgotten
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def num_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes; an array on several devices counts once."""
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def nest(tree: Any) -> dict[str, Any]:
    """The tree as nested dicts by path, whatever its nodes were: {"opt_state": {"1": {"0": {"mu": ...}}}}."""
    return nest_paths(dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)))


def nest_paths(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} → {"a": {"b": x}}"""
    nested: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = nested
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return nested


def _unnest(nested: Mapping[str, Any], target: Any) -> Any:
    """Inverse of `nest`, into the nodes of `target`."""
    leaves = dict(zip(leaf_paths(nested), jax.tree.leaves(nested), strict=True))
    return jax.tree.unflatten(jax.tree.structure(target), [leaves[path] for path in leaf_paths(target)])


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a target leaf; without a sharding, one device holds it."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def reason(error: BaseException) -> str:
    """What a person needs of an error: the operating system's words where they are in it, else its first 200."""
    if isinstance(error, DamageError):
        return str(error)
    text = " ".join(str(error).split())
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO):
        if os.strerror(number) in text:
            return os.strerror(number)
    return f"{type(error).__name__}: {text[:200]}"
