"""The walk that the TPU kernels of attention share: the grid, the blocks that each step gets, and the mask.

The grid is (B, Hk, outer block, step); outer blocks are those of queries or of keys, and a step visits one block of the
other side, as the tables say (tpu_blocks.Visits). A kernel is a function of its refs that returns three others:
`begin()` at the first step of an outer block, `block(mask)` at every visit, `end()` at the last step.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels import dispatch
from hyjax.kernels.attention import tpu_blocks
from hyjax.kernels.attention.tpu_blocks import LANES, Packing, Plan
from hyjax.kernels.varying import alike

VMEM_BYTES = 48 << 20  # of 64 MiB on v5p and tpu7x, and 128 on v5e and v6e

# Blocks at the diagonal, or at the far end of a window, lie so to their keys in so many ways at most: each way is code
# of its own then, without the tiles that nobody may see.
MOST_CASES = 2


class Run(NamedTuple):
    name: str
    outer: str  # "queries" or "keys"
    products: tuple[int, int]  # matrix products of a visit over or into K, and V
    interpret: Any


# Kinds of arrays: the side whose block an index is of (0 queries, 1 keys), the array's shape, a block's shape, and a
# block's index from (b, h, block).
def _kinds(p: Plan, dim: int) -> dict[str, tuple[int, tuple, tuple, Callable]]:
    batch, heads, rows, keys = p.batch, p.heads, p.rows, p.keys
    at_second, at_last = (lambda b, h, i: (b, h, i, 0)), (lambda b, h, i: (b, h, 0, i))
    all_rows, all_keys = p.q_blocks * rows, p.kv_blocks * keys
    return {
        "rows": (0, (batch, heads, all_rows, dim), (None, None, rows, dim), at_second),
        "row_columns": (0, (batch, heads, dim, all_rows), (None, None, dim, rows), at_last),
        "row_values": (
            0,
            (batch, heads, p.q_blocks, 1, rows),
            (None, None, None, 1, rows),
            lambda b, h, i: (b, h, i, 0, 0),
        ),
        "row_ids": (0, (batch, p.q_blocks, 1, rows), (None, None, 1, rows), lambda b, h, i: (b, i, 0, 0)),
        "sinks": (0, (heads, 1, rows), (None, 1, rows), lambda b, h, i: (h, 0, 0)),
        "keys": (1, (batch, heads, all_keys, dim), (None, None, keys, dim), at_second),
        "key_columns": (1, (batch, heads, dim, all_keys), (None, None, dim, keys), at_last),
        "key_ids": (1, (batch, p.kv_blocks, 1, keys), (None, None, 1, keys), lambda b, h, j: (b, j, 0, 0)),
    }


def call(
    kernel: Callable,
    run: Run,
    p: Plan,
    packing: Packing,
    inputs: Sequence[tuple[str, jax.Array]],
    outputs: Sequence[tuple[str, int, Any]],
    scratch: Sequence[tuple[int, int]],
) -> Sequence[jax.Array]:
    """Run `kernel` over all blocks.

    Args:
      inputs: (kind, array).
      outputs: (kind, its dim, dtype).
      scratch: shapes in float32.
    """
    visits = packing.by_query if run.outer == "queries" else packing.by_key
    tables = [visits.first, visits.length, *(packing.uniform or ())]
    if packing.ids is not None:
        inputs = [("row_ids", packing.ids[0]), ("key_ids", packing.ids[1]), *inputs]
    kinds = [_kinds(p, x.shape[2 if kind.endswith("columns") else -1])[kind] for kind, x in inputs]
    out_kinds = [_kinds(p, dim)[kind] for kind, dim, _ in outputs]
    outer_blocks = p.q_blocks if run.outer == "queries" else p.kv_blocks

    def spec(kind):
        side, _, block, index = kind
        return pl.BlockSpec(
            block, lambda b, h, n, step, *tables: index(b, h, _place(p, run, b, n, step, *tables)[side])
        )

    arrays = alike(*map(jnp.asarray, tables), *(x for _, x in inputs))
    tables, arrays = arrays[: len(tables)], arrays[len(tables) :]
    axis_type = jax.typeof(arrays[0]).manual_axis_type
    shapes = [
        jax.ShapeDtypeStruct(k[1], o[2], manual_axis_type=axis_type) for k, o in zip(out_kinds, outputs, strict=True)
    ]
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(tables),
        grid=(p.batch, p.heads, outer_blocks, visits.steps),
        in_specs=[spec(kind) for kind in kinds],
        out_specs=[spec(kind) for kind in out_kinds],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    )
    return pl.pallas_call(
        lambda *refs: _step(kernel, run, p, visits.steps, len(tables), refs),
        shapes,
        grid_spec=grid_spec,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=_cost(
            p, run, visits.total, [*zip(kinds, arrays, strict=True), *zip(out_kinds, shapes, strict=True)]
        ),
        interpret=dispatch.interpreter(run.interpret, *arrays),
        name=run.name,
    )(*tables, *arrays)


def _cost(p: Plan, run: Run, visits: int, arrays) -> pl.CostEstimate:
    visits *= p.batch * p.heads
    pairs = visits * p.rows * p.keys
    dims = sum(n * dim for n, dim in zip(run.products, p.padded_dims, strict=True))
    outer = 0 if run.outer == "queries" else 1
    copied = 0
    for (side, _, block, _), x in arrays:
        # An outer block is copied once; a block of the other side at every visit.
        count = x.size if side == outer else visits * int(np.prod([n for n in block if n is not None]))
        copied += count * x.dtype.itemsize
    return pl.CostEstimate(flops=2 * pairs * dims, transcendentals=pairs, bytes_accessed=copied)


def _place(p: Plan, run: Run, b, n, step, first, length, *_):
    """(query block, key block) of a grid step; past the run its last, which is there already."""
    blocks = p.q_blocks if run.outer == "queries" else p.kv_blocks
    at = b * blocks + n if p.packed else n
    other = first[at] + jnp.minimum(step, jnp.maximum(length[at] - 1, 0))
    return (n, other) if run.outer == "queries" else (other, n)


class Mask(NamedTuple):
    """Which queries of a block may see which of its keys. A tile is (keys, rows), slices of the block."""

    plan: Plan
    ahead: int | jax.Array | None  # time of the block's first query less that of its first key; None: all may be seen
    keys_left: int | None  # keys of the block that aren't padding, where that isn't seen otherwise
    ids: tuple[Any, Any] | None  # references to ids [1, R] and [1, keys], where they matter

    def _behind(self, keys: slice, rows: slice) -> tuple[int, int]:
        """The range of key - place."""
        places, length = self.plan.places, rows.stop - rows.start
        low, high = (0, places - 1) if length >= places else (rows.start % places, rows.start % places + length - 1)
        return keys.start - high, keys.stop - 1 - low

    def skips(self, keys: slice, rows: slice) -> bool:
        """Whether a tile is known to be invisible."""
        if self.keys_left is not None:
            return keys.start >= self.keys_left
        if not isinstance(self.ahead, int):
            return False
        (low, high), window = self._behind(keys, rows), self.plan.window
        return low > self.ahead or (window is not None and high <= self.ahead - window)

    def visible(self, keys: slice, rows: slice) -> jax.Array | None:
        """[keys, rows] bool, or None where all may be seen."""
        shape = (keys.stop - keys.start, rows.stop - rows.start)
        (low, high), known = self._behind(keys, rows), isinstance(self.ahead, int)
        key = lax.broadcasted_iota(jnp.int32, shape, 0)
        terms, window = [], self.plan.window
        if self.keys_left is not None and keys.stop > self.keys_left:
            terms.append(key < self.keys_left - keys.start)
        if self.ahead is not None:
            place = (lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1) + rows.start) & (self.plan.places - 1)
            last = place + (self.ahead - keys.start)  # the last key that a query may see
            if not (known and high <= self.ahead):
                terms.append(key <= last)
            if window is not None and not (known and low > self.ahead - window):
                terms.append(key > last - window)
        if self.ids is not None:
            q_ids, k_ids = self.ids
            column = jnp.broadcast_to(k_ids[:, keys], (LANES, shape[0])).T
            terms.append(jnp.tile(column, (1, shape[1] // LANES)) == q_ids[:, rows])
        return functools.reduce(jnp.logical_and, terms) if terms else None


def _step(kernel: Callable, run: Run, p: Plan, steps: int, num_tables: int, refs) -> None:
    tables, refs = refs[:num_tables], refs[num_tables:]
    ids, refs = (refs[:2], refs[2:]) if p.packed else (None, refs)
    b, _, n, step = (pl.program_id(axis) for axis in range(4))
    i, j = _place(p, run, b, n, step, *tables)
    blocks = p.q_blocks if run.outer == "queries" else p.kv_blocks
    visited = step < tables[1][b * blocks + n if p.packed else n]
    begin, block, end = kernel(*refs)
    pl.when(step == 0)(begin)
    cases = _cases_by_time(p, i, j, ids)
    by_time = functools.reduce(jnp.logical_or, [case for case, _ in cases], jnp.bool_(False))
    whole = visited & jnp.logical_not(by_time)
    if ids is not None:
        one_document = tables[2][b * p.q_blocks + i] == tables[3][b * p.kv_blocks + j]
        pl.when(whole & jnp.logical_not(one_document))(lambda: block(Mask(p, None, None, ids)))
        whole &= one_document
    pl.when(whole)(lambda: block(Mask(p, None, None, None)))
    for case, mask in cases:
        pl.when(visited & case)(functools.partial(block, mask))
    pl.when(step == steps - 1)(end)


def _cases_by_time(p: Plan, i, j, ids) -> list[tuple[jax.Array, Mask]]:
    """Blocks of which some pairs may be seen by place in time and some not: disjoint conditions and their masks."""
    if p.ragged_keys:
        return [(j == p.kv_blocks - 1, Mask(p, None, p.kv_len % p.keys, ids))]
    if not p.causal:
        return []
    ahead = tpu_blocks.ahead(p, i, j)
    known = tpu_blocks.partly_visible_aheads(p)
    if len(known) > MOST_CASES:
        return [(tpu_blocks.partly_visible(p, ahead), Mask(p, ahead, None, ids))]
    return [(ahead == value, Mask(p, value, None, ids)) for value in known]
