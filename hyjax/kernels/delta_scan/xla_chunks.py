"""delta_scan in chunks: matrix products and one triangular inverse inside a chunk, a walk over the states between.

Token t corrects the error e_t = v_t − (d_t ∘ S_{t-1})ᵀ k_t by adding k_t u_tᵀ, u_t = β_t e_t. From the chunk's entry
state S, with D, a and b of hyjax.kernels.chunks, d_t ∘ S_{t-1} = a_t ∘ S + Σ_{j<t} D_tj ∘ k_j u_jᵀ; so a chunk is, with
M_tj = Σ_k k_tk k_jk D_tjk for t > j, else 0, and P_tj = Σ_k q_tk k_jk D_tjk for t >= j, else 0,

    A = (I + M diag β)^-1               [C, C]
    e = A (v − (k ∘ a) S)               [C, V]      u = β ∘ e
    o = P u + (q ∘ a) S                 [C, V]
    S' = a_C ∘ S + (k ∘ b)ᵀ u           [K, V]

A v, W = A (k ∘ a) and P don't depend on the state: the walk is left with two products a chunk. (Solving for e and not
for u leaves β outside: its gradient needs no division by β, which may be 0.)

Backward, with w = dv = Aᵀ (β ∘ du), everything as in linear_scan with values u, and k a second reader beside q whose
output gradient is −w:

    du = Pᵀ do + (k ∘ b) dS'            dS = a_C ∘ dS' + (q ∘ a)ᵀ do − Wᵀ (β ∘ du)
    dP = do uᵀ    dM = −w uᵀ            dβ = Σ_v e ∘ (du − Mᵀ w)
"""

import jax.numpy as jnp
from jax import lax

from hyjax.kernels import chunks
from hyjax.kernels.chunks import einsum
from hyjax.kernels.delta_scan.triangular import inverse
from hyjax.kernels.layouts import merge, merge_groups, split, split_groups


def _chunked(keys, values, chunk):
    """[B,T,H,X] of key heads and [B,T,HV,X] of value heads -> [n,B,H,C,X] and [n,B,H,G,C,X]."""
    heads = keys[0].shape[2]
    keys, values = [split(x, chunk) for x in keys], [split_groups(x, chunk, heads) for x in values]
    # Without the barrier XLA repeats the transposition in every fusion that reads the array.
    return lax.optimization_barrier((*keys, *values))


def _inside(q, k, beta, decay):
    """What doesn't depend on the state: P, M and A [n,B,H,G,C,C], and the products of decays."""
    decays = chunks.products(decay)
    scores = chunks.scores(q, k, decays)
    overlaps = jnp.tril(chunks.scores(k, k, decays), -1)
    return scores, overlaps, inverse(overlaps * jnp.swapaxes(beta, -1, -2)), decays


def forward(q, k, v, beta, decay, state, chunk):
    """q, k [B,T,H,K], v [B,T,HV,V], beta [B,T,HV,1], decay [B,T,HV,1 or K] in [0, 1], state [B,HV,K,V].

    T is a multiple of `chunk`, a power of two. Returns o [B,T,HV,V], the final state, and the states at the chunks'
    starts [n,B,H,G,K,V].
    """
    q, k, v, beta, decay = _chunked((q, k), (v, beta, decay), chunk)
    scores, _, solve, decays = _inside(q, k, beta, decay)
    upto, after = decays.upto, decays.after
    q_in, k_in, k_out = (x[:, :, :, None] * y for x, y in ((q, upto), (k, upto), (k, after)))
    total = jnp.swapaxes(upto[..., -1:, :], -1, -2)  # [n,B,H,G,1 or K,1]
    reads = einsum("nbhgcd,nbhgdk->nbhgck", solve, k_in)
    alone = einsum("nbhgcd,nbhgdv->nbhgcv", solve, v)  # e of a chunk that starts from nothing

    def step(s, inputs):
        reads, alone, beta, k_out, total = inputs
        u = beta * (alone - einsum("bhgck,bhgkv->bhgcv", reads, s))
        return total * s + einsum("bhgck,bhgcv->bhgkv", k_out, u), (u, s)

    grouped = state.reshape(*k_in.shape[1:4], *state.shape[2:])
    end, (u, states) = lax.scan(step, grouped, (reads, alone, beta, k_out, total))
    out = einsum("nbhgcd,nbhgdv->nbhgcv", scores, u) + einsum("nbhgck,nbhgkv->nbhgcv", q_in, states)
    return merge_groups(out), end.reshape(state.shape), states


