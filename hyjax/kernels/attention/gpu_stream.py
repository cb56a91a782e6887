"""The frame that the GPU kernels of attention share: who copies, who computes, and what a step gets to see.

A program has three warpgroups. Two compute, each for 64 of the outer block's 128 queries or keys, whose arrays it keeps
in shared memory ("resident"). The third copies the blocks that are visited ("streamed"), some steps ahead, into a ring
of stages. Each stage of each group of streamed arrays has two barriers: `full`, where copies arrive, and `free`, where
the two consumers do when they have read it. Every wait is matched: the copier waits for all that it was given back.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hyjax.kernels import varying
from hyjax.kernels.attention.gpu_plan import CONSUMERS, OUTER, WARPGROUP_ROWS, Plan, Tiles, Visits
from hyjax.kernels.gpu_tiles import WGMMA, products, tile

CONSUMER_REGISTERS, COPIER_REGISTERS = 240, 24  # a thread; a processor has 504 for three warpgroups

# Kinds of arrays: where a block of one lies, from the batch, the query head, the key head, and places in time.
KINDS: dict[str, Callable] = {
    "rows": lambda b, q_head, kv_head, time: (b, time, q_head),  # [B, Tq, Hq, D]
    "row_values": lambda b, q_head, kv_head, time: (b, q_head, time),  # [B, Hq, Tq]
    "row_ids": lambda b, q_head, kv_head, time: (b, time),  # [B, Tq]
    "keys": lambda b, q_head, kv_head, time: (b, time, kv_head),  # [B, Tk, Hk, D]
    "key_ids": lambda b, q_head, kv_head, time: (b, time),  # [B, Tk]
}
Array = tuple[str, Any]  # kind, and the array, or its shape and dtype


class Run(NamedTuple):
    name: str
    outer: str  # "queries" or "keys"
    tiles: Tiles
    products: int  # matrix products of a visit
    interpret: Any


def product(x, y) -> jax.Array:
    """x @ y in float32, of tiles in shared memory. All products that were under way before are done then, too."""
    return products([(x, y)])[0]


def along(values: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    """One number a row (dim 0) or column (dim 1), all over a tile."""
    return lax.broadcast_in_dim(values, shape, (dim,))


def filled(shape: tuple[int, ...], value, layout=WGMMA) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


class Step(NamedTuple):
    """One visit, as a consumer sees it."""

    resident: Sequence[Any]  # arrays of the consumer's share of the outer block
    own: Sequence[Any]  # memory that is the consumer's
    streamed: Sequence[Sequence[Any]]  # by group
    barriers: Sequence[tuple[Any, Any]]  # (full, free) by group
    whole: jax.Array  # whether every query of it sees every key
    outer: jax.Array  # place of the consumer's first query or key
    inner: jax.Array  # of the first visited

    def wait(self, group: int) -> Sequence[Any]:
        """The arrays of a group, once they are there."""
        plgpu.barrier_wait(self.barriers[group][0])
        return self.streamed[group]

    def release(self, group: int) -> None:
        """Let it be overwritten: once products have read it, and commit_smem followed what else did."""
        plgpu.barrier_arrive(self.barriers[group][1])


def masked(s: jax.Array, p: Plan, step: Step, rows_dim: int, ids: Callable | None, then: Callable = lambda s: s) -> Any:
    """then(s with -inf where a query may not see a key).

    Args:
      rows_dim: the dim of s that queries are along.
      ids: () -> (ids of queries, ids of keys), or None.
      then: what a tile that is visible as a whole gets to at once. The smaller its result, the fewer registers it takes
        that two branches meet.
    """
    keys_dim = 1 - rows_dim
    q_first, k_first = (step.outer, step.inner) if rows_dim == 0 else (step.inner, step.outer)

    def mask(s):
        if ids is not None:
            q_ids, k_ids = ids()
            s = jnp.where(along(q_ids, s.shape, rows_dim) == along(k_ids, s.shape, keys_dim), s, -jnp.inf)
        row, key = (plgpu.broadcasted_iota(jnp.int32, s.shape, dim, layout=WGMMA) for dim in (rows_dim, keys_dim))
        if p.causal:
            ahead = row + (q_first + p.offset - k_first) - key
            s = jnp.where(ahead >= 0, s, -jnp.inf)
            if p.window is not None:
                s = jnp.where(ahead < p.window, s, -jnp.inf)
        if p.ragged_keys:
            s = jnp.where(key < p.kv_len - k_first, s, -jnp.inf)
        return then(s)

    return lax.cond(step.whole, then, mask, s) if p.masks else then(s)


class Program(NamedTuple):
    """Where a program is, and what it visits."""

    p: Plan
    run: Run
    batch: jax.Array
    head: jax.Array  # of queries, or of keys where the outer block is one of keys, which all its query heads visit
    block: jax.Array
    first: jax.Array
    length: jax.Array
    whole_first: jax.Array
    whole_end: jax.Array

    @property
    def steps(self):
        return self.length if self.run.outer == "queries" else self.length * self.p.groups

    def slot(self, n):
        return lax.rem(n, self.run.tiles.stages)

    def visited(self, n):
        """The block that step n visits."""
        return self.first + (n if self.run.outer == "queries" else lax.rem(n, self.length))

    def at(self, kind: str, ref, start, size: int, n=None):
        """A block of an array, of the heads that step n is about, or (without n) of the outer block's."""
        heads: tuple[Any, Any]
        if self.run.outer == "queries":
            heads = self.head, lax.div(self.head, self.p.groups)
        else:
            heads = None if n is None else self.head * self.p.groups + lax.div(n, self.length), self.head
        return ref.at[KINDS[kind](self.batch, *heads, pl.ds(start, size))]


