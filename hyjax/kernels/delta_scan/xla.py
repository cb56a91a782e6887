"""delta_scan in plain XLA operations: forward and backward, in the form that suits the shapes.

One token: the recurrence itself. A small state on a CPU: a walk over tokens (both xla_steps). Otherwise chunks
(xla_chunks), piece by piece where all of them at once would not fit the cache.
"""

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels.chunks import plan
from hyjax.kernels.delta_scan import block_sizes, xla_chunks, xla_steps
from hyjax.kernels.layouts import cut, uncut

WALKS = {"steps": xla_steps, "chunks": xla_chunks}


def _pad(arrays: tuple[jax.Array, ...], time: int) -> tuple[jax.Array, ...]:
    """Time filled up to `time` with zeros, which write nothing: β = 0, and a decay of e^0 = 1."""
    extra = time - arrays[0].shape[1]
    return tuple(jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2)) for x in arrays) if extra else arrays


def _ready(inputs, dtype, scale: float, form: str):
    """Cast, scale q, exponentiate the gates (-inf, a reset, becomes 0); but for chunks, a key head to each value head.

    Piece by piece, so that no wide copy of the whole of q, k, v or the decays is ever made.
    """
    q, k, v, beta, log_decay = inputs
    decay = jnp.exp(log_decay.astype(dtype))
    decay = decay[..., None] if decay.ndim == 3 else decay
    q, k, v, beta = q.astype(dtype) * scale, k.astype(dtype), v.astype(dtype), beta.astype(dtype)[..., None]
    if form != "chunks" and v.shape[2] != k.shape[2]:
        q, k = (jnp.repeat(x, v.shape[2] // k.shape[2], axis=2) for x in (q, k))
    return q, k, v, beta, decay


def forward(q, k, v, beta, log_decay, state, *, scale: float, chunk_size: int | None):
    """q, k [B,T,H,K], v [B,T,HV,V], beta [B,T,HV], log_decay [B,T,HV] or [B,T,HV,K] (-inf resets), state [B,HV,K,V].

    Returns o [B,T,HV,V] and the final state in `state`'s dtype, and the states that `backward` wants.
    """
    cuts = plan(q.shape, v.shape, log_decay.ndim == 4, chunk_size, block_sizes)
    inputs = _pad((q, k, v, beta, log_decay), cuts.time)

    def piece(s, inputs):
        q, k, v, beta, decay = _ready(inputs, s.dtype, scale, cuts.form)
        if cuts.form == "token":
            o, end = xla_steps.token_forward(q, k, v, beta, decay, s)
            return end, (o, s)
        o, end, states = WALKS[cuts.form].forward(q, k, v, beta, decay, s, cuts.chunk)
        return end, (o, states)

    if cuts.pieces == 1:
        end, (o, states) = piece(state, inputs)
    else:
        end, (o, states) = lax.scan(piece, state, tuple(cut(x, cuts.pieces) for x in inputs))
        o = uncut(o)
    return o[:, : q.shape[1]], end, states


def backward(q, k, v, beta, log_decay, states, do, dstate, *, scale: float, chunk_size: int | None):
    """The gradients of q, k, v, beta, log_decay and the initial state, in the dtype of `dstate`."""
    cuts = plan(q.shape, v.shape, log_decay.ndim == 4, chunk_size, block_sizes)
    batch, time, heads, key_dim = q.shape
    inputs = _pad((q, k, v, beta, log_decay, do), cuts.time)

    def piece(ds, inputs):
        *inputs, do, states = inputs
        q, k, v, beta, decay = _ready(inputs, ds.dtype, scale, cuts.form)
        do = do.astype(ds.dtype)
        if cuts.form == "token":
            dq, *grads, ds = xla_steps.token_backward(q, k, v, beta, decay, states, do, ds)
        else:
            dq, *grads, ds = WALKS[cuts.form].backward(q, k, v, beta, decay, states, do, ds, cuts.chunk)
        return ds, (dq * scale, *grads)

    if cuts.pieces == 1:
        dinitial, grads = piece(dstate, (*inputs, states))
    else:
        by_piece = (*(cut(x, cuts.pieces) for x in inputs), states)
        dinitial, grads = lax.scan(piece, dstate, by_piece, reverse=True)
        grads = tuple(uncut(x) for x in grads)
    dq, dk, dv, dbeta, dg = (x[:, :time] for x in grads)
    if dk.shape[2] != heads:
        dq, dk = (x.reshape(batch, time, heads, -1, key_dim).sum(3) for x in (dq, dk))
    return dq, dk, dv, dbeta[..., 0], dg.reshape(log_decay.shape), dinitial
