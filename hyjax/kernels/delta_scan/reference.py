"""delta_scan token by token: the plain statement of what the operator means, differentiated by JAX."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def delta_scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array,
    initial_state: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """q, k [B,T,H,K], v [B,T,HV,V], beta [B,T,HV], log_decay [B,T,HV] or [B,T,HV,K], initial_state [B,HV,K,V].

    Returns o [B,T,HV,V] and the final state, in the dtype of `initial_state` (in which everything is computed).
    """
    dtype = initial_state.dtype
    groups = v.shape[2] // k.shape[2]
    if segment_ids is None:
        segment_ids = jnp.ones(v.shape[:2], jnp.int32)
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]

    def step(carry, inputs):
        state, last_id = carry
        qt, kt, vt, bt, gt, segment = inputs
        valid = (segment != 0)[:, None, None]
        # Padding may hold anything, NaN included: it must not reach an arithmetic operation, nor a gradient.
        qt, kt, vt, bt, gt = (jnp.where(valid, a, 0).astype(dtype) for a in (qt, kt, vt, bt[..., None], gt))
        qt, kt = (jnp.repeat(a, groups, axis=1) for a in (qt, kt))
        new_document = (segment != 0) & (last_id != 0) & (segment != last_id)
        entry = jnp.where(new_document[:, None, None, None], 0, state)
        decayed = jnp.exp(gt)[..., None] * entry
        error = vt - _einsum("bhkv,bhk->bhv", decayed, kt)
        new = decayed + kt[..., None] * (bt * error)[..., None, :]
        out = scale * _einsum("bhkv,bhk->bhv", new, qt)
        state = jnp.where(valid[..., None], new, state)
        return (state, jnp.where(segment != 0, segment, last_id)), jnp.where(valid, out, 0)

    by_time = [jnp.moveaxis(a, 1, 0) for a in (q, k, v, beta, log_decay, segment_ids)]
    (state, _), out = lax.scan(step, (initial_state, jnp.zeros_like(segment_ids[:, 0])), tuple(by_time))
    return jnp.moveaxis(out, 0, 1), state