def _program(p: Plan, run: Run, table_ref) -> Program:
    batches, blocks, _ = table_ref.shape
    n, batch = lax.axis_index("block"), lax.axis_index("batch")
    # The programs of causal attention that take longest come first.
    block = blocks - 1 - n if run.outer == "queries" and p.causal else n
    first, end, whole_first, whole_end = (table_ref[batch if batches > 1 else 0, block, i] for i in range(4))
    return Program(p, run, batch, lax.axis_index("head"), block, first, end - first, whole_first, whole_end)


def _copy(program: Program, streamed: Sequence[Sequence[Array]], ring, full, free) -> None:
    """What the copying warpgroup does; `streamed` holds references."""
    stages, inner = program.run.tiles.stages, program.run.tiles.inner
    plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")

    @pl.loop(0, program.steps)
    def _(n):
        slot, start = program.slot(n), program.visited(n) * inner
        for group, buffers, arrived, left in zip(streamed, ring, full, free, strict=True):
            pl.when(n >= stages)(functools.partial(plgpu.barrier_wait, left.at[slot]))
            for (kind, ref), smem in zip(group, buffers, strict=True):
                plgpu.copy_gmem_to_smem(program.at(kind, ref, start, inner, n), smem.at[slot], arrived.at[slot])

    @pl.loop(jnp.maximum(program.steps - stages, 0), program.steps)
    def _(n):
        for left in free:
            plgpu.barrier_wait(left.at[program.slot(n)])


def _compute(program: Program, kernel: Callable, resident: Sequence[Array], outputs: Sequence[Array], scratch) -> None:
    """What a computing warpgroup does; `resident` and `outputs` hold references, `scratch` shared memory by name."""
    plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
    warpgroup = lax.axis_index("warpgroup")
    start = program.block * OUTER + warpgroup * WARPGROUP_ROWS
    loaded, kept = scratch["loaded"].at[warpgroup], [x.at[warpgroup] for x in scratch["kept"]]
    for (kind, ref), smem in zip(resident, kept, strict=True):
        plgpu.copy_gmem_to_smem(program.at(kind, ref, start, WARPGROUP_ROWS), smem, loaded)
    plgpu.barrier_wait(loaded)

    def loop(step, init):
        def visit(n, carry):
            slot, j = program.slot(n), program.visited(n)
            streamed = [[smem.at[slot] for smem in group] for group in scratch["ring"]]
            barriers = [(x.at[slot], y.at[slot]) for x, y in zip(scratch["full"], scratch["free"], strict=True)]
            whole = (j >= program.whole_first) & (j < program.whole_end)
            # An index that the compiler can't know to be the same in every step: it would keep the addresses of all
            # operands of products in registers, which are needed for sums.
            here = lax.optimization_barrier(warpgroup)
            kept, own = ([x.at[here] for x in scratch[name]] for name in ("kept", "own"))
            return step(Step(kept, own, streamed, barriers, whole, start, j * program.run.tiles.inner), carry)

        return lax.fori_loop(0, program.steps, visit, init)

    made = kernel(kept, loop, program.head)
    leaving = [kept[n] if x is None else x.at[warpgroup] for n, x in enumerate(scratch["leaving"])]
    for value, smem in zip(made, leaving, strict=True):
        smem[...] = value.astype(smem.dtype)
    plgpu.commit_smem()
    for (kind, ref), smem in zip(outputs, leaving, strict=True):
        plgpu.copy_smem_to_gmem(smem, program.at(kind, ref, start, WARPGROUP_ROWS))
    plgpu.wait_smem_to_gmem(0)


