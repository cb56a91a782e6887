"""selective_scan in plain XLA operations: a walk over tokens, forward and backward, that never holds [B, T, D, N].

With a_t = exp(Δ_t A) (0 at a document's first token), w_t = Δ_t u_t, and for the state x [D, N] and the gradients G_t
of x_t and Q_t of x_{t-1} through it, elementwise over D and N unless a sum says otherwise:

    x_t = a_t x_{t-1} + w_t B_t                 y_t = Σ_n C_t x_t + D u_t
    G_t = Q_{t+1} + dy_t C_t                    Q_t = a_t G_t
    dC_t = Σ_d dy_t x_t                         dB_t = Σ_d w_t G_t                 dw_t = Σ_n B_t G_t
    dΔ_t = u_t dw_t + Σ_n A Q_t x_{t-1}         du_t = Δ_t dw_t + D dy_t           dA = Σ_t Δ_t Q_t x_{t-1}

The forward pass saves a state every few tokens (a block); the backward pass, block by block from the last, walks
forward again from the saved state, keeping the block's states, and then back. On an accelerator many chunks are walked
side by side (hyjax/kernels/walk.py); the product of a chunk's decays is exp(A Σ_t Δ_t).

The state is [R, N, D] inside: the innermost loop runs over channels. R counts rows of the batch, or chunks.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels import dispatch, varying
from hyjax.kernels.selective_scan import block_sizes
from hyjax.kernels.walk import borders, fold, read, unfold, write

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Inputs(NamedTuple):
    """What the walk reads; weights in the dtype of the arithmetic, tokens in their own."""

    u: jax.Array  # [R, T, D]
    delta: jax.Array  # [R, T, D]
    A: jax.Array  # [N, D]
    B: jax.Array  # [R, T, N]
    C: jax.Array  # [R, T, N]
    D: jax.Array  # [D]
    starts: jax.Array | None  # [R, T] bool: the state before this token is another document's


def _inputs(u, delta, A, B, C, D, starts, dtype) -> Inputs:
    return Inputs(u, delta, A.T.astype(dtype), B, C, D.astype(dtype), starts)


def _fold(inputs: Inputs, chunk: int) -> Inputs:
    """Chunks as rows. Tokens of zeros after the last (Δ = u = B = 0) leave the state as it is."""
    tokens = {name: fold(getattr(inputs, name), chunk) for name in ("u", "delta", "B", "C")}
    starts = None if inputs.starts is None else fold(inputs.starts, chunk)
    return inputs._replace(**tokens, starts=starts)


def _chunk(time: int, chunk_size: int | None) -> int:
    """Tokens that are walked one after the other."""
    if chunk_size is None:
        chunk_size = dispatch.by_backend(block_sizes.CHUNK)
    return time if chunk_size is None else min(chunk_size, time)


def _blocks(time: int):
    """Tokens a block, the number of blocks, and a function from a block's index to its length (the last is shorter)."""
    size = min(dispatch.by_backend(block_sizes.SAVED), time)
    if time % size == 0:
        return size, time // size, lambda _: size
    return size, -(-time // size), lambda k: jnp.minimum(size, time - k * size)


def forward(u, delta, A, B, C, D, starts, state, *, chunk_size: int | None):
    """u, delta [B,T,D], A [D,N], B, C [B,T,N], D [D], starts [B,T] bool or None, state [B,D,N].

    Returns y [B,T,D] in u's dtype, the final state in `state`'s, and the states that `backward` wants.
    """
    batch, time = u.shape[:2]
    if time == 1:
        return *_token(u, delta, A, B, C, D, state), state
    inputs, chunk = _inputs(u, delta, A, B, C, D, starts, state.dtype), _chunk(time, chunk_size)
    state = state.swapaxes(1, 2)
    if chunk < time:
        inputs = _fold(inputs, chunk)
        final, entries = borders(_product(inputs), _end(inputs, state.dtype), state)
        y, _, states = _walk(inputs, entries)
        y = unfold(y, batch, time)
    else:
        y, final, states = _walk(inputs, state)
    return y, final.swapaxes(1, 2), states


def backward(u, delta, A, B, C, D, starts, states, dy, dfinal, *, chunk_size: int | None):
    """The gradients of u, delta, A, B, C, D in their dtypes, and of the initial state in dfinal's."""
    batch, time = u.shape[:2]
    if time == 1:
        return jax.vjp(_token, u, delta, A, B, C, D, states)[1]((dy, dfinal))
    inputs, chunk = _inputs(u, delta, A, B, C, D, starts, dfinal.dtype), _chunk(time, chunk_size)
    skip = jnp.sum(dy.astype(dfinal.dtype) * u.astype(dfinal.dtype), (0, 1))
    q = dfinal.swapaxes(1, 2)
    if chunk < time:
        inputs, dy = _fold(inputs, chunk), fold(dy, chunk)
        dstate, exits = borders(_product(inputs), _end_back(inputs, dy, q.dtype), q, reverse=True)
        du, ddelta, dA, dB, dC, _ = _walk_back(inputs, states, dy, exits)
        du, ddelta, dB, dC = (unfold(x, batch, time) for x in (du, ddelta, dB, dC))
    else:
        du, ddelta, dA, dB, dC, dstate = _walk_back(inputs, states, dy, q)
    return du, ddelta, dA.T.astype(A.dtype), dB, dC, skip.astype(D.dtype), dstate.swapaxes(1, 2)


def _decay(inputs: Inputs, t, dtype):
    """exp(Δ_t A) [R,N,D], zero at a document's first token."""
    decay = jnp.exp(read(inputs.delta, t, dtype)[:, None] * inputs.A)
    return decay if inputs.starts is None else jnp.where(read(inputs.starts, t)[:, None, None], 0, decay)


def _next(inputs: Inputs, t, state):
    """x_t [R,N,D] from x_{t-1}."""
    dtype = state.dtype
    written = read(inputs.delta, t, dtype) * read(inputs.u, t, dtype)
    return _decay(inputs, t, dtype) * state + written[:, None] * read(inputs.B, t, dtype)[:, :, None]


def _sum_states(x):
    """Σ_n of [R,N,D], term by term: a CPU doesn't vectorise a reduction inside a fused loop."""
    return functools.reduce(operator.add, (x[:, n] for n in range(x.shape[1])))


def _walk(inputs: Inputs, state):
    """State [R,N,D] -> y [R,T,D] in u's dtype, the last state, and the state before each block [blocks,R,N,D]."""
    dtype, time = state.dtype, inputs.u.shape[1]
    size, number, length = _blocks(time)

    def token(t, carry):
        state, y = carry
        state = _next(inputs, t, state)
        out = _sum_states(state * read(inputs.C, t, dtype)[:, :, None]) + inputs.D * read(inputs.u, t, dtype)
        return state, write(y, out, t)

    def block(k, carry):
        state, y, states = carry
        states = lax.dynamic_update_index_in_dim(states, state, k, 0)
        state, y = lax.fori_loop(0, length(k), lambda i, c: token(k * size + i, c), (state, y))
        return state, y, states

    y = varying.zeros(inputs.u.shape, inputs.u.dtype, inputs.u)
    states = varying.zeros((number, *state.shape), dtype, inputs.u)
    state, y, states = lax.fori_loop(0, number, block, (state, y, states))
    return y, state, states


def _walk_back(inputs: Inputs, states, dy, q):
    """The states that _walk saved, dy [R,T,D] and q [R,N,D], the gradient of the last state.

    Returns du, ddelta [R,T,D], dA [N,D], dB, dC [R,T,N] and the gradient of the first state.
    """
    dtype, time = q.dtype, inputs.u.shape[1]
    size, number, length = _blocks(time)

    def replay(start, i, carry):
        state, kept = carry
        return _next(inputs, start + i, state), lax.dynamic_update_index_in_dim(kept, state, i, 0)

    def token(start, kept, i, carry):
        after, q, dA, du, ddelta, dB, dC = carry
        t, before = start + i, lax.dynamic_index_in_dim(kept, i, 0, keepdims=False)
        ut, dt, bt, ct = (read(x, t, dtype) for x in (inputs.u, inputs.delta, inputs.B, inputs.C))
        dyt = read(dy, t, dtype)
        grad = q + dyt[:, None] * ct[:, :, None]
        q = _decay(inputs, t, dtype) * grad
        through = q * before
        dw = _sum_states(grad * bt[:, :, None])
        du = write(du, dt * dw + inputs.D * dyt, t)
        ddelta = write(ddelta, ut * dw + _sum_states(inputs.A * through), t)
        dB = write(dB, _einsum("rnd,rd->rn", grad, dt * ut), t)
        dC = write(dC, _einsum("rnd,rd->rn", after, dyt), t)
        return before, q, dA + dt[:, None] * through, du, ddelta, dB, dC

    def block(j, carry):
        k = number - 1 - j
        start, tokens = k * size, length(k)
        state = lax.dynamic_index_in_dim(states, k, 0, keepdims=False)
        kept = varying.zeros((size, *q.shape), dtype, dy)
        after, kept = lax.fori_loop(0, tokens, functools.partial(replay, start), (state, kept))
        step = lambda i, carry: token(start, kept, tokens - 1 - i, carry)
        return lax.fori_loop(0, tokens, step, (after, *carry))[1:]

    zeros = [varying.zeros(x.shape, x.dtype, dy) for x in (inputs.u, inputs.delta, inputs.B, inputs.C)]
    carry = (q, varying.zeros(q.shape, dtype, dy), *zeros)
    q, dA, du, ddelta, dB, dC = lax.fori_loop(0, number, block, carry)
    return du, ddelta, jnp.sum(dA, 0), dB, dC, q


def _product(inputs: Inputs):
    """The product of each chunk's decays [R,N,D]. Δ >= 0, so that the sum of Δ loses nothing to cancellation."""
    total = jnp.sum(inputs.delta.astype(inputs.A.dtype), axis=1)
    product = jnp.exp(total[:, None] * inputs.A)
    return product if inputs.starts is None else jnp.where(jnp.any(inputs.starts, 1)[:, None, None], 0, product)


def _end(inputs: Inputs, dtype):
    """The state [R,N,D] at each chunk's end, walked to from zeros."""
    rows, time, dim = inputs.u.shape
    zeros = varying.zeros((rows, inputs.A.shape[0], dim), dtype, inputs.u)
    return lax.fori_loop(0, time, functools.partial(_next, inputs), zeros)


def _end_back(inputs: Inputs, dy, dtype):
    """The gradient Q [R,N,D] at each chunk's start, walked to from zeros after its end."""
    rows, time, dim = inputs.u.shape

    def token(i, q):
        t = time - 1 - i
        return _decay(inputs, t, dtype) * (q + read(dy, t, dtype)[:, None] * read(inputs.C, t, dtype)[:, :, None])

    zeros = varying.zeros((rows, inputs.A.shape[0], dim), dtype, inputs.u)
    return lax.fori_loop(0, time, token, zeros)


def _token(u, delta, A, B, C, D, state):
    """One step, as decoding wants it, the state [B,D,N] as it lies: y [B,1,D] in u's dtype, the new state.

    A row's first document continues the initial state, so that no document starts at a row's only token.
    """
    dtype = state.dtype
    ut, dt, bt, ct = (x[:, 0].astype(dtype) for x in (u, delta, B, C))
    new = jnp.exp(dt[..., None] * A.astype(dtype)) * state + (dt * ut)[..., None] * bt[:, None]
    y = _einsum("bdn,bn->bd", new, ct) + D.astype(dtype) * ut
    return y[:, None].astype(u.dtype), new
