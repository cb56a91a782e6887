"""attention: softmax attention, causal or not, with windows, documents, grouped heads, a soft cap and sinks."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyjax.kernels import dispatch
from hyjax.kernels.attention import reference, xla

OPERATOR = "attention"
NO_PALLAS = "a flash-style kernel with the running softmax in fast memory would be possible"


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Softmax attention: o_i = Σ_j p_ij v_j, p_ij = e^{s_ij} / (Σ_j e^{s_ij} + e^{sink}) over the keys that i may see.

    s_ij = scale · q_i·k_j, capped as soft_cap · tanh(s / soft_cap) where there is a cap. The softmax is in float32. A
    row that may see nothing is exactly zero, with zero gradients.

    Args:
      q: [B, Tq, Hq, K].
      k: [B, Tk, Hk, K]; Hq is a multiple of Hk, and head h of q uses head h // (Hq / Hk) of k and v.
      v: [B, Tk, Hk, V].
      causal: a query sees keys of its own and earlier positions.
      window: the W positions i-W+1 .. i, the query's own included; needs causal.
      q_positions, kv_positions: [B, Tq] and [B, Tk] integers, both or neither. With them causality and window go by
        position, in whatever order keys lie (a ring cache); without, queries align with the end of the keys: query i
        is at position Tk - Tq + i, and Tq > Tk is legal. Leave them out where rows lie in order: what is skipped is
        then known before anything runs.
      segment_ids: [B, Tq] integers: a query sees keys of equal id. 0 is padding: a query of id 0 is a zero row, a key
        of id 0 is never seen, and both may hold anything.
      kv_segment_ids: [B, Tk]; may be left out where Tq == Tk.
      scale: None means K ** -0.5.
      soft_cap: positive, or None.
      sinks: [Hq], a logit a head that joins the denominator alone.
      implementation: "auto", "reference" (query by query) or "xla" (all logits at once where they are few, else in
        blocks with memory linear in T). No Pallas kernel serves this operator yet.
      interpret: a modifier of "pallas".

    Returns:
      o [B, Tq, Hq, V] in v's dtype.

    Raises:
      ValueError: shapes that don't agree, options that contradict, or an implementation that can't serve the call.
    """
    choice = dispatch.choose(OPERATOR, implementation, interpret, NO_PALLAS)
    _check(q, k, v, sinks)
    _check_rows(q, k, q_positions, kv_positions, segment_ids, kv_segment_ids)
    _check_options(causal, window, soft_cap)
    (batch, q_len), kv_len = q.shape[:2], k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q_positions is None or kv_positions is None:
        q_positions = jnp.arange(kv_len - q_len, kv_len)[None]
        kv_positions = jnp.arange(kv_len)[None]
    # signed, since positions are subtracted
    q_positions, kv_positions = q_positions.astype(jnp.int32), kv_positions.astype(jnp.int32)
    if segment_ids is not None and kv_segment_ids is None:
        kv_segment_ids = segment_ids
    options = xla.Options(causal, window, float(scale), None if soft_cap is None else float(soft_cap))
    dtype = dispatch.compute_dtype(q, k, v)
    if choice == "reference":
        q_positions = jnp.broadcast_to(q_positions, (batch, q_len))
        kv_positions = jnp.broadcast_to(kv_positions, (batch, kv_len))
        rows = (q_positions, kv_positions, segment_ids, kv_segment_ids)
        return reference.attention(q, k, v, *rows, sinks, **options._asdict()).astype(v.dtype)
    q_rows, kv_rows = xla.Rows(q_positions, segment_ids), xla.Rows(kv_positions, kv_segment_ids)
    if segment_ids is not None and kv_segment_ids is not None:
        # Selecting, and not multiplying, keeps what padding holds (NaN included) out of values and gradients.
        q = jnp.where((segment_ids != 0)[..., None, None], q, 0)
        k, v = (jnp.where((kv_segment_ids != 0)[..., None, None], x, 0) for x in (k, v))
    return _attention(q, k, v, sinks, q_rows, kv_rows, options, dtype)


