"""diagonal_scan in plain XLA operations: a walk over tokens, forward and backward.

With a_t = e^{g_t}, Q_t the gradient of h_{t-1} through h_t, and dh_t that of the output h_t:

    h_t = a_t h_{t-1} + x_t        dx_t = dh_t + Q_{t+1}        Q_t = a_t dx_t        dg_t = Q_t h_{t-1}

The backward pass needs the decays and the outputs alone, so nothing is saved that the caller doesn't hold. Each step
takes its exponentials itself: written down, the decays would cost more to store and read than to form again. On an
accelerator many chunks are walked side by side (hyjax/kernels/walk.py). Complex numbers need nothing else: JAX's
gradients are transposes without a conjugate.
"""

import jax.numpy as jnp
from jax import lax

from hyjax.kernels import dispatch, varying
from hyjax.kernels.diagonal_scan import block_sizes
from hyjax.kernels.walk import borders, fold, read, unfold, write


def _chunk(time: int, chunk_size: int | None) -> int:
    """Tokens that are walked one after the other."""
    if chunk_size is None:
        chunk_size = dispatch.by_backend(block_sizes.CHUNK)
    return time if chunk_size is None else min(chunk_size, time)


def forward(x, log_decay, state, *, chunk_size: int | None):
    """x, log_decay [B,T,D] (-inf resets), state [B,D] -> h [B,T,D] in x's dtype, the final state in `state`'s."""
    batch, time = x.shape[:2]
    chunk = _chunk(time, chunk_size)
    if time == 1:
        final = jnp.exp(log_decay[:, 0].astype(state.dtype)) * state + x[:, 0].astype(state.dtype)
        return final[:, None].astype(x.dtype), final
    if chunk == time:
        return _walk(x, log_decay, state)
    x, log_decay = fold(x, chunk), fold(log_decay, chunk)
    product, end = _ends(x, log_decay, state.dtype)
    final, entries = borders(product, end, state)
    h, _ = _walk(x, log_decay, entries)
    return unfold(h, batch, time), final


def backward(h, log_decay, state, dh, dfinal, *, chunk_size: int | None):
    """The gradients of x and log_decay, in h's and log_decay's dtype, and of the initial state, in dfinal's."""
    batch, time = h.shape[:2]
    chunk = _chunk(time, chunk_size)
    if chunk == time:
        return _walk_back(h, log_decay, state, dh, dfinal)
    h, log_decay, dh = fold(h, chunk), fold(log_decay, chunk), fold(dh, chunk)
    ends = h[:, -1].reshape(batch, -1, h.shape[-1])[:, :-1].astype(state.dtype)
    entries = jnp.concatenate([state[:, None], ends], axis=1).reshape(-1, h.shape[-1])
    product, start = _ends(dh, log_decay, dfinal.dtype, backward=True)
    dstate, exits = borders(product, start, dfinal, reverse=True)
    dx, dg, _ = _walk_back(h, log_decay, entries, dh, exits)
    return unfold(dx, batch, time), unfold(dg, batch, time), dstate


def _walk(x, log_decay, state):
    """x, log_decay [R,T,D], state [R,D] -> h [R,T,D] in x's dtype, the last state."""
    dtype = state.dtype

    def token(t, carry):
        s, h = carry
        s = jnp.exp(read(log_decay, t, dtype)) * s + read(x, t, dtype)
        return s, write(h, s, t)

    state, h = lax.fori_loop(0, x.shape[1], token, (state, varying.zeros(x.shape, x.dtype, x)))
    return h, state


def _walk_back(h, log_decay, state, dh, q):
    """h, log_decay, dh [R,T,D], the states [R,D] before and the gradient [R,D] after -> dx, dg, the gradient before."""
    dtype, last = q.dtype, h.shape[1] - 1

    def step(t, before, q, dx, dg):
        grad = read(dh, t, dtype) + q
        q = jnp.exp(read(log_decay, t, dtype)) * grad
        return q, write(dx, grad, t), write(dg, q * before, t)

    def token(i, carry):
        t = last - i
        return step(t, read(h, t - 1, dtype), *carry)

    zeros = (varying.zeros(h.shape, a.dtype, h) for a in (h, log_decay))
    q, dx, dg = step(0, state, *lax.fori_loop(0, last, token, (q, *zeros)))
    return dx, dg, q


def _ends(x, log_decay, dtype, backward: bool = False):
    """The products of the decays [R,D], and the states [R,D] (backward: the gradients Q) walked to from zeros.

    Backward, x holds dh, and Q_t = a_t (dh_t + Q_{t+1}).
    """
    last = x.shape[1] - 1

    def token(i, carry):
        product, s = carry
        t = last - i if backward else i
        decay, new = jnp.exp(read(log_decay, t, dtype)), read(x, t, dtype)
        return decay * product, decay * (s + new) if backward else decay * s + new

    zeros = varying.zeros((x.shape[0], x.shape[2]), dtype, x)
    return lax.fori_loop(0, last + 1, token, (zeros + 1, zeros))
