"""delta_scan in plain XLA operations: forward and backward, in the form that suits the shapes.

One token: the recurrence itself. A small state on a CPU: a walk over tokens (both xla_steps). Otherwise chunks
(xla_chunks), piece by piece where all of them at once would not fit the cache.
"""

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels.chunks import Plan, plan
from hyjax.kernels.delta_scan import block_sizes, xla_chunks, xla_steps
from hyjax.kernels.layouts import cut, uncut

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]  # q, k, v, beta, decay


def _prepare(q, k, v, beta, log_decay, dtype, scale, plan: Plan) -> Inputs:
    """Cast, scale q, exponentiate the gates (-inf, a reset, becomes 0), pad time; but for chunks, repeat key heads."""
    decay = jnp.exp(log_decay.astype(dtype))
    decay = decay[..., None] if decay.ndim == 3 else decay
    q, k, v, beta = q.astype(dtype) * scale, k.astype(dtype), v.astype(dtype), beta.astype(dtype)[..., None]
    extra = plan.time - q.shape[1]
    if extra:
        pad = ((0, 0), (0, extra), (0, 0), (0, 0))
        q, k, v, beta = (jnp.pad(x, pad) for x in (q, k, v, beta))
        decay = jnp.pad(decay, pad, constant_values=1)
    if plan.form != "chunks" and v.shape[2] != k.shape[2]:
        q, k = (jnp.repeat(x, v.shape[2] // k.shape[2], axis=2) for x in (q, k))
    return q, k, v, beta, decay


def forward(q, k, v, beta, log_decay, state, *, scale: float, chunk_size: int | None):
    """q, k [B,T,H,K], v [B,T,HV,V], beta [B,T,HV], log_decay [B,T,HV] or [B,T,HV,K] (-inf resets), state [B,HV,K,V].

    Returns o [B,T,HV,V] and the final state in `state`'s dtype, and the states that `backward` wants.
    """
    cuts = plan(q.shape, v.shape, log_decay.ndim == 4, chunk_size, block_sizes)
    time = q.shape[1]
    inputs = _prepare(q, k, v, beta, log_decay, state.dtype, scale, cuts)
    if cuts.form == "token":
        return *xla_steps.token_forward(*inputs, state), state
    if cuts.form == "steps":
        o, end, states = xla_steps.forward(*inputs, state, cuts.chunk)
    elif cuts.pieces == 1:
        o, end, states = xla_chunks.forward(*inputs, state, cuts.chunk)
    else:

        def piece(s, inputs):
            q, k, v, beta, decay = inputs
            o, s, states = xla_chunks.forward(q, k, v, beta, decay, s, cuts.chunk)
            return s, (o, states)

        end, (o, states) = lax.scan(piece, state, tuple(cut(x, cuts.pieces) for x in inputs))
        o = uncut(o)
    return o[:, :time], end, states


def backward(q, k, v, beta, log_decay, states, do, dstate, *, scale: float, chunk_size: int | None):
    """The gradients of q, k, v, beta, log_decay and the initial state, in the dtype of `dstate`."""
    cuts = plan(q.shape, v.shape, log_decay.ndim == 4, chunk_size, block_sizes)
    batch, time, heads, key_dim = q.shape
    inputs = _prepare(q, k, v, beta, log_decay, dstate.dtype, scale, cuts)
    do = jnp.pad(do.astype(dstate.dtype), ((0, 0), (0, cuts.time - time), (0, 0), (0, 0)))
    if cuts.form == "token":
        *grads, dinitial = xla_steps.token_backward(*inputs, states, do, dstate)
    elif cuts.form == "steps":
        *grads, dinitial = xla_steps.backward(*inputs, states, do, dstate, cuts.chunk)
    elif cuts.pieces == 1:
        *grads, dinitial = xla_chunks.backward(*inputs, states, do, dstate, cuts.chunk)
    else:

        def piece(ds, inputs):
            q, k, v, beta, decay, do, states = inputs
            *grads, ds = xla_chunks.backward(q, k, v, beta, decay, states, do, ds, cuts.chunk)
            return ds, grads

        by_piece = tuple(cut(x, cuts.pieces) for x in (*inputs, do))
        dinitial, grads = lax.scan(piece, dstate, (*by_piece, states), reverse=True)
        grads = [uncut(x) for x in grads]
    dq, dk, dv, dbeta, dg = (x[:, :time] for x in grads)
    if dk.shape[2] != heads:
        dq, dk = (x.reshape(batch, time, heads, -1, key_dim).sum(3) for x in (dq, dk))
    return dq * scale, dk, dv, dbeta[..., 0], dg.reshape(log_decay.shape), dinitial
