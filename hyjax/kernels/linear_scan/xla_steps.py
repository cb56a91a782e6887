"""linear_scan as a walk over tokens with batch and heads as the last dimension: for small states on a CPU.

A state [K, V, N] (N = batch * heads) is updated by elementwise products whose innermost loop runs over N, which a CPU
vectorises; sums over K and V are written out term by term, because a reduction inside a fused loop is not vectorised.
Measured on two cores at B128 T128 H4 K8 V8, forward and backward: 7 ms; chunks of matrix products 24 ms, the quadratic
form 100 ms.
"""

import functools
import operator

import jax
from jax import lax

from hyjax.kernels.layouts import batch_major, rows_first, rows_last, time_major


def _sum(terms):
    return functools.reduce(operator.add, terms)


def _group(x: jax.Array, chunk: int) -> jax.Array:
    return x.reshape(-1, chunk, *x.shape[1:])


def forward(q, k, v, decay, state, chunk):
    """q, k [B,T,H,K], v [B,T,H,V], decay [B,T,H,1 or K] in [0, 1], state [B,H,K,V]; T a multiple of `chunk`.

    Returns o [B,T,H,V], the final state, and the states at each chunk's start [T/chunk,K,V,B*H].
    """
    batch, key_dim = q.shape[0], q.shape[3]

    def token(s, inputs):
        qt, kt, vt, dt = inputs
        s = dt[:, None] * s + kt[:, None] * vt[None]
        return s, _sum(qt[i] * s[i] for i in range(key_dim))

    def tokens(s, inputs):
        end, out = lax.scan(token, s, inputs)
        return end, (out, s)

    inputs = tuple(_group(time_major(x), chunk) for x in (q, k, v, decay))
    end, (out, states) = lax.scan(tokens, rows_last(state), inputs)
    out = out.reshape(-1, *out.shape[2:])
    return batch_major(out, batch), rows_first(end, batch), states


def backward(q, k, v, decay, states, do, dstate, chunk):
    """The gradients of q, k, v, log decay (as `decay`'s shape) and initial state; `states` as forward returned them.

    With G_t the gradient of S_t: G_t = d_{t+1} G_{t+1} + q_t do_tᵀ; dk = G v, dv = Gᵀ k, dq = S do and
    dg_t = d_t <G_t, S_{t-1}>, which is exactly zero where d_t is.
    """
    batch, key_dim, value_dim = q.shape[0], q.shape[3], v.shape[3]
    per_channel = decay.shape[3] > 1

    def replay(s, inputs):
        kt, vt, dt = inputs
        return dt[:, None] * s + kt[:, None] * vt[None], s

    def token(g, inputs):
        qt, kt, vt, dt, dot, before = inputs
        g = g + qt[:, None] * dot[None]
        dk = _sum(g[:, j] * vt[j] for j in range(value_dim))
        dv = _sum(g[i] * kt[i] for i in range(key_dim))
        read = _sum(before[:, j] * dot[j] for j in range(value_dim))
        dq = dt * read + kt * _sum(vt[j] * dot[j] for j in range(value_dim))
        dg = _sum(g[:, j] * before[:, j] for j in range(value_dim))
        if not per_channel:
            dg = _sum(dg[i] for i in range(key_dim))[None]
        return dt[:, None] * g, (dq, dk, dv, dt * dg)

    def tokens(g, inputs):
        qt, kt, vt, dt, dot, start = inputs
        _, before = lax.scan(replay, start, (kt, vt, dt))
        return lax.scan(token, g, (qt, kt, vt, dt, dot, before), reverse=True)

    inputs = tuple(_group(time_major(x), chunk) for x in (q, k, v, decay, do))
    g, grads = lax.scan(tokens, rows_last(dstate), (*inputs, states), reverse=True)
    dq, dk, dv, dg = (batch_major(x.reshape(-1, *x.shape[2:]), batch) for x in grads)
    return dq, dk, dv, dg, rows_first(g, batch)
