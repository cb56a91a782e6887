"""attention query by query: the plain statement of what the operator means, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jax import lax


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    kv_positions: jax.Array,
    q_segments: jax.Array | None,
    kv_segments: jax.Array | None,
    sinks: jax.Array | None,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    soft_cap: float | None,
) -> jax.Array:
    """q [B,Tq,Hq,K], k [B,Tk,Hk,K], v [B,Tk,Hk,V], positions and ids [B,Tq] and [B,Tk], sinks [Hq] -> [B,Tq,Hq,V].

    Computed in float32, or in float64 where q is; returned so.
    """
    dtype = jnp.result_type(jnp.float32, q.dtype)
    batch, q_len, heads, _ = q.shape
    groups = heads // k.shape[2]
    if q_segments is None or kv_segments is None:
        q_segments = jnp.ones((batch, q_len), jnp.int32)
        kv_segments = jnp.ones(k.shape[:2], jnp.int32)
    # Padding may hold anything, NaN included: it must not reach an arithmetic operation, nor a gradient.
    q = jnp.where((q_segments != 0)[..., None, None], q, 0).astype(dtype)
    k, v = (jnp.where((kv_segments != 0)[..., None, None], a, 0).astype(dtype) for a in (k, v))
    k, v = (jnp.repeat(a, groups, axis=2) for a in (k, v))
    extra = jnp.full((heads,), -jnp.inf, dtype) if sinks is None else sinks.astype(dtype)

    def one_query(inputs):
        qt, position, segment = inputs  # [B,Hq,K], [B], [B]
        logits = scale * jnp.einsum("bhd,bshd->bhs", qt, k, precision=lax.Precision.HIGHEST)
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        visible = (segment[:, None] == kv_segments) & (kv_segments != 0)
        if causal:
            visible &= kv_positions <= position[:, None]
        if window is not None:
            visible &= kv_positions > position[:, None] - window
        visible = visible[:, None]
        logits = jnp.where(visible, logits, -jnp.inf)
        top = jnp.maximum(jnp.max(logits, axis=-1), extra)
        top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))  # a row that sees nothing
        weights = jnp.exp(logits - top[..., None])
        total = jnp.sum(weights, axis=-1) + jnp.exp(extra - top)
        probabilities = weights / jnp.where(total > 0, total, 1)[..., None]
        return jnp.einsum("bhs,bshd->bhd", probabilities, v, precision=lax.Precision.HIGHEST)

    out = lax.map(one_query, (jnp.moveaxis(q, 1, 0), q_positions.T, q_segments.T))
    return jnp.moveaxis(out, 0, 1)
