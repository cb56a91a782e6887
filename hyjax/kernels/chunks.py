"""What the chunked scans share: how time is cut, products of decays by doubling, and decayed scores with gradients.

With d_t = e^{g_t} in [0, 1] and, inside a chunk of C tokens, D_ij = Π_{j<s<=i} d_s, a_i = Π_{s<=i} d_s and
b_j = Π_{s>j} d_s. D, a and b are built by doubling: two neighbouring blocks of m tokens meet as D_21 = a_2 b_1ᵀ, so
every factor that is formed is a product of decays, at most 1, without a difference of logarithms (which at gates of -50
loses digits to cancellation) and without an exponential a pair. A document's first token has d = 0: everything that
crosses it is an exact zero, gradients too.

Shapes inside a chunked scan: q, k [n,B,H,C,K]; v [n,B,H,G,C,V]; decay [n,B,H,G,C,1 or K]; states [n,B,H,G,K,V]; n
chunks, and G value heads to each of the H key heads.
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hyjax.kernels import dispatch
from hyjax.kernels.layouts import halves, join, rows

# State products and their kin name their precision: the default is a bfloat16 product on a TPU.
einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Plan(NamedTuple):
    """The form of a scan, and how time is cut."""

    form: str  # "token", "steps" or "chunks"
    chunk: int  # tokens a chunk; a power of two for "chunks"
    pieces: int  # walked one after the other, so that what lives inside one stays in the cache
    time: int  # tokens, padded to whole pieces of whole chunks


def plan(q_shape, v_shape, per_channel: bool, chunk_size: int | None, tables: ModuleType) -> Plan:
    """How a call of these shapes is served on the default backend; `tables` is the operator's block_sizes."""
    (batch, time, _, key_dim), (heads, value_dim) = q_shape, v_shape[2:]
    if time == 1:
        return Plan("token", 1, 1, 1)
    most_state, least_rows = dispatch.by_backend(tables.STEPS)
    if chunk_size is None and key_dim * value_dim <= most_state and batch * heads >= least_rows:
        chunk = min(tables.STEPS_SAVED, time)
        return Plan("steps", chunk, 1, -(-time // chunk) * chunk)
    chunk = chunk_size
    if chunk is None:
        chunk = dispatch.by_backend(tables.CHUNK)["channel" if per_channel else "head"]
    chunk = 1 << (min(chunk, time) - 1).bit_length()
    chunks = -(-time // chunk)
    numbers = max(1, batch) * heads * chunk * max(chunk, key_dim, value_dim)
    pieces = -(-chunks // max(1, dispatch.by_backend(tables.PIECE) // numbers))
    return Plan("chunks", chunk, pieces, pieces * -(-chunks // pieces) * chunk)


class Decays(NamedTuple):
    """The products of a chunk's decays."""

    upto: jax.Array  # a [n,B,H,G,C,1 or K]
    after: jax.Array  # b, likewise
    levels: list[
        tuple[jax.Array, jax.Array]
    ]  # of m = 1, 2, 4, ..., C/2: a of later, b of earlier [n,B,H,G*C/2m,m,1 or K]
    pairs: jax.Array | None  # D [n,B,H,G,C,C] of a gate per head; else it stays inside the sums over channels


def products(decay: jax.Array) -> Decays:
    """decay [n,B,H,G,C,1 or K] -> its products."""
    chunk = decay.shape[-2]
    upto = rows(decay)
    after, levels, size = jnp.ones_like(upto), [], 1
    while size < chunk:
        (a1, a2), (b1, b2) = halves(upto, size), halves(after, size)
        levels.append((a2, b1))
        upto = join(a1, a1[..., -1:, :] * a2)
        after = join(b1 * a2[..., -1:, :], b2)
        size *= 2
    # Without the barrier XLA fuses the whole chain of products into each of its many uses, and computes it every time.
    upto, after, levels = lax.optimization_barrier((upto.reshape(decay.shape), after.reshape(decay.shape), levels))
    pairs = None
    if decay.shape[-1] == 1:
        pairs = _assemble(jnp.ones_like(decay[..., 0]), [a * jnp.swapaxes(b, -1, -2) for a, b in levels])
    return Decays(upto, after, levels, pairs)


def extend(blocks: jax.Array, corner: jax.Array) -> jax.Array:
    """Diagonal blocks [..., R/m, m, m] -> [..., R/2m, 2m, 2m]: two by two, with `corner` [..., R/2m, m, m] below."""
    size = blocks.shape[-1]
    blocks = blocks.reshape(*blocks.shape[:-3], -1, 2, size, size)
    upper = jnp.concatenate([blocks[..., 0, :, :], jnp.zeros_like(corner)], axis=-1)
    lower = jnp.concatenate([corner, blocks[..., 1, :, :]], axis=-1)
    return jnp.concatenate([upper, lower], axis=-2)


def corners(matrix: jax.Array, size: int) -> jax.Array:
    """[..., G, C, C] -> the blocks [..., G*C/2m, m, m] of later rows and earlier columns."""
    pairs = matrix.shape[-1] // (2 * size)
    blocks = matrix.reshape(*matrix.shape[:-2], pairs, 2, size, pairs, 2, size)[..., :, 1, :, :, 0, :]
    blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
    return blocks.reshape(*matrix.shape[:-3], -1, size, size)


def _assemble(diagonal: jax.Array, below: Sequence[jax.Array]) -> jax.Array:
    """Lower-triangular [..., G, C, C] from its diagonal [..., G, C] and the blocks [..., G*C/2m, m, m] below it."""
    blocks = diagonal.reshape(*diagonal.shape[:-2], -1, 1, 1)
    for corner in below:
        blocks = extend(blocks, corner)
    return blocks.reshape(*diagonal.shape, diagonal.shape[-1])


def _add(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(operator.add, terms)


def _sum_tokens(weights: np.ndarray, x: jax.Array) -> jax.Array:
    """Σ_i weights_ti x_i along the axis of tokens, [..., C, X]."""
    # Weights that are broadcast over chunks and heads make a batched product; else XLA transposes all of x.
    spread = jnp.broadcast_to(jnp.asarray(weights, x.dtype), (*x.shape[:-2], *weights.shape))
    return einsum("...ti,...ix->...tx", spread, x)


def from_here_on(x: jax.Array) -> jax.Array:
    """Σ_{i>=t} x_i along the axis of tokens, [..., C, X]."""
    return _sum_tokens(np.triu(np.ones((x.shape[-2],) * 2)), x)


def before_here(x: jax.Array) -> jax.Array:
    """Σ_{j<t} x_j along the axis of tokens, [..., C, X]."""
    return _sum_tokens(np.tril(np.ones((x.shape[-2],) * 2), -1), x)


def _every_group(x: jax.Array, decays: Decays) -> jax.Array:
    """[n,B,H,C,K] -> [n,B,H,G*C,K]."""
    n, b, h, c, k = x.shape
    return rows(jnp.broadcast_to(x[:, :, :, None], (n, b, h, decays.upto.shape[3], c, k)))


def scores(q: jax.Array, k: jax.Array, decays: Decays) -> jax.Array:
    """Decayed scores Σ_k q_ik k_jk D_ijk for i >= j, else 0: [n,B,H,G,C,C]."""
    if decays.pairs is not None:
        return einsum("nbhck,nbhdk->nbhcd", q, k)[:, :, :, None] * decays.pairs
    diagonal = jnp.broadcast_to(jnp.sum(q * k, -1)[:, :, :, None], decays.upto.shape[:-1])
    q, k = _every_group(q, decays), _every_group(k, decays)
    below = []
    for level, (a, b) in enumerate(decays.levels):
        later, earlier = halves(q, 1 << level)[1] * a, halves(k, 1 << level)[0] * b
        below.append(einsum("...ck,...dk->...cd", later, earlier))
    return _assemble(diagonal, below)


def scores_gradients(kinds, k, decays: Decays):
    """Gradients through `scores`: of each q and of k [n,B,H,C,K], and of the chunk's log decays [n,B,H,G,C,1 or K].

    `kinds` holds, for each kind of q that met these keys, (q, its scores, their gradient).

    The gradient of a log decay is the sum over the pairs that it separates, dg_t = Σ_{i>=t>j}: a reverse cumulative sum
    over i >= t and a cumulative sum over j < t inside the chunk, each of terms that already carry their decay; nothing
    is a total minus a prefix.
    """
    if decays.pairs is None:
        return _per_channel([(q, dscores) for q, _, dscores in kinds], k, decays)
    dots = [jnp.sum(dscores * decays.pairs, axis=3) for _, _, dscores in kinds]
    dq = [einsum("nbhcd,nbhdk->nbhck", d, k) for d in dots]
    dk = _add(einsum("nbhcd,nbhck->nbhdk", d, q) for d, (q, _, _) in zip(dots, kinds, strict=True))
    separated = _add(jnp.tril(scores * dscores, -1) for _, scores, dscores in kinds)
    crossing = from_here_on(separated)  # [..., t, j]: the sum over i >= t
    return dq, dk, jnp.sum(jnp.tril(crossing, -1), axis=-1, keepdims=True)


def _per_channel(kinds, k, decays: Decays):
    """scores_gradients with a gate a channel, level by level, as the scores were built; `kinds`: (q, dscores)."""
    kinds, k = [(_every_group(q, decays), dscores) for q, dscores in kinds], _every_group(k, decays)
    diagonals = [rows(jnp.diagonal(dscores, axis1=-2, axis2=-1)[..., None]) for _, dscores in kinds]
    dq = [diagonal * k for diagonal in diagonals]
    dk = _add(diagonal * q for diagonal, (q, _) in zip(diagonals, kinds, strict=True))
    dg = jnp.zeros_like(dk)
    for level, (a, b) in enumerate(decays.levels):
        size = 1 << level
        earlier = halves(k, size)[0]
        pairs = [(halves(q, size)[1], corners(dscores, size)) for q, dscores in kinds]
        dlater = [a * einsum("...cd,...dk->...ck", corner, earlier * b) for _, corner in pairs]
        dearlier = b * _add(einsum("...cd,...ck->...dk", corner, later * a) for later, corner in pairs)
        dq = [old + join(jnp.zeros_like(new), new) for old, new in zip(dq, dlater, strict=True)]
        dk += join(dearlier, jnp.zeros_like(dearlier))
        from_later = from_here_on(_add(later * new for (later, _), new in zip(pairs, dlater, strict=True)))
        dg += join(before_here(earlier * dearlier), from_later)
    *dq, dk, dg = lax.optimization_barrier((*dq, dk, dg))  # else the transposition that follows takes the sums apart
    shape = decays.upto.shape
    return [jnp.sum(x.reshape(shape), 3) for x in dq], jnp.sum(dk.reshape(shape), 3), dg.reshape(shape)
