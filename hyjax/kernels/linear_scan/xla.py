"""linear_scan in plain XLA operations: forward and backward, in the form that suits the shapes.

One token: the recurrence itself. A small state on a CPU: a walk over tokens (xla_steps). Otherwise chunks (xla_chunks),
piece by piece where all of them at once would not fit the cache.
"""

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels.chunks import Plan, plan
from hyjax.kernels.layouts import cut, uncut
from hyjax.kernels.linear_scan import block_sizes, xla_chunks, xla_steps

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # q, k, v, decay


def _prepare(q, k, v, log_decay, dtype, scale, plan: Plan) -> Inputs:
    """Cast, scale q, exponentiate the gates (-inf, a reset, becomes 0), pad time and, for steps, repeat key heads."""
    decay = jnp.exp(log_decay.astype(dtype))
    decay = decay[..., None] if decay.ndim == 3 else decay
    q, k, v = q.astype(dtype) * scale, k.astype(dtype), v.astype(dtype)
    extra = plan.time - q.shape[1]
    if extra:
        pad = ((0, 0), (0, extra), (0, 0), (0, 0))
        q, k, v = (jnp.pad(x, pad) for x in (q, k, v))
        decay = jnp.pad(decay, pad, constant_values=1)
    if plan.form == "steps" and v.shape[2] != k.shape[2]:
        q, k = (jnp.repeat(x, v.shape[2] // k.shape[2], axis=2) for x in (q, k))
    return q, k, v, decay


def forward(q, k, v, log_decay, state, *, scale: float, chunk_size: int | None):
    """q, k [B,T,H,K], v [B,T,HV,V], log_decay [B,T,HV] or [B,T,HV,K] (-inf resets), state [B,HV,K,V].

    Returns o [B,T,HV,V] and the final state in `state`'s dtype, and the states that `backward` wants.
    """
    cuts = plan(q.shape, v.shape, log_decay.ndim == 4, chunk_size, block_sizes)
    time = q.shape[1]
    inputs = _prepare(q, k, v, log_decay, state.dtype, scale, cuts)
    if cuts.form == "token":
        return *_token_forward(*inputs, state), state
    if cuts.form == "steps":
        o, end, states = xla_steps.forward(*inputs, state, cuts.chunk)
    elif cuts.pieces == 1:
        o, end, states = xla_chunks.forward(*inputs, state, cuts.chunk)
    else:

        def piece(s, inputs):
            q, k, v, decay = inputs
            o, s, states = xla_chunks.forward(q, k, v, decay, s, cuts.chunk)
            return s, (o, states)

        end, (o, states) = lax.scan(piece, state, tuple(cut(x, cuts.pieces) for x in inputs))
        o = uncut(o)
    return o[:, :time], end, states


def backward(q, k, v, log_decay, states, do, dstate, *, scale: float, chunk_size: int | None):
    """The gradients of q, k, v, log_decay and the initial state, in the dtype of `dstate`."""
    cuts = plan(q.shape, v.shape, log_decay.ndim == 4, chunk_size, block_sizes)
    batch, time, heads, key_dim = q.shape
    inputs = _prepare(q, k, v, log_decay, dstate.dtype, scale, cuts)
    do = jnp.pad(do.astype(dstate.dtype), ((0, 0), (0, cuts.time - time), (0, 0), (0, 0)))
    if cuts.form == "token":
        *grads, dinitial = _token_backward(*inputs, states, do, dstate)
    elif cuts.form == "steps":
        *grads, dinitial = xla_steps.backward(*inputs, states, do, dstate, cuts.chunk)
    elif cuts.pieces == 1:
        *grads, dinitial = xla_chunks.backward(*inputs, states, do, dstate, cuts.chunk)
    else:

        def piece(ds, inputs):
            q, k, v, decay, do, states = inputs
            *grads, ds = xla_chunks.backward(q, k, v, decay, states, do, ds, cuts.chunk)
            return ds, grads

        by_piece = tuple(cut(x, cuts.pieces) for x in (*inputs, do))
        dinitial, grads = lax.scan(piece, dstate, (*by_piece, states), reverse=True)
        grads = [uncut(x) for x in grads]
    dq, dk, dv, dg = (x[:, :time] for x in grads)
    if dk.shape[2] != heads:
        dq, dk = (x.reshape(batch, time, heads, -1, key_dim).sum(3) for x in (dq, dk))
    return dq * scale, dk, dv, dg.reshape(log_decay.shape), dinitial


def _token_forward(q, k, v, decay, state):
    """One step of the recurrence: q, k [B,1,H,K], v [B,1,HV,V], decay [B,1,HV,1 or K] -> o, the new state."""
    batch, heads, key_dim, value_dim = state.shape
    grouped = state.reshape(batch, k.shape[2], -1, key_dim, value_dim)
    values = v.reshape(batch, k.shape[2], -1, 1, value_dim)
    factors = decay.reshape(batch, k.shape[2], values.shape[2], -1, 1)
    new = factors * grouped + k[:, 0, :, None, :, None] * values
    o = jnp.einsum("bhgkv,bhk->bhgv", new, q[:, 0], precision=lax.Precision.HIGHEST)
    return o.reshape(batch, 1, heads, value_dim), new.reshape(state.shape)


def _token_backward(q, k, v, decay, state, do, dstate):
    """Gradients of _token_forward's inputs; those of q and k per value head (the caller sums groups)."""
    groups = v.shape[2] // k.shape[2]
    q, k, v, decay, do = (x[:, 0] for x in (q, k, v, decay, do))
    q, k = (jnp.repeat(x, groups, axis=1) for x in (q, k))
    g = dstate + q[..., None] * do[..., None, :]
    new = decay[..., None] * state + k[..., None] * v[..., None, :]
    dq = jnp.sum(new * do[..., None, :], -1)
    dk = jnp.sum(g * v[..., None, :], -1)
    dv = jnp.sum(g * k[..., None], -2)
    dg = decay * jnp.sum(g * state, -1)
    if decay.shape[-1] == 1:
        dg = jnp.sum(dg, -1, keepdims=True)
    return *(x[:, None] for x in (dq, dk, dv, dg)), decay[..., None] * g
