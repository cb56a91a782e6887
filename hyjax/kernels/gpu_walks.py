"""The walks over chunks, with the state in registers, that linear_scan and delta_scan share on Hopper GPUs.

In the notation of delta_scan/xla_chunks.py, for a chunk of C tokens with entry state S and exit state S' [K, V], one
gate a head, and the decays D [C, C], a and b [C]; linear_scan is the case u = v, without what stands in brackets:

    forward     P = (q kᵀ) ∘ D · scale         [C, C]
                [u = β ∘ (A v − W S)]          [C, V]
                o = P u + scale · a ∘ (q S)    [C, V]
                S' = a_C S + kᵀ (b ∘ u)        [K, V]
    backward    du = Pᵀ do + b ∘ (k dS')       [C, V], from the last chunk to the first
                dS = a_C dS' + qᵀ (scale · a ∘ do) [− Wᵀ (β ∘ du)]

Products take bfloat16 and sum in float32. A state walks in float32, is rounded where a product reads it, and is saved
so; with a delta rule, whose errors come back through the state, b ∘ u is written in two halves of bfloat16.

A program has all K rows and 64 columns of a head's state: 64 registers a thread for K = 128, and as many for what is
added to it. The copy engine fetches the next chunks meanwhile, out of arrays [B, T, H, X] as they are.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hyjax.kernels.gpu_plan import AFTER, BETA, CHUNK, UPTO, VALUE_BLOCK, Plan
from hyjax.kernels.gpu_tiles import (
    WGMMA,
    floats,
    half,
    launch,
    load,
    pair_decays,
    products,
    rounding,
    row,
    tile,
    times,
    transposed,
)


def forward_walk(q, k, v, reads, rows, state, p: Plan, scale: float, interpret):
    """-> o [B,T,HV,V] bfloat16, the states at the chunks' starts [B,HV,n,K,V] bfloat16, the final one in float32.

    Args, all fitted:
      q, k: [B, T, H, K].
      v: [B, T, HV, V]; A v, where there are `reads`.
      reads: W [B, T, HV, K], or None: u = v.
      rows: gpu_plan.gate_rows.
      state: [B, HV, K, V] in float32.
    """
    key_dim, value_dim = p.padded_dims
    inputs = dict(q=q, k=k, v=v, rows=rows, reads=reads, start=state)
    outputs = dict(
        out=(v.shape, jnp.bfloat16),
        states=((p.batch, p.value_heads, p.chunks, key_dim, value_dim), jnp.bfloat16),
        end=(state.shape, jnp.float32),
    )
    scratch = _fetched(inputs, p) | dict(
        entry=tile(key_dim, VALUE_BLOCK),
        scores=tile(CHUNK, CHUNK),
        written=tile(CHUNK, VALUE_BLOCK),
        out=tile(CHUNK, VALUE_BLOCK),
    )
    if reads is not None:
        scratch |= dict(u=tile(CHUNK, VALUE_BLOCK), rest=tile(CHUNK, VALUE_BLOCK))
    kernel = functools.partial(_forward_kernel, p, scale, reads is not None)
    blocks = ("block", value_dim // VALUE_BLOCK)
    return launch("scan_forward_walk", kernel, p, blocks, inputs, outputs, scratch, interpret)


def _forward_kernel(p: Plan, scale: float, corrects: bool, whole, mine, at) -> None:
    columns = _columns()

    def chunk(c, slot, state):
        rows, q, k, v = mine.rows.at[slot], mine.q.at[slot], mine.k.at[slot], mine.v.at[slot]
        mine.entry[...] = half(state)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine.entry, at.chunk(whole.states, c).at[:, columns])
        readers = [[(mine.reads.at[slot], mine.entry)]] if corrects else []
        scores, *read = products([(q, transposed(k))], *readers)
        mine.scores[...] = half(scale * pair_decays(rows) * scores)
        u = load(v)
        if corrects:
            u = times(row(rows, BETA), u - read[0])
            mine.u[...] = half(u)
        written = times(row(rows, AFTER), u)
        mine.written[...] = half(written)
        writes = [(transposed(k), mine.written)]
        if corrects:
            mine.rest[...] = half(rounding(written))
            writes.append((transposed(k), mine.rest))
        plgpu.commit_smem()
        o, inside = products([(q, mine.entry)], [(mine.scores, mine.u if corrects else v)])
        mine.out[...] = half(times(scale * row(rows, UPTO), o) + inside)
        state = mine.rows[slot, UPTO, CHUNK - 1] * state + products(writes)[0]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine.out, at.tokens(whole.out, c, columns))
        return state

    _walk(p, whole, mine, at, lambda step: step, chunk)


def backward_walk(q, k, do, reads, rows, dstate, p: Plan, scale: float, interpret):
    """-> du [B,T,HV,V] bfloat16, each chunk's dS' [B,HV,n,K,V] bfloat16, the initial state's gradient in float32.

    Args: as forward_walk's; do as v, dstate as state.
    """
    key_dim, value_dim = p.padded_dims
    inputs = dict(q=q, k=k, do=do, rows=rows, reads=reads, start=dstate)
    outputs = dict(
        du=(do.shape, jnp.bfloat16),
        dstates=((p.batch, p.value_heads, p.chunks, key_dim, value_dim), jnp.bfloat16),
        end=(dstate.shape, jnp.float32),
    )
    scratch = _fetched(inputs, p) | dict(
        exit=tile(key_dim, VALUE_BLOCK),
        scores=tile(CHUNK, CHUNK),
        read=tile(CHUNK, VALUE_BLOCK),
        du=tile(CHUNK, VALUE_BLOCK),
    )
    if reads is not None:
        scratch |= dict(corrected=tile(CHUNK, VALUE_BLOCK))
    kernel = functools.partial(_backward_kernel, p, scale, reads is not None)
    blocks = ("block", value_dim // VALUE_BLOCK)
    return launch("scan_backward_walk", kernel, p, blocks, inputs, outputs, scratch, interpret)


def _backward_kernel(p: Plan, scale: float, corrects: bool, whole, mine, at) -> None:
    columns = _columns()

    def chunk(c, slot, dstate):
        rows, q, k, do = mine.rows.at[slot], mine.q.at[slot], mine.k.at[slot], mine.do.at[slot]
        mine.exit[...] = half(dstate)
        mine.read[...] = half(times(scale * row(rows, UPTO), load(do)))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine.exit, at.chunk(whole.dstates, c).at[:, columns])
        scores, du = products([(q, transposed(k))], [(k, mine.exit)])
        mine.scores[...] = half(scale * pair_decays(rows) * scores)
        plgpu.commit_smem()
        du = times(row(rows, AFTER), du) + products([(transposed(mine.scores), do)])[0]
        mine.du[...] = half(du)
        reads = [(transposed(q), mine.read)]
        if corrects:
            mine.corrected[...] = half(-times(row(rows, BETA), du))
            reads.append((transposed(mine.reads.at[slot]), mine.corrected))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine.du, at.tokens(whole.du, c, columns))
        dstate = mine.rows[slot, UPTO, CHUNK - 1] * dstate + products(reads)[0]
        plgpu.commit_smem()
        return dstate

    _walk(p, whole, mine, at, lambda step: p.chunks - 1 - step, chunk)


def _columns():
    """Of values and states, what the program walks with."""
    return pl.ds(lax.axis_index("block") * VALUE_BLOCK, VALUE_BLOCK)


def _fetched(inputs: Mapping[str, Any], p: Plan) -> dict[str, Any]:
    """Scratch for what is fetched, chunk by chunk but for the state, and for the barriers where it arrives."""
    shapes = dict(
        q=tile(p.stages, CHUNK, p.padded_dims[0]),
        k=tile(p.stages, CHUNK, p.padded_dims[0]),
        reads=tile(p.stages, CHUNK, p.padded_dims[0]),
        v=tile(p.stages, CHUNK, VALUE_BLOCK),
        do=tile(p.stages, CHUNK, VALUE_BLOCK),
    )
    scratch = {name: shape for name, shape in shapes.items() if inputs.get(name) is not None}
    scratch["rows"] = floats(p.stages, *inputs["rows"].shape[3:])
    arrived = plgpu.Barrier(num_arrivals=len(scratch), num_barriers=p.stages)
    state = tile(p.padded_dims[0], VALUE_BLOCK, dtype=jnp.float32)
    return scratch | dict(arrived=arrived, state=state, started=plgpu.Barrier())


def _walk(p: Plan, whole, mine, at, order: Callable, chunk: Callable) -> None:
    """From `start` to `end`, state <- chunk(c, slot, state) for c = order(0), order(1), ..., inputs being in the slot.

    `chunk` has committed all that it does with its inputs when it returns: the slot is then filled anew.
    """
    columns = _columns()
    blocks = dict(
        q=lambda c: at.tokens(whole.q, c),
        k=lambda c: at.tokens(whole.k, c),
        reads=lambda c: at.tokens(whole.reads, c),
        v=lambda c: at.tokens(whole.v, c, columns),
        do=lambda c: at.tokens(whole.do, c, columns),
        rows=lambda c: at.chunk(whole.rows, c),
    )

    def fetch(step, slot):
        for name, block in blocks.items():
            if hasattr(whole, name):
                plgpu.copy_gmem_to_smem(block(order(step)), getattr(mine, name).at[slot], mine.arrived.at[slot])

    def body(step, state):
        slot = lax.rem(step, jnp.int32(p.stages))
        plgpu.barrier_wait(mine.arrived.at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what the last chunk handed out may be overwritten
        state = chunk(order(step), slot, state)
        pl.when(step + p.stages < p.chunks)(lambda: fetch(step + p.stages, slot))
        return state

    plgpu.copy_gmem_to_smem(at.state(whole.start, columns), mine.state, mine.started)
    for step in range(p.stages):
        fetch(step, step)
    plgpu.barrier_wait(mine.started)
    mine.state[...] = lax.fori_loop(jnp.int32(0), jnp.int32(p.chunks), body, plgpu.load(mine.state, layout=WGMMA))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mine.state, at.state(whole.end, columns))
    plgpu.wait_smem_to_gmem(0)
