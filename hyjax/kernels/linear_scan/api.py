"""linear_scan: the gated linear recurrence, with one decay a head or one a key channel."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyjax.kernels import dispatch, segments, varying
from hyjax.kernels.linear_scan import gpu_plan, reference, tpu_plan
from hyjax.kernels.varying import alike

OPERATOR = "linear_scan"


def linear_scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The gated linear recurrence S_t = e^{g_t} S_{t-1} + k_t v_tᵀ, o_t = scale · S_tᵀ q_t.

    Serves simple gated linear attention, Mamba-2 (q = C, k = B, v = Δ x, g = Δ A), GLA and lightning attention.

    Args:
      q, k: [B, T, H, K]. Head h of v uses head h // (HV / H) of q and k.
      v: [B, T, HV, V].
      log_decay: g, the natural logarithm of the decay, at most 0: [B, T, HV], or [B, T, HV, K] for one gate a channel.
      scale: multiplies q; None means K ** -0.5.
      initial_state: S_0 [B, HV, K, V]; None means zeros.
      segment_ids: [B, T] integers. 0 is padding, which neither reads nor writes the state, whose output and gradients
        are zero and which may hold anything. A document ends where a non-zero id differs from the last non-zero id
        before it, and the state is zero again; the first non-zero id of a row continues `initial_state`.
      chunk_size: tokens a chunk, rounded up to a power of two; None asks the table. Values don't depend on it.
      implementation: "auto", "reference" (token by token), "xla" or "pallas" (TPU; Hopper, but for gates a channel).
      interpret: a modifier of "pallas".

    Returns:
      o [B, T, HV, V] in v's dtype, and the final state [B, HV, K, V] in float32 (float64 where an input is).

    Raises:
      ValueError: shapes that don't agree, or an implementation that can't serve the call.
    """
    _check(q, k, v, log_decay, initial_state, segment_ids, chunk_size)
    kernels = {
        "pallas_tpu": tpu_plan.refusal(q, k, v, log_decay),
        "pallas_gpu": gpu_plan.refusal(q, k, v, log_decay, chunk_size, interpret),
    }
    choice = dispatch.choose(OPERATOR, implementation, interpret, dispatch.unless_empty(kernels, q, k, v))
    dtype = dispatch.compute_dtype(q, k, v, log_decay)
    scale = dispatch.scale_of(OPERATOR, scale, k.shape[3])
    if initial_state is None:
        initial_state = varying.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), dtype, v)
    state = initial_state.astype(dtype)
    if choice == "reference":
        o, final = reference.linear_scan(q, k, v, log_decay, state, segment_ids, scale)
        return o.astype(v.dtype), final
    run = dispatch.Run.of(OPERATOR, choice, interpret, scale=scale, chunk_size=chunk_size)
    if segment_ids is None:
        return _linear_scan(*alike(q, k, v, log_decay, state), run)
    # Selecting, and not multiplying, keeps what padding holds (NaN included) out of values and gradients.
    valid = (segment_ids != 0)[..., None, None]
    q, k, v = (jnp.where(valid, x, 0) for x in (q, k, v))
    shape = (...,) + (None,) * (log_decay.ndim - 2)
    log_decay = jnp.where((segment_ids != 0)[shape], log_decay, 0)
    log_decay = jnp.where(segments.starts(segment_ids)[shape], -jnp.inf, log_decay)  # e^-inf = 0: a new document
    o, final = _linear_scan(*alike(q, k, v, log_decay, state), run)
    return jnp.where(valid, o, 0), final


def _check(q, k, v, log_decay, initial_state, segment_ids, chunk_size) -> None:
    dispatch.check_rank(OPERATOR, "k", k, 4, "[B, T, H, K]")
    dispatch.check_rank(OPERATOR, "v", v, 4, "[B, T, HV, V]")
    (batch, time, heads, key_dim), (value_heads, value_dim) = k.shape, v.shape[2:]
    dispatch.check_shape(OPERATOR, "q", q, k.shape, "[B, T, H, K] as k")
    dispatch.check_shape(OPERATOR, "v", v, (batch, time, value_heads, value_dim), "[B, T, HV, V] with k's B and T")
    if min(time, heads, key_dim) < 1 or value_heads % heads or value_heads < heads:
        raise ValueError(
            f"{OPERATOR}: q and k {tuple(k.shape)} and v {tuple(v.shape)} need T, K >= 1 and HV a multiple of H"
        )
    expected = (batch, time, value_heads) + ((key_dim,) if log_decay.ndim == 4 else ())
    dispatch.check_shape(OPERATOR, "log_decay", log_decay, expected, "[B, T, HV] or [B, T, HV, K]")
    dispatch.check_floating(OPERATOR, q=q, k=k, v=v, log_decay=log_decay)
    if initial_state is not None:
        shape = (batch, value_heads, key_dim, value_dim)
        dispatch.check_shape(OPERATOR, "initial_state", initial_state, shape, "[B, HV, K, V]")
        dispatch.check_floating(OPERATOR, initial_state=initial_state)
    if segment_ids is not None:
        dispatch.check_shape(OPERATOR, "segment_ids", segment_ids, (batch, time), "[B, T]")
        dispatch.check_integers(OPERATOR, segment_ids=segment_ids)
    dispatch.check_whole(OPERATOR, "chunk_size", chunk_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _linear_scan(q, k, v, log_decay, state, run):
    return _forward(q, k, v, log_decay, state, run)[0]


def _forward(q, k, v, log_decay, state, run):
    o, final, states = run.forward(q, k, v, log_decay, state)
    states = checkpoint_name(states, "linear_scan_states")
    return (checkpoint_name(o.astype(v.dtype), "linear_scan_out"), final), (q, k, v, log_decay, states)


def _backward(run, saved, cotangents):
    q, k, v, log_decay, states = saved
    do, dfinal = cotangents
    grads = run.backward(q, k, v, log_decay, states, do, dfinal)
    dtypes = (q.dtype, k.dtype, v.dtype, log_decay.dtype, dfinal.dtype)
    return tuple(g.astype(t) for g, t in zip(grads, dtypes, strict=True))


_linear_scan.defvjp(_forward, _backward)
