"""delta_scan for Hopper GPUs, one gate a head or none: the walks with the state, and the last of the backward pass, by
the kernels of hyjax.kernels.gpu_walks and hyjax.kernels.gpu_gradients; what doesn't need the state by XLA.

In the notation of xla_chunks.py. For all chunks at once XLA computes M, A (the inverse in float32), and, A in two
halves of bfloat16 and sums in float32,

    A v [C, V]      W = (A ∘ aᵀ) k [C, K]      (a on the columns of A, so that k stays what it was)

of which forward_walk makes u, o and the states, which are saved in bfloat16. The backward pass computes that again, and
e = A v − W S and u from the saved states; then backward_walk gives du and each chunk's dS', XLA

    dv = w = Aᵀ (β ∘ du)      dβ = Σ_v e ∘ (du − Mᵀ w)

and chunk_gradients, with the readers q and k, the rest.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels.delta_scan import gpu_plan
from hyjax.kernels.delta_scan.triangular import inverse
from hyjax.kernels.gpu_gradients import chunk_gradients
from hyjax.kernels.gpu_plan import (
    BETA,
    CHUNK,
    UPTO,
    Plan,
    by_time,
    fit,
    fit_state,
    gate_gradient,
    gate_rows,
    pair_decays,
    sum_groups,
)
from hyjax.kernels.gpu_walks import backward_walk, forward_walk

_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class _Inside(NamedTuple):
    """What doesn't depend on the state."""

    overlaps: jax.Array  # M [B,HV,n,C,C]
    solve: jax.Array  # A, likewise
    alone: jax.Array  # A v [B,T,HV,V] in bfloat16
    reads: jax.Array  # W [B,T,HV,K] in bfloat16


def _chunked(x: jax.Array) -> jax.Array:
    """[B, T, H, X] -> [B, n, C, H, X]."""
    return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])


def _apply(matrices: jax.Array, x: jax.Array, transpose: bool = False) -> jax.Array:
    """Of each chunk and head, a matrix [B,HV,n,C,C] (or its transpose) times x [B,T,HV,X] in bfloat16 -> float32."""
    subscripts = "bhnij,bnihx->bnjhx" if transpose else "bhnij,bnjhx->bnihx"
    high = lax.reduce_precision(matrices, exponent_bits=8, mantissa_bits=7)  # XLA would remove a conversion and back
    high, low = (_einsum(subscripts, part.astype(x.dtype), _chunked(x)) for part in (high, matrices - high))
    return (high + low).reshape(x.shape)


def _inside(k, v, rows, p: Plan) -> _Inside:
    dots = _einsum("bnihk,bnjhk->bhnij", _chunked(k), _chunked(k))
    overlaps = jnp.tril(jnp.repeat(dots, p.groups, axis=1) * pair_decays(rows), -1)
    solve = inverse(overlaps * rows[..., None, BETA, :])
    reads = _apply(solve * rows[..., None, UPTO, :], jnp.repeat(k, p.groups, axis=2))
    return _Inside(overlaps, solve, _apply(solve, v).astype(v.dtype), reads.astype(k.dtype))


def forward(q, k, v, beta, log_decay, state, *, scale: float, chunk_size: int | None, interpret=False):
    """q, k [B,T,H,K], v [B,T,HV,V] in bfloat16, beta and log_decay [B,T,HV] (-inf resets), state [B,HV,K,V] in float32.

    Returns o [B,T,HV,V] in bfloat16, the final state in float32, and the states that `backward` wants.
    """
    p = gpu_plan.plan(q.shape, v.shape)
    key_dim, value_dim = p.padded_dims
    q, k, v = fit(q, p, key_dim), fit(k, p, key_dim), fit(v, p, value_dim)
    rows = gate_rows(log_decay, p, beta)
    inside = _inside(k, v, rows, p)
    o, states, final = forward_walk(
        q, k, inside.alone, inside.reads, rows, fit_state(state, p), p, float(scale), interpret
    )
    return o[:, : p.time, :, : p.value_dim], final[:, :, : p.key_dim, : p.value_dim], states


def backward(q, k, v, beta, log_decay, states, do, dstate, *, scale: float, chunk_size: int | None, interpret=False):
    """The gradients of q, k, v, beta, log_decay and the initial state, in float32."""
    p, options = gpu_plan.plan(q.shape, v.shape), dict(scale=float(scale), interpret=interpret)
    key_dim, value_dim = p.padded_dims
    q, k = fit(q, p, key_dim), fit(k, p, key_dim)
    v, do = fit(v, p, value_dim), fit(do, p, value_dim)
    rows = gate_rows(log_decay, p, beta)
    beta = by_time(rows[..., BETA, :])[..., None]
    inside = _inside(k, v, rows, p)
    from_state = _einsum("bnihk,bhnkv->bnihv", _chunked(inside.reads), states).reshape(v.shape)
    e = inside.alone.astype(jnp.float32) - from_state
    u = (beta * e).astype(v.dtype)

    du, dstates, dinitial = backward_walk(q, k, do, inside.reads, rows, fit_state(dstate, p), p, **options)
    dv = _apply(inside.solve, (beta * du).astype(v.dtype), transpose=True)
    w = dv.astype(v.dtype)
    dbeta = jnp.sum(e * (du - _apply(inside.overlaps, w, transpose=True)), -1)
    dq, dk, sums, through = chunk_gradients(q, k, u, do, w, rows, states, dstates, p, **options)
    dg = gate_gradient(rows, sums, through, p)
    dv, dinitial = dv[:, : p.time, :, : p.value_dim], dinitial[:, :, : p.key_dim, : p.value_dim]
    return sum_groups(dq, p), sum_groups(dk, p), dv, dbeta[:, : p.time], dg, dinitial
