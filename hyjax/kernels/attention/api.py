"""attention: softmax attention, causal or not, with windows, documents, grouped heads, a soft cap and sinks."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyjax.kernels import dispatch
from hyjax.kernels.attention import gpu_plan, libraries, reference, tpu_blocks, xla

OPERATOR = "attention"


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
      implementation: "auto", "reference" (query by query), "xla" (all logits at once where they are few, else in
        blocks with memory linear in T) or "pallas" (flash kernels for a TPU or a Hopper GPU, for calls without
        positions), and by name JAX's own kernels, "splash" (TPU) and "cudnn" (GPU), for the calls that they can serve.
      interpret: a modifier of "pallas".

    Returns:
      o [B, Tq, Hq, V] in v's dtype.

    Raises:
      ValueError: shapes that don't agree, options that contradict, or an implementation that can't serve the call.
    """
    _check(q, k, v, sinks)
    _check_rows(q, k, q_positions, kv_positions, segment_ids, kv_segment_ids)
    _check_options(causal, window, soft_cap)
    kernels = _refusals(q, k, v, q_positions, segment_ids, kv_segment_ids, causal, soft_cap, sinks, interpret)
    choice = dispatch.choose(OPERATOR, implementation, interpret, dispatch.unless_empty(kernels, q, k, v))
    (batch, q_len), kv_len = q.shape[:2], k.shape[1]
    scale = dispatch.scale_of(OPERATOR, scale, q.shape[-1])
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
    if segment_ids is not None and kv_segment_ids is not None:
        # Selecting, and not multiplying, keeps what padding holds (NaN included) out of values and gradients.
        q = jnp.where((segment_ids != 0)[..., None, None], q, 0)
        k, v = (jnp.where((kv_segment_ids != 0)[..., None, None], x, 0) for x in (k, v))
    if choice == "splash":
        return libraries.splash(q, k, v, segment_ids, sinks, options)
    if choice == "cudnn":
        return libraries.cudnn(q, k, v, options)
    if choice == "xla":
        run = dispatch.Run.of(OPERATOR, choice, interpret, options=options, dtype=dtype)
        by_row = xla.Rows(q_positions, segment_ids), xla.Rows(kv_positions, kv_segment_ids)
        return _attention(q, k, v, sinks, *by_row, run)
    run = dispatch.Run.of(OPERATOR, choice, interpret, options=options)
    return _attention(q, k, v, sinks, segment_ids, kv_segment_ids, run)


def _refusals(
    q, k, v, q_positions, segment_ids, kv_segment_ids, causal, soft_cap, sinks, interpret
) -> dict[str, str | None]:
    """Why each kernel can't serve the call, or None."""
    by_position, ids = q_positions is not None, [x for x in (segment_ids, kv_segment_ids) if x is not None]
    for x in ids:
        if x.dtype.itemsize > 4:
            reason = f"segment ids have dtype {x.dtype}, and it takes up to 32 bits"
            return dict.fromkeys(("pallas_tpu", "pallas_gpu", "splash", "cudnn"), reason)
    return {
        "pallas_tpu": tpu_blocks.refusal(q, k, v, by_position),
        "pallas_gpu": gpu_plan.refusal(q, k, v, by_position, interpret),
        "splash": libraries.splash_refusal(q, k, by_position, kv_segment_ids is not None),
        "cudnn": libraries.cudnn_refusal(q, k, v, by_position, bool(ids), causal, soft_cap, sinks),
    }


def _check(q, k, v, sinks) -> None:
    dispatch.check_rank(OPERATOR, "q", q, 4, "[B, Tq, Hq, K]")
    dispatch.check_rank(OPERATOR, "k", k, 4, "[B, Tk, Hk, K]")
    dispatch.check_rank(OPERATOR, "v", v, 4, "[B, Tk, Hk, V]")
    (batch, q_len, q_heads, key_dim), (kv_len, kv_heads) = q.shape, k.shape[1:3]
    dispatch.check_shape(OPERATOR, "k", k, (batch, kv_len, kv_heads, key_dim), "[B, Tk, Hk, K] with q's B and K")
    dispatch.check_shape(OPERATOR, "v", v, (batch, kv_len, kv_heads, v.shape[3]), "[B, Tk, Hk, V] with k's B, Tk, Hk")
    if min(q_len, kv_len, kv_heads, key_dim) < 1 or q_heads % kv_heads or q_heads < kv_heads:
        raise ValueError(
            f"{OPERATOR}: q {tuple(q.shape)} and k {tuple(k.shape)} need Tq, Tk, K >= 1 and q's heads a multiple of k's"
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
    dispatch.check_whole(OPERATOR, "window", window)
    if window is not None and not causal:
        raise ValueError(f"{OPERATOR}: window={window} needs causal=True, not causal={causal}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{OPERATOR}: soft_cap={soft_cap} must be positive, or None")


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(q, k, v, sinks, q_rows, kv_rows, run):
    return _forward(q, k, v, sinks, q_rows, kv_rows, run)[0]


def _forward(q, k, v, sinks, q_rows, kv_rows, run):
    o, lse = run.forward(q, k, v, q_rows, kv_rows, sinks)
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)  # a row that sees nothing, beside a sink of -inf
    o = checkpoint_name(o.astype(v.dtype), "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return o, (q, k, v, sinks, q_rows, kv_rows, o, lse)


def _backward(run, saved, do):
    q, k, v, sinks, q_rows, kv_rows, o, lse = saved
    dq, dk, dv, dsinks = run.backward(q, k, v, q_rows, kv_rows, sinks, o, lse, do)
    dsinks = None if sinks is None else dsinks.astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsinks, None, None


_attention.defvjp(_forward, _backward)
