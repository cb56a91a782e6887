"""The TPU kernels of linear_scan with one gate a head.

A tile is 128 tokens. With γ the inclusive sum of log decays from its start (hi and lo parts: hyjax.kernels.tpu_gates),
D_ij = e^{γ_i - γ_j} for i >= j and else 0, a_i = e^{γ_i}, b_j = e^{γ_last - γ_j}, S [V,K] the state at its start
(transposed: V is often the smaller one, and lanes should be full), and c the scale:

    forward:   o = c (a ∘ (q Sᵀ) + (q kᵀ ∘ D) v)        S' = a_last S + vᵀ (b ∘ k)

    backward, with dS' the gradient of S', and pairs transposed (keys along sublanes):
               xᵀ = k qᵀ ∘ c Dᵀ      yᵀ = v doᵀ ∘ c Dᵀ      dq_S = c a ∘ (do S)      dk_S = b ∘ (v dS')
               dv = xᵀ do + b ∘ (k dS'ᵀ)     dq = y k + dq_S      dk = yᵀ q + dk_S
               dS = a_last dS' + doᵀ (c a ∘ q)

A log decay g_t acts on the pairs that it separates, on rows i >= t that read S, on columns j < t that S' keeps, and on
S on its way to S'. With wᵀ = yᵀ ∘ k qᵀ and zᵀ_jt = Σ_{i>=t} wᵀ_ji, a product with a triangle of ones,

    dg_t = Σ_{j<t} (zᵀ_jt + k_j·dk_S_j) + Σ_{i>=t} q_i·dq_S_i + a_last Σ S ∘ dS'

where the first two sums run down the sublanes of one [128, 128] array. Value heads that share a key head add their yᵀ,
so that dq and dk take one product each.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from hyjax.kernels.linear_scan.tpu_plan import TILE, Plan
from hyjax.kernels.linear_scan.tpu_tiles import NN, NT, TN, dot, iota, rows, staggered, walk


class Decays(NamedTuple):
    """A tile's decays: as a column they are [TILE, TILE], alike along lanes, as a row [1, TILE]."""

    hi: jax.Array  # columns
    lo: jax.Array
    hi_row: jax.Array
    lo_row: jax.Array

    @property
    def start(self) -> jax.Array:
        """a, a column."""
        return jnp.exp(self.hi + self.lo)

    @property
    def end(self) -> jax.Array:
        """b, a column."""
        return jnp.exp((self.hi[-1:] - self.hi) + (self.lo[-1:] - self.lo))

    @property
    def total(self) -> jax.Array:
        """a_last, alike along a row."""
        return jnp.exp(self.hi[-1:] + self.lo[-1:])

    def pairs(self) -> jax.Array:
        """D [i, j]."""
        exponent = (self.hi - self.hi_row) + (self.lo - self.lo_row)
        return jnp.exp(jnp.where(iota(0) >= iota(1), exponent, -jnp.inf))

    def pairs_transposed(self) -> jax.Array:
        """Dᵀ [j, i]."""
        exponent = (self.hi_row - self.hi) + (self.lo_row - self.lo)
        return jnp.exp(jnp.where(iota(1) >= iota(0), exponent, -jnp.inf))


def _decays(sums: jax.Array) -> Decays:
    """From a tile's hi and lo, [2, TILE]."""
    hi, lo = sums[:1], sums[1:]
    column = lambda row: jnp.broadcast_to(row, (TILE, TILE)).T
    return Decays(column(hi), column(lo), hi, lo)


