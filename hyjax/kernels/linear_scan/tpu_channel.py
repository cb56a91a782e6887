"""The TPU kernels of linear_scan with one gate a channel.

A tile is 128 tokens. The decay between two tokens differs from channel to channel, so it stands inside the sums over
channels; it has to be cut in a factor of the query and one of the key, both at most 1. At level m = 1, 2, ..., 64 the
tile falls into blocks of 2m tokens, and a query i of a block's later half meets a key j of its earlier half by way of
the middle:

    e^{γ_i - γ_j} = a_i b_j      a_i from the start of i's block of m to i, b_j from j to the end of j's block of m

Every pair i > j meets at one level, that of the highest bit of i xor j: a level takes a product of the matrix unit, of
which its pairs are kept. a and b [tile, K] grow from level to level, by doubling: they are products of decays, without
a difference of logarithms and without an exponential a level, and a gate of -inf is a factor of 0. With P the decayed
scores, a and b those of the whole tile, S [V,K] the state at its start, and c the scale:

    forward:   P_ij = Σ_k (q a)_ik (k b)_jk by levels      o = c (P v + (q ∘ a) Sᵀ)      S' = a_last ∘ S + vᵀ (k ∘ b)

    backward, dS' the gradient of S', and at each level of the pairs dP = c do vᵀ:
               dq_m = a ∘ (dP (k ∘ b))      dk_m = b ∘ (dPᵀ (q ∘ a))      dq_S = c a ∘ (do S)      dk_S = b ∘ (v dS')
               dq = Σ_m dq_m + dq_S      dk = Σ_m dk_m + dk_S, with the pairs i = j, which don't decay
               dv = c Pᵀ do + (k ∘ b) dS'ᵀ      dS = a_last ∘ dS' + c doᵀ (q ∘ a)

A log decay g_t acts on the pairs that it separates. At a level they are those of the queries i >= t in t's half, where
that is the later one, and of the keys j < t, where it is the earlier one: with w = q ∘ dq_m + k ∘ dk_m, whose terms lie
in later and in earlier halves, a product with a matrix G_m of zeros and ones. The states have the same over the tile:

    dg_t = Σ_m (G_m w)_t + Σ_{i>=t} (q ∘ dq_S)_i + Σ_{j<t} (k ∘ dk_S)_j + a_last ∘ Σ_V S ∘ dS'
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels.linear_scan.tpu_plan import TILE, Plan
from hyjax.kernels.linear_scan.tpu_tiles import NN, NT, TN, dot, iota, rows, staggered, walk

# Halves of so many rows or more are whole registers, which are told apart for free; smaller ones are kept together.
LEAST_CUT = 8


class Level(NamedTuple):
    """A level of m tokens a half; the last is the whole tile, without pairs. The arrays are [TILE, K]."""

    size: int  # m
    start: jax.Array  # a
    end: jax.Array  # b
    total: jax.Array  # the product over a token's block of m

    def halves(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rows of earlier halves and of later ones [TILE / 2, X]; all rows, for both, where they are not cut."""
        if self.size < LEAST_CUT:
            return x, x
        blocks = x.reshape(-1, 2, self.size, x.shape[1])
        return blocks[:, 0].reshape(-1, x.shape[1]), blocks[:, 1].reshape(-1, x.shape[1])

    def join(self, earlier: jax.Array, later: jax.Array) -> jax.Array:
        """The inverse: [TILE, X]."""
        if self.size < LEAST_CUT:
            return jnp.where(self._in_later(later), later, earlier)
        blocks = [x.reshape(-1, self.size, x.shape[1]) for x in (earlier, later)]
        return jnp.stack(blocks, axis=1).reshape(TILE, -1)

    def doubled(self) -> "Level":
        """The next level."""
        if self.size < LEAST_CUT:
            other = self.join(pltpu.roll(self.total, TILE - self.size, 0), pltpu.roll(self.total, self.size, 0))
        else:
            other = self.join(*reversed(self.halves(self.total)))
        (start, later_start), (end, later_end), others = map(self.halves, (self.start, self.end, other))
        start, end = self.join(start, later_start * others[1]), self.join(end * others[0], later_end)
        return Level(2 * self.size, start, end, self.total * other)

    def _in_later(self, x: jax.Array) -> jax.Array:
        return (lax.broadcasted_iota(jnp.int32, x.shape, 0) & self.size) != 0


