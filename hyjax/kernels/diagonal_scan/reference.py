"""diagonal_scan token by token: the plain statement of what the operator means, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jax import lax


def diagonal_scan(
    x: jax.Array,
    log_decay: jax.Array,
    initial_state: jax.Array,
    segment_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """x, log_decay [B,T,D], initial_state [B,D], ids [B,T] or None.

    Returns h [B,T,D] and the final state, in the dtype of `initial_state` (in which everything is computed).
    """
    dtype = initial_state.dtype
    if segment_ids is None:
        segment_ids = jnp.ones(x.shape[:2], jnp.int32)

    def step(carry, inputs):
        state, last_id = carry
        xt, gt, segment = inputs
        valid = (segment != 0)[:, None]
        # Padding may hold anything, NaN included: it must not reach an arithmetic operation, nor a gradient.
        xt, gt = (jnp.where(valid, a, 0).astype(dtype) for a in (xt, gt))
        new_document = (segment != 0) & (last_id != 0) & (segment != last_id)
        entry = jnp.where(new_document[:, None], 0, state)
        new = jnp.exp(gt) * entry + xt
        state = jnp.where(valid, new, state)
        return (state, jnp.where(segment != 0, segment, last_id)), jnp.where(valid, new, 0)

    by_time = tuple(jnp.moveaxis(a, 1, 0) for a in (x, log_decay, segment_ids))
    (state, _), h = lax.scan(step, (initial_state, jnp.zeros_like(segment_ids[:, 0])), by_time)
    return jnp.moveaxis(h, 0, 1), state