def _times(column: jax.Array, x: jax.Array) -> jax.Array:
    """A column, or a row alike along lanes, times x [TILE or so, D], in float32."""
    dim = x.shape[1]
    column = column[:, :dim] if dim <= TILE else jnp.tile(column, (1, dim // TILE))
    return column * x.astype(jnp.float32)


def _update(state: jax.Array, k: jax.Array, v: jax.Array, decays: Decays) -> jax.Array:
    """The state after a tile."""
    return _times(decays.total, state) + dot(v, _times(decays.end, k).astype(k.dtype), TN)


def forward_kernel(p: Plan, scale, q_ref, k_ref, v_ref, sums_ref, first_ref, o_ref, states_ref, state_ref):
    """Of one chunk and some heads. `state_ref` stays in place from chunk to chunk, and is written after the last."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_ref[...] = first_ref[...]

    states_ref[...] = state_ref[...]

    def products(item):
        tile, head, (_, k, dots) = item
        v, decays = v_ref[head, rows(tile)], _decays(sums_ref[head, tile])
        inside = dot((dots * decays.pairs()).astype(v.dtype), v, NN)
        return inside, dot(v, _times(decays.end, k).astype(k.dtype), TN), decays

    def through_state(item, made):
        (tile, head, (q, _, _)), (inside, update, decays) = item, made
        state = state_ref[head]
        o = inside + _times(decays.start, dot(q, state.astype(q.dtype), NT))
        o_ref[head, rows(tile)] = (scale * o).astype(o_ref.dtype)
        state_ref[head] = _times(decays.total, state) + update

    items = []
    for tile, key, heads in walk(p):
        q, k = q_ref[key, rows(tile)], k_ref[key, rows(tile)]
        shared = (q, k, dot(q, k, NT))
        items += [(tile, head, shared) for head in heads]
    staggered(items, products, through_state)


def backward_kernel(p: Plan, scale, *refs):
    """Of one chunk and some heads, the last chunk first; `dstate_ref` as the forward kernel's `state_ref`."""
    q_ref, k_ref, v_ref, sums_ref, states_ref, do_ref, dlast_ref = refs[:7]
    dq_ref, dk_ref, dv_ref, dg_ref, dstate_ref = refs[7:]

    @pl.when(pl.program_id(2) == 0)
    def _():
        dstate_ref[...] = dlast_ref[...]

    entries = _entry_states(p, k_ref, v_ref, sums_ref, states_ref)
    for tile, key, heads in walk(p, backwards=True):
        q, k = q_ref[key, rows(tile)], k_ref[key, rows(tile)]
        dots = dot(k, q, NT)
        sums = [jnp.zeros(shape, jnp.float32) for shape in ((TILE, TILE), q.shape, k.shape)]
        for head in heads:
            inputs = (q, k, v_ref[head, rows(tile)], do_ref[head, rows(tile)])
            states = (entries[tile, head], dstate_ref[head])
            shared, dv, dg, dstate_ref[head] = _gradients(inputs, dots, _decays(sums_ref[head, tile]), states, scale)
            dv_ref[head, rows(tile)] = dv.astype(dv_ref.dtype)
            dg_ref[head, tile] = dg
            sums = [a + b for a, b in zip(sums, shared, strict=True)]
        dpairs, dq, dk = sums
        dpairs = dpairs.astype(q.dtype)
        dq_ref[key, rows(tile)] = (dq + dot(dpairs, k, TN)).astype(dq_ref.dtype)
        dk_ref[key, rows(tile)] = (dk + dot(dpairs, q, NN)).astype(dk_ref.dtype)


def _entry_states(p: Plan, k_ref, v_ref, sums_ref, states_ref) -> dict[tuple[int, int], jax.Array]:
    """By tile and head, from the states at the chunk's start."""
    entries = {(0, head): states_ref[head] for head in range(p.heads)}
    for tile, key, heads in walk(p):
        for head in heads if tile < p.tiles - 1 else ():
            k, v = k_ref[key, rows(tile)], v_ref[head, rows(tile)]
            entries[tile + 1, head] = _update(entries[tile, head], k, v, _decays(sums_ref[head, tile]))
    return entries


def _gradients(inputs, dots, decays: Decays, states, scale):
    """One head's: ((yᵀ, dq_S, dk_S), dv, dg, dS); states: (S, dS'), dots: k qᵀ."""
    (q, k, v, do), (state, dstate) = inputs, states
    reads, start = scale * decays.pairs_transposed(), scale * decays.start
    state_in, dstate_in = state.astype(q.dtype), dstate.astype(q.dtype)
    dq = _times(start, dot(do, state_in, NN))
    dk = _times(decays.end, dot(v, dstate_in, NN))
    dpairs = dot(v, do, NT) * reads
    dv = dot((dots * reads).astype(do.dtype), do, NN) + _times(decays.end, dot(k, dstate_in, NT))
    earlier = iota(0) < iota(1)  # [j, t]
    triangle = (iota(0) >= iota(1)).astype(q.dtype)  # [i, t]
    crossing = dot((dpairs * dots).astype(q.dtype), triangle, NN)
    leaving = jnp.sum(k.astype(jnp.float32) * dk, axis=1, keepdims=True)
    entering = jnp.sum(q.astype(jnp.float32) * dq, axis=1, keepdims=True)
    dg = jnp.sum(jnp.where(earlier, crossing + leaving, entering), axis=0, keepdims=True)
    dg += decays.total * jnp.sum(state * dstate)
    dstate = _times(decays.total, dstate) + dot(do, _times(start, q).astype(q.dtype), TN)
    return (dpairs, dq, dk), dv, dg, dstate
