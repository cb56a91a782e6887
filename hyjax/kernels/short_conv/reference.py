"""short_conv token by token: the plain statement of what the operator means, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jax import lax


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    initial_state: jax.Array,
    segment_ids: jax.Array | None,
    activation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """x [B,T,D], weight [W,D], bias [D] or None, initial_state [B,W-1,D], ids [B,T] or None -> y [B,T,D], final state.

    Everything is computed, and returned, in the dtype of `initial_state`.
    """
    dtype = initial_state.dtype
    weight = weight.astype(dtype)
    if segment_ids is None:
        segment_ids = jnp.ones(x.shape[:2], jnp.int32)

    def step(carry, inputs):
        tail, last_id = carry
        xt, segment = inputs
        valid = segment != 0
        xt = jnp.where(valid[:, None], xt, 0).astype(dtype)  # padding may hold anything, NaN included
        new_document = valid & (last_id != 0) & (segment != last_id)
        entry = jnp.where(new_document[:, None, None], 0, tail)
        seen = jnp.concatenate([entry, xt[:, None]], axis=1)
        y = jnp.sum(seen * weight, axis=1) + (0 if bias is None else bias)
        if activation == "silu":
            y = jax.nn.silu(y)
        tail = jnp.where(valid[:, None, None], seen[:, 1:], tail)
        return (tail, jnp.where(valid, segment, last_id)), jnp.where(valid[:, None], y, 0)

    inputs = (jnp.moveaxis(x, 1, 0), segment_ids.T)
    (tail, _), y = lax.scan(step, (initial_state, jnp.zeros_like(segment_ids[:, 0])), inputs)
    return jnp.moveaxis(y, 0, 1), tail
