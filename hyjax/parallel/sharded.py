"""The operators over a mesh: the same calls as `hyjax.kernels`, each device on its own rows and heads.

A Pallas call can't be partitioned by the compiler: under a mesh it is an error on a TPU, and on a GPU every array is
gathered without a word. So a call runs under `shard_map` over all axes of the active mesh (`jax.set_mesh`), batch and
heads split over the axes of AXES as far as they divide, everything else whole on every device. Nothing crosses devices.
Without a mesh, and inside a region that is manual already, the operator is called as it is.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from hyjax import kernels
from hyjax.kernels.varying import alike

# The mesh axes over which a dim is split, by its letter below: rows, and heads or channels.
AXES = {"b": ("data", "fsdp", "expert"), "h": ("tensor",)}


def over_mesh(operator: Callable, dims: Mapping[str, str], out: str | tuple[str, ...]) -> Callable:
    """`operator` with the same signature, under `shard_map` where a mesh is active. `dims`: letters by argument."""
    signature = inspect.signature(operator)

    @functools.wraps(operator)
    def call(*args: Any, **options: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
            return operator(*args, **options)
        given = signature.bind(*args, **options).arguments
        arrays = {name: given[name] for name in dims if given.get(name) is not None}
        rest = {name: value for name, value in given.items() if name not in dims}
        axes = {letter: _dividing(letter, arrays, dims, mesh.shape) for letter in AXES}

        def local(arrays: dict[str, jax.Array]) -> Any:
            # What is whole on every device still takes part in what differs between them: its gradient is a sum.
            return operator(**dict(zip(arrays, alike(*arrays.values()), strict=True)), **rest)

        specs = {name: _spec(dims[name][: x.ndim], axes) for name, x in arrays.items()}
        outs = _spec(out, axes) if isinstance(out, str) else tuple(_spec(letters, axes) for letters in out)
        return jax.shard_map(local, in_specs=(specs,), out_specs=outs, check_vma=True)(arrays)

    return call


def _dividing(
    letter: str, arrays: Mapping[str, jax.Array], dims: Mapping[str, str], mesh_shape: Mapping[str, int]
) -> tuple[str, ...]:
    """The longest run of the letter's axes that are in the mesh and divide that dim of every array.

    A single row that decodes, or two key heads over four devices, is then whole on more devices, at the same result.
    """
    sizes = [x.shape[i] for name, x in arrays.items() for i, char in enumerate(dims[name][: x.ndim]) if char == letter]
    axes = [axis for axis in AXES[letter] if mesh_shape.get(axis, 1) > 1]
    while axes and any(size % math.prod(mesh_shape[axis] for axis in axes) for size in sizes):
        axes.pop()
    return tuple(axes)


def _spec(letters: str, axes: Mapping[str, Sequence[str]]) -> PartitionSpec:
    return PartitionSpec(*(tuple(axes.get(letter, ())) or None for letter in letters))


# Letters of each operator's arrays: b rows, h heads or channels, . whole; a dim that is not named is whole.
_QKV = dict(q="b.h", k="b.h", v="b.h", segment_ids="b")
_SCAN = dict(_QKV, log_decay="b.h", initial_state="bh")
_CONV = dict(x="b.h", weight=".h", bias="h", initial_state="b.h", segment_ids="b")
_DIAGONAL = dict(x="b.h", log_decay="b.h", initial_state="bh", segment_ids="b")
_SELECTIVE = dict(u="b.h", delta="b.h", A="h", B="b", C="b", D="h", initial_state="bh", segment_ids="b")

attention = over_mesh(
    kernels.attention, dict(_QKV, q_positions="b", kv_positions="b", kv_segment_ids="b", sinks="h"), "b.h"
)
linear_scan = over_mesh(kernels.linear_scan, _SCAN, ("b.h", "bh"))
delta_scan = over_mesh(kernels.delta_scan, dict(_SCAN, beta="b.h"), ("b.h", "bh"))
diagonal_scan = over_mesh(kernels.diagonal_scan, _DIAGONAL, ("b.h", "bh"))
selective_scan = over_mesh(kernels.selective_scan, _SELECTIVE, ("b.h", "bh"))
short_conv = over_mesh(kernels.short_conv, _CONV, ("b.h", "b.h"))
