"""selective_scan token by token: the plain statement of what the operator means, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jax import lax


def selective_scan(
    u: jax.Array,
    delta: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    initial_state: jax.Array,
    segment_ids: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """u, delta [B,T,D], A [D,N], B, C [B,T,N], D [D], initial_state [B,D,N], ids [B,T] or None.

    Returns y [B,T,D] and the final state, in the dtype of `initial_state` (in which everything is computed).
    """
    dtype = initial_state.dtype
    A, D = A.astype(dtype), D.astype(dtype)
    if segment_ids is None:
        segment_ids = jnp.ones(u.shape[:2], jnp.int32)

    def step(carry, inputs):
        state, last_id = carry
        ut, dt, bt, ct, segment = inputs
        valid = (segment != 0)[:, None]
        # Padding may hold anything, NaN included: it must not reach an arithmetic operation, nor a gradient.
        ut, dt, bt, ct = (jnp.where(valid, a, 0).astype(dtype) for a in (ut, dt, bt, ct))
        new_document = (segment != 0) & (last_id != 0) & (segment != last_id)
        entry = jnp.where(new_document[:, None, None], 0, state)
        new = jnp.exp(dt[..., None] * A) * entry + (dt * ut)[..., None] * bt[:, None, :]
        y = jnp.einsum("bdn,bn->bd", new, ct, precision=lax.Precision.HIGHEST) + D * ut
        state = jnp.where(valid[..., None], new, state)
        return (state, jnp.where(segment != 0, segment, last_id)), jnp.where(valid, y, 0)

    by_time = tuple(jnp.moveaxis(a, 1, 0) for a in (u, delta, B, C, segment_ids))
    (state, _), y = lax.scan(step, (initial_state, jnp.zeros_like(segment_ids[:, 0])), by_time)
    return jnp.moveaxis(y, 0, 1), state
