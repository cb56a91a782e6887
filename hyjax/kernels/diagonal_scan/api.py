"""diagonal_scan: the elementwise linear recurrence, real or complex."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyjax.kernels import dispatch, segments, varying
from hyjax.kernels.diagonal_scan import reference, tpu_plan
from hyjax.kernels.varying import alike

OPERATOR = "diagonal_scan"


def diagonal_scan(
    x: jax.Array,
    log_decay: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The elementwise linear recurrence h_t = e^{g_t} h_{t-1} + x_t.

    Serves RG-LRU and minGRU (real) and S4D (complex). Where one of x, log_decay and initial_state is complex, all of it
    is: h and the final state are complex.

    Args:
      x: [B, T, D].
      log_decay: g [B, T, D], the natural logarithm of the decay, whose real part is at most 0.
      initial_state: h_0 [B, D]; None means zeros.
      segment_ids: [B, T] integers. 0 is padding, which neither reads nor writes the state, whose output and gradients
        are zero and which may hold anything. A document ends where a non-zero id differs from the last non-zero id
        before it, and the state is zero again; the first non-zero id of a row continues `initial_state`.
      chunk_size: tokens that are walked one after the other, chunks being walked side by side, in the "xla"
        implementation; None asks the table. Values don't depend on it.
      implementation: "auto", "reference" (token by token), "xla" or "pallas" (TPU).
      interpret: a modifier of "pallas".

    Returns:
      h [B, T, D] in x's dtype (complex64 or complex128 where it is complex), and the final state [B, D] in float32
      (float64 where an input is, complex64 or complex128 where one is complex).

    Raises:
      ValueError: shapes that don't agree, or an implementation that can't serve the call.
    """
    _check(x, log_decay, initial_state, segment_ids, chunk_size)
    kernels = {"pallas_tpu": tpu_plan.refusal(x, log_decay, initial_state)}
    choice = dispatch.choose(OPERATOR, implementation, interpret, dispatch.unless_empty(kernels, x))
    inputs = (x, log_decay) if initial_state is None else (x, log_decay, initial_state)
    dtype = dispatch.compute_dtype(x, log_decay)
    if any(jnp.iscomplexobj(a) for a in inputs):
        dtype = jnp.result_type(dtype, jnp.complex64)
        x, log_decay = x.astype(dtype), log_decay.astype(dtype)
    if initial_state is None:
        initial_state = varying.zeros((x.shape[0], x.shape[2]), dtype, x)
    state = initial_state.astype(dtype)
    if choice == "reference":
        h, final = reference.diagonal_scan(x, log_decay, state, segment_ids)
        return h.astype(x.dtype), final
    run = dispatch.Run.of(OPERATOR, choice, interpret, chunk_size=chunk_size)
    if segment_ids is None:
        return _diagonal_scan(*alike(x, log_decay, state), run)
    # Selecting, and not multiplying, keeps what padding holds (NaN included) out of values and gradients.
    valid = (segment_ids != 0)[..., None]
    x, log_decay = jnp.where(valid, x, 0), jnp.where(valid, log_decay, 0)
    log_decay = jnp.where(segments.starts(segment_ids)[..., None], -jnp.inf, log_decay)  # e^-inf = 0: a new document
    h, final = _diagonal_scan(*alike(x, log_decay, state), run)
    return jnp.where(valid, h, 0), final


def _check(x, log_decay, initial_state, segment_ids, chunk_size) -> None:
    dispatch.check_rank(OPERATOR, "x", x, 3, "[B, T, D]")
    batch, time, dim = x.shape
    if time < 1:
        raise ValueError(f"{OPERATOR}: x {tuple(x.shape)} needs T >= 1")
    dispatch.check_shape(OPERATOR, "log_decay", log_decay, x.shape, "[B, T, D] as x")
    arrays = dict(x=x, log_decay=log_decay)
    if initial_state is not None:
        dispatch.check_shape(OPERATOR, "initial_state", initial_state, (batch, dim), "[B, D]")
        arrays["initial_state"] = initial_state
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            raise ValueError(f"{OPERATOR}: {name} has dtype {array.dtype}, expected a floating or complex dtype")
    if segment_ids is not None:
        dispatch.check_shape(OPERATOR, "segment_ids", segment_ids, (batch, time), "[B, T]")
        dispatch.check_integers(OPERATOR, segment_ids=segment_ids)
    dispatch.check_whole(OPERATOR, "chunk_size", chunk_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _diagonal_scan(x, log_decay, state, run):
    return _forward(x, log_decay, state, run)[0]


def _forward(x, log_decay, state, run):
    h, final = run.forward(x, log_decay, state)
    h = checkpoint_name(h, "diagonal_scan_out")
    return (h, final), (h, log_decay, state)


def _backward(run, saved, cotangents):
    return run.backward(*saved, *cotangents)


_diagonal_scan.defvjp(_forward, _backward)