def _first_level(log_decay: jax.Array) -> Level:
    decay = jnp.exp(log_decay)
    return Level(1, decay, jnp.ones_like(decay), decay)


def _whole(log_decay: jax.Array) -> Level:
    """The last level."""
    level = _first_level(log_decay)
    while level.size < TILE:
        level = level.doubled()
    return level


def _bits(transposed: bool = False) -> jax.Array:
    """i xor j at [i, j], or at [j, i]; -1 for i < j. A pair meets at the level m <= i xor j < 2m."""
    i, j = (iota(1), iota(0)) if transposed else (iota(0), iota(1))
    return jnp.where(i >= j, i ^ j, -1)


def _own_scores(q: jax.Array, k: jax.Array, bits: jax.Array) -> jax.Array:
    """P of the pairs i = j."""
    own = jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=1, keepdims=True)
    return jnp.where(bits == 0, own, 0.0)


def _add_scores(scores: jax.Array, level: Level, pairs: jax.Array, bits: jax.Array) -> jax.Array:
    """P with the pairs of a level, from the products (q a)(k b)ᵀ of its later rows."""
    (earlier, later), (_, which) = level.halves(scores), level.halves(bits)
    return level.join(earlier, jnp.where(which >= level.size, pairs, later))


def _scores(q: jax.Array, k: jax.Array, level: Level) -> tuple[jax.Array, Level]:
    """P, zero for i < j, from the first level; and the last level."""
    bits = _bits()
    scores = _own_scores(q, k, bits)
    while level.size < TILE:
        later = _scaled(level.halves(q)[1], level.halves(level.start)[1])
        scores = _add_scores(scores, level, dot(later, _scaled(k, level.end), NT), bits)
        level = level.doubled()
    return scores, level


def _scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def _update(state: jax.Array, k: jax.Array, v: jax.Array, whole: Level) -> jax.Array:
    """The state after a tile."""
    return whole.total[:1] * state + dot(v, _scaled(k, whole.end), TN)


def forward_kernel(p: Plan, scale, q_ref, k_ref, v_ref, gates_ref, first_ref, o_ref, states_ref, state_ref):
    """Of one chunk and some heads. `state_ref` stays in place from chunk to chunk, and is written after the last."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        state_ref[...] = first_ref[...]

    states_ref[...] = state_ref[...]
    for tile, key, heads in walk(p):
        q, k = q_ref[key, rows(tile)], k_ref[key, rows(tile)]
        for head in heads:
            v, state = v_ref[head, rows(tile)], state_ref[head]
            scores, whole = _scores(q, k, _first_level(gates_ref[head, rows(tile)]))
            o = dot(scores.astype(v.dtype), v, NN) + dot(_scaled(q, whole.start), state.astype(q.dtype), NT)
            o_ref[head, rows(tile)] = (scale * o).astype(o_ref.dtype)
            state_ref[head] = _update(state, k, v, whole)


def backward_kernel(p: Plan, scale, *refs):
    """Of one chunk and some heads, the last chunk first; `dstate_ref` as the forward kernel's `state_ref`."""
    q_ref, k_ref, v_ref, gates_ref, states_ref, do_ref, dlast_ref = refs[:7]
    dq_ref, dk_ref, dv_ref, dg_ref, dstate_ref = refs[7:]

    @pl.when(pl.program_id(2) == 0)
    def _():
        dstate_ref[...] = dlast_ref[...]

    entries = _entry_states(p, k_ref, v_ref, gates_ref, states_ref)
    for tile, key, heads in walk(p, backwards=True):
        q, k = q_ref[key, rows(tile)], k_ref[key, rows(tile)]
        dq, dk = jnp.zeros(q.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32)
        for head in heads:
            inputs = (q, k, v_ref[head, rows(tile)], do_ref[head, rows(tile)])
            states = (entries[tile, head], dstate_ref[head])
            *shared, dv, dg, dstate_ref[head] = _gradients(inputs, gates_ref[head, rows(tile)], states, scale)
            dq, dk = dq + shared[0], dk + shared[1]
            dv_ref[head, rows(tile)] = dv.astype(dv_ref.dtype)
            dg_ref[head, rows(tile)] = dg
        dq_ref[key, rows(tile)] = dq.astype(dq_ref.dtype)
        dk_ref[key, rows(tile)] = dk.astype(dk_ref.dtype)


