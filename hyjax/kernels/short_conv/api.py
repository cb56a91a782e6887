"""short_conv: the causal depthwise convolution of a few taps in front of the recurrences."""

import functools

import jax
import jax.numpy as jnp

from hyjax.kernels import dispatch, varying
from hyjax.kernels.short_conv import reference, xla

OPERATOR = "short_conv"
NO_PALLAS = "XLA fuses its few products into one pass"


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = "silu",
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The causal depthwise convolution y_t = act(Σ_w weight[w] · x_{t-W+1+w} + bias), channel by channel.

    Args:
      x: [B, T, D].
      weight: [W, D], any W >= 1; weight[-1] multiplies the newest token.
      bias: [D] or None.
      activation: "silu" (y · sigmoid(y)) or None.
      initial_state: [B, W-1, D], the W-1 inputs before the first, oldest first; None means zeros.
      segment_ids: [B, T] integers. 0 is padding: it is skipped as if absent, wherever it stands, its output and
        gradients are zero and it may hold anything. A document ends where a non-zero id differs from the last non-zero
        id before it, and sees zeros before its first token; the first non-zero id continues `initial_state`.
      implementation: "auto", "reference" (token by token) or "xla". No Pallas kernel serves this operator yet.
      interpret: a modifier of "pallas".

    Returns:
      y [B, T, D] in x's dtype, and the final state [B, W-1, D]: the last W-1 inputs of the current document, padding
      left out, zeros where the document is younger; in the dtype of `initial_state`, else of x.

    Raises:
      ValueError: shapes that don't agree, an unknown activation, or an implementation that can't serve the call.
    """
    choice = dispatch.choose(OPERATOR, implementation, interpret, NO_PALLAS)
    _check(x, weight, bias, activation, initial_state, segment_ids)
    dtype = dispatch.compute_dtype(x, weight)
    if initial_state is None:
        initial_state = varying.zeros((x.shape[0], weight.shape[0] - 1, x.shape[2]), x.dtype, x)
    state, weight = initial_state.astype(dtype), weight.astype(dtype)
    bias = None if bias is None else bias.astype(dtype)
    if choice == "reference":
        y, final = reference.short_conv(x, weight, bias, state, segment_ids, activation)
        return y.astype(x.dtype), final.astype(initial_state.dtype)
    if segment_ids is None:
        y, final = _short_conv(x, weight, bias, state, None, activation)
        return y, final.astype(initial_state.dtype)
    # Selecting, and not multiplying, keeps what padding holds (NaN included) out of values and gradients.
    valid = (segment_ids != 0)[..., None]
    y, final = _short_conv(jnp.where(valid, x, 0), weight, bias, state, xla.documents(segment_ids), activation)
    return jnp.where(valid, y, 0), final.astype(initial_state.dtype)


def _check(x, weight, bias, activation, initial_state, segment_ids) -> None:
    dispatch.check_rank(OPERATOR, "x", x, 3, "[B, T, D]")
    dispatch.check_rank(OPERATOR, "weight", weight, 2, "[W, D]")
    (batch, time, dim), width = x.shape, weight.shape[0]
    if time < 1 or width < 1:
        raise ValueError(f"{OPERATOR}: x {x.shape} and weight {weight.shape} need T >= 1 and W >= 1")
    dispatch.check_shape(OPERATOR, "weight", weight, (width, dim), "[W, D] with x's D")
    dispatch.check_floating(OPERATOR, x=x, weight=weight)
    if bias is not None:
        dispatch.check_shape(OPERATOR, "bias", bias, (dim,), "[D]")
        dispatch.check_floating(OPERATOR, bias=bias)
    if activation not in ("silu", None):
        raise ValueError(f"{OPERATOR}: activation={activation!r} is neither 'silu' nor None")
    if initial_state is not None:
        dispatch.check_shape(OPERATOR, "initial_state", initial_state, (batch, width - 1, dim), "[B, W-1, D]")
        dispatch.check_floating(OPERATOR, initial_state=initial_state)
    if segment_ids is not None:
        dispatch.check_shape(OPERATOR, "segment_ids", segment_ids, (batch, time), "[B, T]")
        dispatch.check_integers(OPERATOR, segment_ids=segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _short_conv(x, weight, bias, state, docs, activation):
    return _forward(x, weight, bias, state, docs, activation)[0]


def _forward(x, weight, bias, state, docs, activation):
    y, final = xla.forward(x, weight, bias, state, docs, activation)
    return (y.astype(x.dtype), final), (x, weight, bias, state, docs)


def _backward(activation, saved, cotangents):
    x, weight, bias, state, docs = saved
    dx, dweight, dbias, dstate = xla.backward(x, weight, bias, state, docs, activation, *cotangents)
    return dx.astype(x.dtype), dweight, dbias, dstate, None


_short_conv.defvjp(_forward, _backward)