def call(
    kernel: Callable,
    run: Run,
    p: Plan,
    visits: Visits,
    resident: Sequence[Array],
    streamed: Sequence[Sequence[Array]],
    outputs: Sequence[Array],
    own: Sequence[Any],
    extra: jax.Array | None = None,
) -> Sequence[Any]:
    """Run `kernel` for every outer block.

    Args:
      kernel: (extra, resident, loop, head) -> outputs, a consumer: loop(step, carry) runs step(Step, carry) over the
        visits, and `resident` is as a Step's.
      outputs: each leaves through the memory of the resident array at its place, if that is of its kind.
      own: what the consumers have to themselves, [CONSUMERS, ...].
      extra: an array that is read where it is.
    """
    arrays = [*_arrays(resident), *(x for group in streamed for x in _arrays(group))]
    operands = varying.alike(jnp.asarray(visits.table), *arrays, *([] if extra is None else [extra]))

    def body(table_ref, *refs, **scratch):
        left = list(refs)
        with_refs = lambda arrays: [(kind, left.pop(0)) for kind, _ in arrays]
        resident_refs, streamed_refs = with_refs(resident), [with_refs(group) for group in streamed]
        extra_ref = None if extra is None else left.pop(0)
        out_refs = with_refs(outputs)
        program, warpgroup = _program(p, run, table_ref), lax.axis_index("warpgroup")

        @pl.when(warpgroup == CONSUMERS)
        def _():
            _copy(program, streamed_refs, scratch["ring"], scratch["full"], scratch["free"])

        @pl.when(warpgroup < CONSUMERS)
        def _():
            _compute(program, functools.partial(kernel, extra_ref), resident_refs, out_refs, scratch)

    made = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _arrays(outputs)],
        scratch_types=_scratch_types(run.tiles, resident, streamed, outputs, own),
        grid=(visits.table.shape[1], p.batch, p.heads * p.groups if run.outer == "queries" else p.heads),
        grid_names=("block", "batch", "head"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        cost_estimate=_cost(p, run, visits, [*_arrays(resident), *_arrays(outputs)], streamed),
        interpret=plgpu.InterpretGPUParams() if run.interpret is True else run.interpret,
        kernel_name=run.name,
    )(*operands)
    # Mosaic GPU's kernels forget over which mesh axes they vary.
    return varying.alike(operands[0], *made)[1:]


def _scratch_types(tiles: Tiles, resident, streamed, outputs, own) -> dict[str, Any]:
    consumers = lambda x: _buffer(x, CONSUMERS, WARPGROUP_ROWS)
    at_home = [n < len(resident) and resident[n][0] == kind for n, (kind, _) in enumerate(outputs)]
    barriers = lambda arrivals, count: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
    return dict(
        kept=[consumers(x) for x in _arrays(resident)],
        leaving=[None if home else consumers(x) for home, x in zip(at_home, _arrays(outputs), strict=True)],
        own=list(own),
        ring=[[_buffer(x, tiles.stages, tiles.inner) for x in _arrays(group)] for group in streamed],
        full=[barriers(len(group), tiles.stages) for group in streamed],
        free=[barriers(CONSUMERS, tiles.stages) for _ in streamed],
        loaded=barriers(len(resident), CONSUMERS),
    )


def _arrays(kinds: Sequence[Array]) -> list[Any]:
    return [x for _, x in kinds]


def _buffer(array, *shape: int) -> Any:
    """Shared memory for blocks of an array."""
    return tile(*shape, array.shape[3], dtype=array.dtype) if array.ndim == 4 else plgpu.SMEM(shape, array.dtype)


def _cost(p: Plan, run: Run, visits: Visits, copied_once, streamed) -> pl.CostEstimate:
    steps = visits.total * p.batch * p.heads * p.groups
    pairs = steps * OUTER * run.tiles.inner
    sizes = [x.dtype.itemsize * (x.shape[3] if x.ndim == 4 else 1) for group in streamed for x in _arrays(group)]
    copied = sum(x.size * x.dtype.itemsize for x in copied_once) + steps * run.tiles.inner * sum(sizes)
    return pl.CostEstimate(flops=2 * pairs * p.dim * run.products, transcendentals=pairs, bytes_accessed=copied)