def _check(q, k, v, sinks) -> None:
    dispatch.check_rank(OPERATOR, "q", q, 4, "[B, Tq, Hq, K]")
    dispatch.check_rank(OPERATOR, "k", k, 4, "[B, Tk, Hk, K]")
    dispatch.check_rank(OPERATOR, "v", v, 4, "[B, Tk, Hk, V]")
    (batch, q_len, q_heads, key_dim), (kv_len, kv_heads) = q.shape, k.shape[1:3]
    dispatch.check_shape(OPERATOR, "k", k, (batch, kv_len, kv_heads, key_dim), "[B, Tk, Hk, K] with q's B and K")
    dispatch.check_shape(OPERATOR, "v", v, (batch, kv_len, kv_heads, v.shape[3]), "[B, Tk, Hk, V] with k's B, Tk, Hk")
    if min(q_len, kv_len, kv_heads) < 1 or q_heads % kv_heads or q_heads < kv_heads:
        raise ValueError(
            f"{OPERATOR}: q {tuple(q.shape)} and k {tuple(k.shape)} need Tq, Tk >= 1 and q's heads a multiple of k's"
        )
    dispatch.check_floating(OPERATOR, q=q, k=k, v=v)
    if sinks is not None:
        dispatch.check_shape(OPERATOR, "sinks", sinks, (q_heads,), "[Hq]")
        dispatch.check_floating(OPERATOR, sinks=sinks)


def _check_rows(q, k, q_positions, kv_positions, segment_ids, kv_segment_ids) -> None:
    for name, rows in dict(q_positions=q_positions, segment_ids=segment_ids).items():
        if rows is not None:
            dispatch.check_shape(OPERATOR, name, rows, q.shape[:2], "[B, Tq]")
    for name, rows in dict(kv_positions=kv_positions, kv_segment_ids=kv_segment_ids).items():
        if rows is not None:
            dispatch.check_shape(OPERATOR, name, rows, k.shape[:2], "[B, Tk]")
    dispatch.check_integers(OPERATOR, q_positions=q_positions, kv_positions=kv_positions)
    dispatch.check_integers(OPERATOR, segment_ids=segment_ids, kv_segment_ids=kv_segment_ids)
    if (q_positions is None) != (kv_positions is None):
        raise ValueError(f"{OPERATOR}: q_positions and kv_positions come together; one of them is None")
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError(f"{OPERATOR}: kv_segment_ids {tuple(kv_segment_ids.shape)} came without segment_ids [B, Tq]")
    if segment_ids is not None and kv_segment_ids is None and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{OPERATOR}: segment_ids {tuple(segment_ids.shape)} don't name the {k.shape[1]} keys; give kv_segment_ids"
        )


def _check_options(causal, window, soft_cap) -> None:
    if window is not None and (not causal or window < 1):
        raise ValueError(f"{OPERATOR}: window={window} must be at least 1 and needs causal=True (causal={causal})")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{OPERATOR}: soft_cap={soft_cap} must be positive, or None")


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attention(q, k, v, sinks, q_rows, kv_rows, options, dtype):
    return _forward(q, k, v, sinks, q_rows, kv_rows, options, dtype)[0]


def _forward(q, k, v, sinks, q_rows, kv_rows, options, dtype):
    o, lse = xla.forward(q, k, v, q_rows, kv_rows, sinks, options, dtype)
    o = checkpoint_name(o.astype(v.dtype), "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return o, (q, k, v, sinks, q_rows, kv_rows, o, lse)


def _backward(options, dtype, saved, do):
    q, k, v, sinks, q_rows, kv_rows, o, lse = saved
    dq, dk, dv, dsinks = xla.backward(q, k, v, q_rows, kv_rows, sinks, o, lse, do, options, dtype)
    dsinks = None if sinks is None else dsinks.astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsinks, None, None


_attention.defvjp(_forward, _backward)
