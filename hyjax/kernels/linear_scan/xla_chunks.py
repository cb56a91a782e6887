"""linear_scan in chunks: matrix products inside a chunk, a walk over the states between chunks.

With d_t = e^{g_t} in [0, 1] and, inside a chunk of C tokens, D_ij = Π_{j<s<=i} d_s, a_i = Π_{s<=i} d_s and
b_j = Π_{s>j} d_s:

    o = a ∘ (q S) + (q kᵀ ∘ D) v        S' = a_C S + kᵀ (b ∘ v)

for a gate per head; for one per channel the decays stand inside the sums over channels. The products D, a, b are built
by doubling: two neighbouring blocks of m tokens meet as D_21 = a_2 b_1ᵀ, so every factor that is formed is a product of
decays, at most 1, without a difference of logarithms (which at gates of -50 loses digits to cancellation) and without
an exponential a pair. A document's first token has d = 0: everything that crosses it is an exact zero, gradients too.

The gradient of a log decay is the sum over the pairs that it separates, dg_t = Σ_{i>=t>j}: a reverse cumulative sum
over i >= t and a cumulative sum over j < t inside the chunk, each of terms that already carry their decay; nothing is
a total minus a prefix.

Shapes inside: q, k [n,B,H,C,K]; v [n,B,H,G,C,V]; decay [n,B,H,G,C,1 or K]; states [n,B,H,G,K,V]; n chunks, and G value
heads to each of the H key heads.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

# State products and their kin name their precision: the default is a bfloat16 product on a TPU.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _split(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, H, X] -> [T/C, B, H, C, X]."""
    b, t, h, x_dim = x.shape
    return x.reshape(b, t // chunk, chunk, h, x_dim).transpose(1, 0, 3, 2, 4)


def _merge(x: jax.Array) -> jax.Array:
    """[T/C, B, H, C, X] -> [B, T, H, X]."""
    n, b, h, c, x_dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(b, n * c, h, x_dim)


def _split_groups(x: jax.Array, chunk: int, heads: int) -> jax.Array:
    """[B, T, H*G, X] -> [T/C, B, H, G, C, X]."""
    b, t, all_heads, x_dim = x.shape
    x = x.reshape(b, t // chunk, chunk, heads, all_heads // heads, x_dim)
    return x.transpose(1, 0, 3, 4, 2, 5)


def _merge_groups(x: jax.Array) -> jax.Array:
    """[T/C, B, H, G, C, X] -> [B, T, H*G, X]."""
    n, b, h, g, c, x_dim = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(b, n * c, h * g, x_dim)


def _halves(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """[..., C, X] -> earlier and later blocks of `size` tokens, each [..., C/(2 size), size, X]."""
    x = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _join(earlier: jax.Array, later: jax.Array) -> jax.Array:
    """The inverse of _halves."""
    x = jnp.stack([earlier, later], axis=-3)
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def _levels(decay: jax.Array):
    """decay [..., C, X] -> [(size, a of the later blocks, b of the earlier blocks)], a and b of the whole chunk."""
    chunk = decay.shape[-2]
    upto, after = decay, jnp.ones_like(decay)
    levels, size = [], 1
    while size < chunk:
        (a1, a2), (b1, b2) = _halves(upto, size), _halves(after, size)
        levels.append((size, a2, b1))
        upto = _join(a1, a1[..., -1:, :] * a2)
        after = _join(b1 * a2[..., -1:, :], b2)
        size *= 2
    return levels, upto, after


def _assemble(diagonal: jax.Array, corners) -> jax.Array:
    """Lower-triangular [..., C, C] from its diagonal [..., C] and, size by size, the blocks [..., C/2m, m, m] below."""
    chunk = diagonal.shape[-1]
    blocks = diagonal.reshape(*diagonal.shape[:-1], chunk, 1, 1)
    size = 1
    for corner in corners:
        blocks = blocks.reshape(*blocks.shape[:-3], -1, 2, size, size)
        upper = jnp.concatenate([blocks[..., 0, :, :], jnp.zeros_like(corner)], axis=-1)
        lower = jnp.concatenate([corner, blocks[..., 1, :, :]], axis=-1)
        blocks = jnp.concatenate([upper, lower], axis=-2)
        size *= 2
    return blocks.reshape(*diagonal.shape, chunk)


def _corners(matrix: jax.Array, size: int) -> jax.Array:
    """[..., C, C] -> the blocks [..., C/2m, m, m] of later rows and earlier columns."""
    lead, chunk = matrix.shape[:-2], matrix.shape[-1]
    pairs = chunk // (2 * size)
    blocks = matrix.reshape(*lead, pairs, 2, size, pairs, 2, size)[..., :, 1, :, :, 0, :]
    return jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)


def _from_here_on(x: jax.Array) -> jax.Array:
    """Σ_{i>=t} x_i along the axis of a chunk's tokens, [..., C, X]."""
    size = x.shape[-2]
    return _einsum("ti,...ix->...tx", jnp.triu(jnp.ones((size, size), x.dtype)), x)


def _before_here(x: jax.Array) -> jax.Array:
    """Σ_{j<t} x_j along the axis of a chunk's tokens, [..., C, X]."""
    size = x.shape[-2]
    return _einsum("tj,...jx->...tx", jnp.tril(jnp.ones((size, size), x.dtype), -1), x)


def _walk(state: jax.Array, updates: jax.Array, decays: jax.Array, reverse: bool = False):
    """state <- decay * state + update over the leading axis -> the last state, and the state before each update."""

    def step(s, inputs):
        update, decay = inputs
        return decay * s + update, s

    return lax.scan(step, state, (updates, decays), reverse=reverse)


def _pairs(q: jax.Array, k: jax.Array, decay: jax.Array):
    """Decayed scores Σ_k q_ik k_jk D_ijk [n,B,H,G,C,C], D where the gate is per head (else None), levels, a, b."""
    levels, upto, after = _levels(decay)
    if decay.shape[-1] == 1:
        corners = [a * jnp.swapaxes(b, -1, -2) for _, a, b in levels]
        decays = _assemble(jnp.ones_like(decay[..., 0]), corners)
        scores = _einsum("nbhck,nbhdk->nbhcd", q, k)[:, :, :, None] * decays
        return scores, decays, levels, upto, after
    q, k = q[:, :, :, None], k[:, :, :, None]
    corners = []
    for size, a, b in levels:
        later, earlier = _halves(q, size)[1] * a, _halves(k, size)[0] * b
        corners.append(_einsum("...ck,...dk->...cd", later, earlier))
    diagonal = jnp.broadcast_to(jnp.sum(q * k, -1), decay.shape[:-1])
    return _assemble(diagonal, corners), None, levels, upto, after


def forward(q, k, v, decay, state, chunk):
    """q, k [B,T,H,K], v [B,T,HV,V], decay [B,T,HV,1 or K] in [0, 1], state [B,HV,K,V]; T a multiple of `chunk`.

    `chunk` is a power of two. Returns o [B,T,HV,V], the final state, and the states at the chunks' starts.
    """
    heads = k.shape[2]
    q, k = _split(q, chunk), _split(k, chunk)
    v, decay = _split_groups(v, chunk, heads), _split_groups(decay, chunk, heads)
    scores, _, _, upto, after = _pairs(q, k, decay)
    total = jnp.swapaxes(upto[..., -1:, :], -1, -2)  # [n,B,H,G,1 or K,1]
    if decay.shape[-1] == 1:
        updates = _einsum("nbhck,nbhgcv->nbhgkv", k, after * v)
    else:
        updates = _einsum("nbhgck,nbhgcv->nbhgkv", k[:, :, :, None] * after, v)
    end, states = _walk(state.reshape(updates.shape[1:]), updates, total)
    if decay.shape[-1] == 1:
        carried = upto * _einsum("nbhck,nbhgkv->nbhgcv", q, states)
    else:
        carried = _einsum("nbhgck,nbhgkv->nbhgcv", q[:, :, :, None] * upto, states)
    out = _einsum("nbhgcd,nbhgdv->nbhgcv", scores, v) + carried
    return _merge_groups(out), end.reshape(state.shape), states


def backward(q, k, v, decay, states, do, dstate, chunk):
    """The gradients of q, k, v, log decay (as `decay`'s shape) and initial state; `states` as forward returned them."""
    heads, shape = k.shape[2], dstate.shape
    q, k = _split(q, chunk), _split(k, chunk)
    v, decay, do = (_split_groups(x, chunk, heads) for x in (v, decay, do))
    scores, decays, levels, upto, after = _pairs(q, k, decay)
    total = jnp.swapaxes(upto[..., -1:, :], -1, -2)
    q_in, k_out = q[:, :, :, None] * upto, k[:, :, :, None] * after

    reads = _einsum("nbhgck,nbhgcv->nbhgkv", q_in, do)
    dinitial, dstates = _walk(dstate.reshape(reads.shape[1:]), reads, total, reverse=True)
    dscores = _einsum("nbhgcv,nbhgdv->nbhgcd", do, v)
    dv = _einsum("nbhgcd,nbhgcv->nbhgdv", scores, do) + _einsum("nbhgck,nbhgkv->nbhgcv", k_out, dstates)
    dq_state = upto * _einsum("nbhgcv,nbhgkv->nbhgck", do, states)
    dk_state = after * _einsum("nbhgcv,nbhgkv->nbhgck", v, dstates)

    # What crosses each token from the state before the chunk, to the state after it, and from one to the other.
    entering, leaving = q[:, :, :, None] * dq_state, k[:, :, :, None] * dk_state
    through = jnp.sum(states * dstates, axis=-1)[..., None, :]
    if decays is not None:
        entering, leaving, through = (jnp.sum(x, -1, keepdims=True) for x in (entering, leaving, through))
    dg = _from_here_on(entering) + _before_here(leaving) + upto[..., -1:, :] * through
    inside = _pairs_per_head if decays is not None else _pairs_per_channel
    dq_pairs, dk_pairs, dg_pairs = inside(q, k, scores, dscores, decays, levels)
    dq, dk = jnp.sum(dq_state, 3) + dq_pairs, jnp.sum(dk_state, 3) + dk_pairs
    return _merge(dq), _merge(dk), _merge_groups(dv), _merge_groups(dg + dg_pairs), dinitial.reshape(shape)


def _pairs_per_head(q, k, scores, dscores, decays, levels):
    """Gradients through the pairs inside a chunk, one gate a head: dq, dk [n,B,H,C,K], dg [n,B,H,G,C,1]."""
    dqk = jnp.sum(dscores * decays, axis=3)
    dq = _einsum("nbhcd,nbhdk->nbhck", dqk, k)
    dk = _einsum("nbhcd,nbhck->nbhdk", dqk, q)
    crossing = _from_here_on(jnp.tril(scores * dscores, -1))  # [..., t, j]: the sum over i >= t
    return dq, dk, jnp.sum(jnp.tril(crossing, -1), axis=-1, keepdims=True)


def _pairs_per_channel(q, k, scores, dscores, decays, levels):
    """As _pairs_per_head, with one gate a channel: dg [n,B,H,G,C,K]. Level by level, as the scores were built."""
    q, k = q[:, :, :, None], k[:, :, :, None]
    diagonal = jnp.diagonal(dscores, axis1=-2, axis2=-1)[..., None]
    dq, dk, dg = diagonal * k, diagonal * q, jnp.zeros_like(diagonal * k)
    for size, a, b in levels:
        corner = _corners(dscores, size)
        later, earlier = _halves(q, size)[1], _halves(k, size)[0]
        dlater = a * _einsum("...cd,...dk->...ck", corner, earlier * b)
        dearlier = b * _einsum("...cd,...ck->...dk", corner, later * a)
        dq += _join(jnp.zeros_like(dlater), dlater)
        dk += _join(dearlier, jnp.zeros_like(dearlier))
        dg += _join(_before_here(earlier * dearlier), _from_here_on(later * dlater))
    return jnp.sum(dq, 3), jnp.sum(dk, 3), dg
