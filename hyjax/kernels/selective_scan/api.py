"""selective_scan: the recurrence of Mamba-1, a state of N numbers a channel with input-dependent steps."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyjax.kernels import dispatch, segments, varying
from hyjax.kernels.selective_scan import reference, tpu_plan
from hyjax.kernels.varying import alike

OPERATOR = "selective_scan"


def selective_scan(
    u: jax.Array,
    delta: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The selective state-space recurrence x_t = exp(Δ_t A) x_{t-1} + Δ_t u_t B_tᵀ, y_t = x_t C_t + D u_t.

    Per channel d and state n: x[d,n] <- exp(Δ[d] A[d,n]) x[d,n] + Δ[d] u[d] B[n]; y[d] = Σ_n C[n] x[d,n] + D[d] u[d].
    Serves Mamba-1. The expanded states [B, T, D, N] are never in memory, forward or backward.

    Args:
      u: [B, T, D], the input.
      delta: Δ [B, T, D], the step, at least 0: after softplus, which is the caller's.
      A: [D, N], below 0.
      B, C: [B, T, N], shared by the channels.
      D: [D], the skip.
      initial_state: x_0 [B, D, N]; None means zeros.
      segment_ids: [B, T] integers. 0 is padding, which neither reads nor writes the state, whose output and gradients
        are zero and which may hold anything. A document ends where a non-zero id differs from the last non-zero id
        before it, and the state is zero again; the first non-zero id of a row continues `initial_state`.
      chunk_size: tokens that are walked one after the other, chunks being walked side by side, in the "xla"
        implementation; None asks the table. Values don't depend on it.
      implementation: "auto", "reference" (token by token), "xla" or "pallas" (TPU).
      interpret: a modifier of "pallas".

    Returns:
      y [B, T, D] in u's dtype, and the final state [B, D, N] in float32 (float64 where an input is).

    Raises:
      ValueError: shapes that don't agree, or an implementation that can't serve the call.
    """
    _check(u, delta, A, B, C, D, initial_state, segment_ids, chunk_size)
    kernels = {"pallas_tpu": tpu_plan.refusal(u, delta, A, B, C, D, initial_state)}
    choice = dispatch.choose(OPERATOR, implementation, interpret, dispatch.unless_empty(kernels, u, A))
    dtype = dispatch.compute_dtype(u, delta, A, B, C, D)
    if initial_state is None:
        initial_state = varying.zeros((u.shape[0], *A.shape), dtype, u)
    state = initial_state.astype(dtype)
    if choice == "reference":
        y, final = reference.selective_scan(u, delta, A, B, C, D, state, segment_ids)
        return y.astype(u.dtype), final
    run = dispatch.Run.of(OPERATOR, choice, interpret, chunk_size=chunk_size)
    starts = None
    if segment_ids is not None:
        # Selecting, and not multiplying, keeps what padding holds (NaN included) out of values and gradients. With
        # Δ = 0 the decay is 1 and nothing is written.
        valid = (segment_ids != 0)[..., None]
        u, delta, B, C = (jnp.where(valid, x, 0) for x in (u, delta, B, C))
        starts = segments.starts(segment_ids)
    y, final = _selective_scan(*alike(u, delta, A, B, C, D, state, starts), run)
    return y if segment_ids is None else jnp.where(valid, y, 0), final


def _check(u, delta, A, B, C, D, initial_state, segment_ids, chunk_size) -> None:
    dispatch.check_rank(OPERATOR, "u", u, 3, "[B, T, D]")
    dispatch.check_rank(OPERATOR, "A", A, 2, "[D, N]")
    (batch, time, dim), states = u.shape, A.shape[1]
    if time < 1 or states < 1:
        raise ValueError(f"{OPERATOR}: u {tuple(u.shape)} and A {tuple(A.shape)} need T >= 1 and N >= 1")
    dispatch.check_shape(OPERATOR, "delta", delta, u.shape, "[B, T, D] as u")
    dispatch.check_shape(OPERATOR, "A", A, (dim, states), "[D, N] with u's D")
    for name, array in (("B", B), ("C", C)):
        dispatch.check_shape(OPERATOR, name, array, (batch, time, states), "[B, T, N] with u's B and T and A's N")
    dispatch.check_shape(OPERATOR, "D", D, (dim,), "[D] with u's D")
    dispatch.check_floating(OPERATOR, u=u, delta=delta, A=A, B=B, C=C, D=D)
    if initial_state is not None:
        dispatch.check_shape(OPERATOR, "initial_state", initial_state, (batch, dim, states), "[B, D, N]")
        dispatch.check_floating(OPERATOR, initial_state=initial_state)
    if segment_ids is not None:
        dispatch.check_shape(OPERATOR, "segment_ids", segment_ids, (batch, time), "[B, T]")
        dispatch.check_integers(OPERATOR, segment_ids=segment_ids)
    dispatch.check_whole(OPERATOR, "chunk_size", chunk_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def _selective_scan(u, delta, A, B, C, D, state, starts, run):
    return _forward(u, delta, A, B, C, D, state, starts, run)[0]


def _forward(u, delta, A, B, C, D, state, starts, run):
    y, final, states = run.forward(u, delta, A, B, C, D, starts, state)
    states = checkpoint_name(states, "selective_scan_states")
    return (checkpoint_name(y, "selective_scan_out"), final), (u, delta, A, B, C, D, starts, states)


def _backward(run, saved, cotangents):
    return *run.backward(*saved, *cotangents), None


_selective_scan.defvjp(_forward, _backward)