def backward(q, k, v, beta, decay, states, do, dstate, chunk):
    """The gradients of q, k, v, beta, log decay (as `decay`'s shape) and initial state; `states` of `forward`."""
    q, k, v, beta, decay, do = _chunked((q, k), (v, beta, decay, do), chunk)
    scores, overlaps, solve, decays = _inside(q, k, beta, decay)
    upto, after = decays.upto, decays.after
    q_in, k_in, k_out = (x[:, :, :, None] * y for x, y in ((q, upto), (k, upto), (k, after)))
    reads = einsum("nbhgcd,nbhgdk->nbhgck", solve, k_in)
    e = einsum("nbhgcd,nbhgdv->nbhgcv", solve, v) - einsum("nbhgck,nbhgkv->nbhgcv", reads, states)
    u = beta * e

    dinitial, du, dstates = _walk_back(scores, q_in, k_out, reads, beta, upto, do, dstate)
    dv = einsum("nbhgcd,nbhgcv->nbhgdv", solve, beta * du)
    dbeta = jnp.sum(e * (du - einsum("nbhgcd,nbhgcv->nbhgdv", overlaps, dv)), -1, keepdims=True)
    dscores = jnp.tril(einsum("nbhgcv,nbhgdv->nbhgcd", do, u))
    doverlaps = -jnp.tril(einsum("nbhgcv,nbhgdv->nbhgcd", dv, u), -1)

    dq_in = upto * einsum("nbhgcv,nbhgkv->nbhgck", do, states)
    dk_in = -upto * einsum("nbhgcv,nbhgkv->nbhgck", dv, states)
    dk_out = after * einsum("nbhgcv,nbhgkv->nbhgck", u, dstates)
    kinds = [(q, scores, dscores), (k, overlaps, doverlaps)]
    (dq, dk_row), dk_column, dg = chunks.scores_gradients(kinds, k, decays)
    dq, dk = dq + jnp.sum(dq_in, 3), dk_row + dk_column + jnp.sum(dk_in + dk_out, 3)

    # What crosses each token from the state before the chunk, to the state after it, and from one to the other.
    entering = q[:, :, :, None] * dq_in + k[:, :, :, None] * dk_in
    leaving = k[:, :, :, None] * dk_out
    through = jnp.sum(states * dstates, axis=-1)[..., None, :]
    if decays.pairs is not None:
        entering, leaving, through = (jnp.sum(x, -1, keepdims=True) for x in (entering, leaving, through))
    dg += chunks.from_here_on(entering) + chunks.before_here(leaving) + upto[..., -1:, :] * through
    grads = merge(dq), merge(dk), *(merge_groups(x) for x in (dv, dbeta, dg))
    return *grads, dinitial.reshape(dstate.shape)


def _walk_back(scores, q_in, k_out, reads, beta, upto, do, dstate):
    """From the last chunk to the first: the initial state's gradient, du [n,B,H,G,C,V] and each chunk's dS'."""
    total = jnp.swapaxes(upto[..., -1:, :], -1, -2)
    du_out = einsum("nbhgcd,nbhgcv->nbhgdv", scores, do)
    ds_out = einsum("nbhgck,nbhgcv->nbhgkv", q_in, do)

    def step(ds, inputs):
        reads, beta, k_out, total, du_out, ds_out = inputs
        du = du_out + einsum("bhgck,bhgkv->bhgcv", k_out, ds)
        return total * ds + ds_out - einsum("bhgck,bhgcv->bhgkv", reads, beta * du), (du, ds)

    by_chunk = (reads, beta, k_out, total, du_out, ds_out)
    dinitial, (du, dstates) = lax.scan(step, dstate.reshape(ds_out.shape[1:]), by_chunk, reverse=True)
    return dinitial, du, dstates