def _entry_states(p: Plan, k_ref, v_ref, gates_ref, states_ref) -> dict[tuple[int, int], jax.Array]:
    """By tile and head, from the states at the chunk's start."""
    entries = {(0, head): states_ref[head] for head in range(p.heads)}
    for tile, key, heads in walk(p):
        for head in heads if tile < p.tiles - 1 else ():
            k, v, whole = k_ref[key, rows(tile)], v_ref[head, rows(tile)], _whole(gates_ref[head, rows(tile)])
            entries[tile + 1, head] = _update(entries[tile, head], k, v, whole)
    return entries


def _gradients(inputs, log_decay: jax.Array, states, scale):
    """One head's (dq, dk, dv, dg, dS); states: (S, dS')."""
    (q, k, _, do), (_, dstate) = inputs, states
    scores, whole, dq, dk, dg = _pair_gradients(inputs, log_decay, scale)
    dq_state, dk_state, dg_state = _state_gradients(inputs, whole, states, scale)
    dv = scale * dot(scores, do, TN) + dot(_scaled(k, whole.end), dstate.astype(q.dtype), NT)
    dstate = whole.total[:1] * dstate + scale * dot(do, _scaled(q, whole.start), TN)
    return dq + dq_state, dk + dk_state, dv, dg + dg_state, dstate


def _state_gradients(inputs, whole: Level, states, scale):
    """(dq_S, dk_S, dg of the rows that read S, of those that S' keeps, and of S on its way to S')."""
    (q, k, v, do), (state, dstate) = inputs, states
    dq = scale * whole.start * dot(do, state.astype(q.dtype), NN)
    dk = whole.end * dot(v, dstate.astype(q.dtype), NN)
    dg = whole.total[:1] * jnp.sum(state * dstate, axis=0, keepdims=True)
    dg += _sums(iota(0) <= iota(1), q * dq, q.dtype) + _sums(iota(0) > iota(1), k * dk, q.dtype)
    return dq, dk, dg


def _pair_gradients(inputs, log_decay: jax.Array, scale):
    """(P as do's dtype, the last level, and of the pairs dq, dk, dg)."""
    q, k, v, do = inputs
    bits, bits_transposed = _bits(), _bits(transposed=True)
    dpairs, dpairs_transposed = scale * dot(do, v, NT), scale * dot(v, do, NT)
    own = jnp.sum(jnp.where(bits == 0, dpairs, 0.0), axis=1, keepdims=True)
    scores, dq, dk, dg = _own_scores(q, k, bits), own * k, own * q, jnp.zeros(q.shape, jnp.float32)
    levels = [_first_level(log_decay)]

    def products(n):
        level = levels[n]
        later, earlier = _scaled(q, level.start), _scaled(k, level.end)
        of_level = lambda which, x: jnp.where((which >= level.size) & (which < 2 * level.size), x, 0.0).astype(q.dtype)
        met = of_level(level.halves(bits)[1], level.halves(dpairs)[1])
        met_transposed = of_level(level.halves(bits_transposed)[0], level.halves(dpairs_transposed)[0])
        levels.append(level.doubled())
        return dot(level.halves(later)[1], earlier, NT), dot(met, earlier, NN), dot(met_transposed, later, NN)

    def of_inputs(n, made):
        nonlocal scores, dq, dk
        level, (pairs, dlater, dearlier) = levels[n], made
        scores = _add_scores(scores, level, pairs, bits)
        dlater, dearlier = level.halves(level.start)[1] * dlater, level.halves(level.end)[0] * dearlier
        (dq_earlier, dq_later), (dk_earlier, dk_later) = level.halves(dq), level.halves(dk)
        dq, dk = level.join(dq_earlier, dq_later + dlater), level.join(dk_earlier + dearlier, dk_later)
        w = level.join(level.halves(k)[0] * dearlier, level.halves(q)[1] * dlater)
        return _sums(_half_sums(level.size), w, q.dtype)

    def of_gates(_, made):
        nonlocal dg
        dg += made

    staggered(range(TILE.bit_length() - 1), products, of_inputs, of_gates)
    return scores.astype(do.dtype), levels[-1], dq, dk, dg


def _sums(where: jax.Array, x: jax.Array, dtype) -> jax.Array:
    """Sums of rows of x: a matrix of zeros and ones times x."""
    return dot(where.astype(dtype), x.astype(dtype), NN)


def _half_sums(size: int) -> jax.Array:
    """Where G_m [t, i] is one."""
    t, i = iota(0), iota(1)
    return ((t ^ i) < size) & (((i & size) != 0) == (t <= i))
