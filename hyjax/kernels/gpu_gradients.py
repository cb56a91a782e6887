"""What is left of the scans' backward pass on Hopper GPUs when the states are known: all chunks at once.

As in gpu_walks.py. A chunk's readers x are q, with the output gradients y = do, and of the delta rule k as well, with
y = −w and for j < i alone. With the chunk's S, dS' and u,

    G = (y uᵀ) ∘ D                    [C, C]     (times scale for q, here and in dx)
    dx = G k + a ∘ (y Sᵀ)             [C, K]
    dk = Σ Gᵀ x + b ∘ (u dS'ᵀ)        [C, K]     (and dx of the reader k)

The gradient of a log decay is what crosses its token: Σ_{i>=t>j} R_ij of the pairs, R = Σ G ∘ (x kᵀ), taken as the sum
over j < t of (U R)_tj with U_ti = 1 for i >= t, in which no sum is subtracted from another (R goes in two halves of
bfloat16, right to 2^-17); and, for gpu_plan.gate_gradient to sum, x · a ∘ (y Sᵀ) and k · b ∘ (u dS'ᵀ) of each token
and Σ_v S ∘ dS'.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hyjax.kernels.gpu_plan import AFTER, CHUNK, UPTO, Plan
from hyjax.kernels.gpu_tiles import (
    OF_ROWS,
    floats,
    half,
    launch,
    load,
    pair_decays,
    places,
    products,
    rounding,
    row,
    tile,
    times,
    transposed,
)

PART = CHUNK  # key channels that are computed at a time


def chunk_gradients(q, k, u, do, w, rows, states, dstates, p: Plan, scale: float, interpret):
    """-> dq and dk of each value head [B,T,HV,K] bfloat16, and what gpu_plan.gate_gradient takes.

    Args, all fitted:
      u, do: [B, T, HV, V].
      w: as u, or None: q is the only reader.
      states, dstates: [B, HV, n, K, V], S and dS'.
    """
    key_dim, value_dim = p.padded_dims
    tokens, chunks = (p.batch, p.padded_time, p.value_heads), (p.batch, p.value_heads, p.chunks)
    inputs = dict(q=q, k=k, u=u, do=do, w=w, rows=rows, state=states, dstate=dstates)
    outputs = dict(
        dq=((*tokens, key_dim), jnp.bfloat16),
        dk=((*tokens, key_dim), jnp.bfloat16),
        sums=((*chunks, 3, CHUNK), jnp.float32),
        through=((*chunks, key_dim), jnp.float32),
    )
    keys, values, state, square = (
        tile(*shape) for shape in ((CHUNK, key_dim), (CHUNK, value_dim), (key_dim, value_dim), (CHUNK, CHUNK))
    )
    scratch = dict(q=keys, k=keys, u=values, do=values, state=state, dstate=state, rows=floats(*rows.shape[3:]))
    scratch |= dict(gq=square, pairs=square, rest=square, later=square)
    scratch |= dict(sums=floats(3, CHUNK), through=floats(key_dim))
    if w is not None:
        scratch |= dict(w=values, gk=square)
    scratch["arrived"] = plgpu.Barrier(num_arrivals=sum(x is not None for x in inputs.values()))
    kernel = functools.partial(_kernel, p, scale, w is not None)
    return launch("scan_chunk_gradients", kernel, p, ("chunk", p.chunks), inputs, outputs, scratch, interpret)


def _kernel(p: Plan, scale: float, corrects: bool, whole, mine, at) -> None:
    key_dim, value_dim = p.padded_dims
    c = lax.axis_index("chunk")
    for name in ("q", "k", "u", "do", "w"):
        if hasattr(whole, name):
            plgpu.copy_gmem_to_smem(at.tokens(getattr(whole, name), c), getattr(mine, name), mine.arrived)
    for name in ("rows", "state", "dstate"):
        plgpu.copy_gmem_to_smem(at.chunk(getattr(whole, name), c), getattr(mine, name), mine.arrived)
    plgpu.barrier_wait(mine.arrived)
    _pairs(scale, corrects, mine)
    dq, dk = mine.pairs, mine.rest  # PART is CHUNK: these tiles are free by now, and take results out
    upto, after = row(mine.rows, UPTO), row(mine.rows, AFTER)

    def part(step, sums):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the part before is out of dq and dk
        entering, leaving = sums
        channels = pl.ds(pl.multiple_of(step * PART, PART), PART)
        q, k = mine.q.at[:, channels], mine.k.at[:, channels]
        state, dstate = mine.state.at[channels], mine.dstate.at[channels]
        read, inside = products([(mine.do, transposed(state))], [(mine.gq, k)])
        read = times(scale * upto, read)
        entering += jnp.sum(load(q) * read, axis=1)
        dq[...] = half(read + inside)
        also = [[(mine.w, transposed(state))]] if corrects else []
        total, *corrected = products([(mine.u, transposed(dstate))], *also)
        total = times(after, total)
        leaving += jnp.sum(load(k) * total, axis=1)
        columns = [(transposed(mine.gq), q)]
        if corrects:
            read = times(-upto, corrected[0])
            entering += jnp.sum(load(k) * read, axis=1)
            total += read
            columns += [(mine.gk, k), (transposed(mine.gk), k)]
        total += products(columns)[0]
        dk[...] = half(total)
        plgpu.commit_smem()
        for tile_ref, target in ((dq, whole.dq), (dk, whole.dk)):
            plgpu.copy_smem_to_gmem(tile_ref, target.at[at.batch, pl.ds(c * CHUNK, CHUNK), at.head, channels])
        return entering, leaving

    def both(step, _):
        channels = pl.ds(pl.multiple_of(step * PART, PART), PART)
        blocks = [(channels, pl.ds(start, 64)) for start in range(0, value_dim, 64)]
        overlaps = (jnp.sum(load(mine.state.at[block]) * load(mine.dstate.at[block]), axis=1) for block in blocks)
        mine.through[channels] = sum(overlaps)

    # Loops that aren't unrolled: the compiler mixes the parts of one that is, and runs out of registers.
    zeros, parts = plgpu.layout_cast(jnp.zeros(CHUNK, jnp.float32), OF_ROWS), jnp.int32(key_dim // PART)
    mine.sums[1], mine.sums[2] = lax.fori_loop(jnp.int32(0), parts, part, (zeros, zeros))
    lax.fori_loop(jnp.int32(0), parts, both, None)
    plgpu.commit_smem()
    for name in ("sums", "through"):
        plgpu.copy_smem_to_gmem(getattr(mine, name), at.chunk(getattr(whole, name), c))
    plgpu.wait_smem_to_gmem(0)


def _pairs(scale: float, corrects: bool, mine) -> None:
    """The readers' G, committed, and the pairs' part of the gates' gradient."""
    (i, j), decays = places(), pair_decays(mine.rows)
    grads, scores = products([(mine.do, transposed(mine.u))], [(mine.q, transposed(mine.k))])
    grads = scale * decays * grads
    mine.gq[...] = half(grads)
    pairs = grads * scores
    if corrects:
        grads, scores = products([(mine.w, transposed(mine.u))], [(mine.k, transposed(mine.k))])
        grads = jnp.where(j < i, -decays * grads, 0.0)
        mine.gk[...] = half(grads)
        pairs += grads * scores
    mine.pairs[...], mine.rest[...] = half(pairs), half(rounding(pairs))
    mine.later[...] = half(jnp.where(j >= i, 1.0, 0.0))
    plgpu.commit_smem()
    crossing = products([(mine.later, mine.pairs), (mine.later, mine.rest)])[0]
    mine.sums[0] = jnp.sum(jnp.where(j < i, crossing, 0.0), axis=1)
    plgpu.commit_smem()
