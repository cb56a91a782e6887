"""delta_scan token by token: one token of decoding, and a walk with batch and heads as the last dimension.

The walk serves small states on a CPU, as in linear_scan: a state [K, V, N] (N = batch * heads) is updated by
elementwise products whose innermost loop runs over N, which a CPU vectorises; sums over K and V are written out term by
term, because a reduction inside a fused loop is not vectorised.

With S = d ∘ S₀ the decayed state, e = v − Sᵀk, u = β e, S' = S + k uᵀ, and G the gradient of S', q doᵀ included, both
use

    du = Gᵀ k    dv = β du    dβ = Σ_v e du    dk = G u − S dv    dS = G − k dvᵀ    dq = S' do    dg = Σ_v S ∘ dS

and hand d ∘ dS to the token before.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels.chunks import einsum
from hyjax.kernels.layouts import batch_major, rows_first, rows_last, time_major


def _update(k, v, beta, decay, state):
    """Of one token k [B,H,K], v [B,H,V], beta [B,H,1], decay [B,H,1 or K]: the decayed state, e, and the new state."""
    decayed = decay[..., None] * state
    e = v - einsum("bhkv,bhk->bhv", decayed, k)
    return decayed, e, decayed + k[..., None] * (beta * e)[..., None, :]


def token_forward(q, k, v, beta, decay, state):
    """One step of the recurrence: q, k [B,1,H,K], v [B,1,H,V], beta, decay [B,1,H,1 or K] -> o, the new state."""
    _, _, new = _update(k[:, 0], v[:, 0], beta[:, 0], decay[:, 0], state)
    return einsum("bhkv,bhk->bhv", new, q[:, 0])[:, None], new


def token_backward(q, k, v, beta, decay, state, do, dstate):
    """Gradients of token_forward's q, k, v, beta, log decay (as `decay`'s shape) and state."""
    q, k, v, beta, decay, do = (x[:, 0] for x in (q, k, v, beta, decay, do))
    decayed, e, new = _update(k, v, beta, decay, state)
    g = dstate + q[..., None] * do[..., None, :]
    du = einsum("bhkv,bhk->bhv", g, k)
    dv = beta * du
    dk = einsum("bhkv,bhv->bhk", g, beta * e) - einsum("bhkv,bhv->bhk", decayed, dv)
    dq = einsum("bhkv,bhv->bhk", new, do)
    ds = g - k[..., None] * dv[..., None, :]
    dg = jnp.sum(decayed * ds, -1)
    if decay.shape[-1] == 1:
        dg = jnp.sum(dg, -1, keepdims=True)
    grads = (dq, dk, dv, jnp.sum(e * du, -1, keepdims=True), dg)
    return *(x[:, None] for x in grads), decay[..., None] * ds


def _sum(terms):
    return functools.reduce(operator.add, terms)


def _group(x: jax.Array, chunk: int) -> jax.Array:
    return x.reshape(-1, chunk, *x.shape[1:])


def _correct(s, k, v, beta, decay):
    """Of one token k [K,N], v [V,N], beta [1,N], decay [1 or K,N]: the decayed state [K,V,N], e, and the new state."""
    s = decay[:, None] * s
    e = v - _sum(k[i] * s[i] for i in range(k.shape[0]))
    return s, e, s + k[:, None] * (beta * e)[None]


def forward(q, k, v, beta, decay, state, chunk):
    """q, k [B,T,H,K], v [B,T,H,V], beta [B,T,H,1], decay [B,T,H,1 or K] in [0, 1], state [B,H,K,V].

    T is a multiple of `chunk`. Returns o [B,T,H,V], the final state, and the states at the chunks' starts
    [T/chunk,K,V,B*H].
    """
    batch, key_dim = q.shape[0], q.shape[3]

    def token(s, inputs):
        qt, *rest = inputs
        *_, s = _correct(s, *rest)
        return s, _sum(qt[i] * s[i] for i in range(key_dim))

    def tokens(s, inputs):
        end, out = lax.scan(token, s, inputs)
        return end, (out, s)

    inputs = tuple(_group(time_major(x), chunk) for x in (q, k, v, beta, decay))
    end, (out, states) = lax.scan(tokens, rows_last(state), inputs)
    return batch_major(out.reshape(-1, *out.shape[2:]), batch), rows_first(end, batch), states


def backward(q, k, v, beta, decay, states, do, dstate, chunk):
    """The gradients of q, k, v, beta, log decay (as `decay`'s shape) and initial state; `states` of `forward`."""
    batch, key_dim, value_dim = q.shape[0], q.shape[3], v.shape[3]
    per_channel = decay.shape[3] > 1

    def replay(s, inputs):
        *_, new = _correct(s, *inputs)
        return new, s

    def token(g, inputs):
        qt, kt, vt, bt, dt, dot, before = inputs
        s, e, new = _correct(before, kt, vt, bt, dt)
        g = g + qt[:, None] * dot[None]
        du = _sum(g[i] * kt[i] for i in range(key_dim))
        u, dv = bt * e, bt * du
        dk = _sum(g[:, j] * u[j] - s[:, j] * dv[j] for j in range(value_dim))
        dq = _sum(new[:, j] * dot[j] for j in range(value_dim))
        ds = g - kt[:, None] * dv[None]
        dg = _sum(s[:, j] * ds[:, j] for j in range(value_dim))
        if not per_channel:
            dg = _sum(dg[i] for i in range(key_dim))[None]
        dbeta = _sum(e[j] * du[j] for j in range(value_dim))[None]
        return dt[:, None] * ds, (dq, dk, dv, dbeta, dg)

    def tokens(g, inputs):
        *inputs, start = inputs
        _, before = lax.scan(replay, start, tuple(inputs[1:5]))
        return lax.scan(token, g, (*inputs, before), reverse=True)

    inputs = tuple(_group(time_major(x), chunk) for x in (q, k, v, beta, decay, do))
    g, grads = lax.scan(tokens, rows_last(dstate), (*inputs, states), reverse=True)
    return *(batch_major(x.reshape(-1, *x.shape[2:]), batch) for x in grads), rows_first(g, batch)
