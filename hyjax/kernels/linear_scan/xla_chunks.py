"""linear_scan in chunks: matrix products inside a chunk, a walk over the states between chunks.

With the decays D (from token to token), a (from the chunk's start) and b (to its end) of hyjax.kernels.chunks:

    o = a ∘ (q S) + (q kᵀ ∘ D) v        S' = a_C S + kᵀ (b ∘ v)

for a gate per head; for one per channel the decays stand inside the sums over channels. Shapes are those of
hyjax.kernels.chunks.
"""

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels import chunks
from hyjax.kernels.chunks import einsum
from hyjax.kernels.layouts import merge, merge_groups, split, split_groups


def _walk(state: jax.Array, updates: jax.Array, decays: jax.Array, reverse: bool = False):
    """state <- decay * state + update over the leading axis -> the last state, and the state before each update."""

    def step(s, inputs):
        update, decay = inputs
        return decay * s + update, s

    return lax.scan(step, state, (updates, decays), reverse=reverse)


def forward(q, k, v, decay, state, chunk):
    """q, k [B,T,H,K], v [B,T,HV,V], decay [B,T,HV,1 or K] in [0, 1], state [B,HV,K,V]; T a multiple of `chunk`.

    `chunk` is a power of two. Returns o [B,T,HV,V], the final state, and the states at the chunks' starts.
    """
    heads = k.shape[2]
    q, k = split(q, chunk), split(k, chunk)
    v, decay = split_groups(v, chunk, heads), split_groups(decay, chunk, heads)
    decays = chunks.products(decay)
    upto, after = decays.upto, decays.after
    scores = chunks.scores(q, k, decays)
    total = jnp.swapaxes(upto[..., -1:, :], -1, -2)  # [n,B,H,G,1 or K,1]
    if decay.shape[-1] == 1:
        updates = einsum("nbhck,nbhgcv->nbhgkv", k, after * v)
    else:
        updates = einsum("nbhgck,nbhgcv->nbhgkv", k[:, :, :, None] * after, v)
    end, states = _walk(state.reshape(updates.shape[1:]), updates, total)
    if decay.shape[-1] == 1:
        carried = upto * einsum("nbhck,nbhgkv->nbhgcv", q, states)
    else:
        carried = einsum("nbhgck,nbhgkv->nbhgcv", q[:, :, :, None] * upto, states)
    out = einsum("nbhgcd,nbhgdv->nbhgcv", scores, v) + carried
    return merge_groups(out), end.reshape(state.shape), states


def backward(q, k, v, decay, states, do, dstate, chunk):
    """The gradients of q, k, v, log decay (as `decay`'s shape) and initial state; `states` as forward returned them."""
    heads, shape = k.shape[2], dstate.shape
    q, k = split(q, chunk), split(k, chunk)
    v, decay, do = (split_groups(x, chunk, heads) for x in (v, decay, do))
    decays = chunks.products(decay)
    upto, after = decays.upto, decays.after
    scores = chunks.scores(q, k, decays)
    total = jnp.swapaxes(upto[..., -1:, :], -1, -2)
    q_in, k_out = q[:, :, :, None] * upto, k[:, :, :, None] * after

    reads = einsum("nbhgck,nbhgcv->nbhgkv", q_in, do)
    dinitial, dstates = _walk(dstate.reshape(reads.shape[1:]), reads, total, reverse=True)
    dscores = einsum("nbhgcv,nbhgdv->nbhgcd", do, v)
    dv = einsum("nbhgcd,nbhgcv->nbhgdv", scores, do) + einsum("nbhgck,nbhgkv->nbhgcv", k_out, dstates)
    dq_state = upto * einsum("nbhgcv,nbhgkv->nbhgck", do, states)
    dk_state = after * einsum("nbhgcv,nbhgkv->nbhgck", v, dstates)

    # What crosses each token from the state before the chunk, to the state after it, and from one to the other.
    entering, leaving = q[:, :, :, None] * dq_state, k[:, :, :, None] * dk_state
    through = jnp.sum(states * dstates, axis=-1)[..., None, :]
    if decays.pairs is not None:
        entering, leaving, through = (jnp.sum(x, -1, keepdims=True) for x in (entering, leaving, through))
    dg = chunks.from_here_on(entering) + chunks.before_here(leaving) + upto[..., -1:, :] * through
    (dq,), dk, dg_pairs = chunks.scores_gradients([(q, scores, dscores)], k, decays)
    dq, dk = dq + jnp.sum(dq_state, 3), dk + jnp.sum(dk_state, 3)
    return merge(dq), merge(dk), merge_groups(dv), merge_groups(dg + dg_pairs), dinitial.reshape(shape)
