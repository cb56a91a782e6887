"""delta_scan: the delta rule, which corrects what the state holds for a key, with a decay a head, a channel or none."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyjax.kernels import dispatch, segments, varying
from hyjax.kernels.delta_scan import gpu_plan, reference, tpu_plan
from hyjax.kernels.varying import alike

OPERATOR = "delta_scan"


def delta_scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None = None,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The delta rule S ← e^{g_t} S_{t-1}, S_t = S + k_t β_t (v_t − Sᵀ k_t)ᵀ, o_t = scale · S_tᵀ q_t.

    Serves DeltaNet (no decay), gated DeltaNet (one a head) and Kimi delta attention (one a key channel). Keys are meant
    to be of length 1 (the operator doesn't normalise them): a state grows without bound where β |k|² > 2.

    Args:
      q, k: [B, T, H, K]. Head h of v uses head h // (HV / H) of q and k.
      v: [B, T, HV, V].
      beta: β, how much of the error is corrected, from 0 to 2: [B, T, HV].
      log_decay: g, the natural logarithm of the decay, at most 0: [B, T, HV], or [B, T, HV, K] for one gate a channel;
        None means no decay.
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
    _check(q, k, v, beta, log_decay, initial_state, segment_ids, chunk_size)
    kernels = {
        "pallas_tpu": tpu_plan.refusal(q, k, v, beta, log_decay),
        "pallas_gpu": gpu_plan.refusal(q, k, v, beta, log_decay, chunk_size, interpret),
    }
    choice = dispatch.choose(OPERATOR, implementation, interpret, dispatch.unless_empty(kernels, q, k, v))
    dtype = dispatch.compute_dtype(*(x for x in (q, k, v, beta, log_decay) if x is not None))
    scale = dispatch.scale_of(OPERATOR, scale, k.shape[3])
    if log_decay is None:
        log_decay = varying.zeros(beta.shape, dtype, beta)
    if initial_state is None:
        initial_state = varying.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), dtype, v)
    state = initial_state.astype(dtype)
    if choice == "reference":
        o, final = reference.delta_scan(q, k, v, beta, log_decay, state, segment_ids, scale)
        return o.astype(v.dtype), final
    run = dispatch.Run.of(OPERATOR, choice, interpret, scale=scale, chunk_size=chunk_size)
    if segment_ids is None:
        return _delta_scan(*alike(q, k, v, beta, log_decay, state), run)
    # Selecting, and not multiplying, keeps what padding holds (NaN included) out of values and gradients.
    valid, start = segment_ids != 0, segments.starts(segment_ids)
    spread = lambda mask, x: mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))
    q, k, v, beta, log_decay = (jnp.where(spread(valid, x), x, 0) for x in (q, k, v, beta, log_decay))
    log_decay = jnp.where(spread(start, log_decay), -jnp.inf, log_decay)  # e^-inf = 0: a new document
    o, final = _delta_scan(*alike(q, k, v, beta, log_decay, state), run)
    return jnp.where(spread(valid, o), o, 0), final


def _check(q, k, v, beta, log_decay, initial_state, segment_ids, chunk_size) -> None:
    dispatch.check_rank(OPERATOR, "k", k, 4, "[B, T, H, K]")
    dispatch.check_rank(OPERATOR, "v", v, 4, "[B, T, HV, V]")
    (batch, time, heads, key_dim), (value_heads, value_dim) = k.shape, v.shape[2:]
    dispatch.check_shape(OPERATOR, "q", q, k.shape, "[B, T, H, K] as k")
    dispatch.check_shape(OPERATOR, "v", v, (batch, time, value_heads, value_dim), "[B, T, HV, V] with k's B and T")
    if min(time, heads, key_dim) < 1 or value_heads % heads or value_heads < heads:
        raise ValueError(
            f"{OPERATOR}: q and k {tuple(k.shape)} and v {tuple(v.shape)} need T, K >= 1 and HV a multiple of H"
        )
    dispatch.check_shape(OPERATOR, "beta", beta, (batch, time, value_heads), "[B, T, HV]")
    dispatch.check_floating(OPERATOR, q=q, k=k, v=v, beta=beta)
    if log_decay is not None:
        shape = (batch, time, value_heads) + ((key_dim,) if log_decay.ndim == 4 else ())
        dispatch.check_shape(OPERATOR, "log_decay", log_decay, shape, "[B, T, HV] or [B, T, HV, K]")
        dispatch.check_floating(OPERATOR, log_decay=log_decay)
    if initial_state is not None:
        shape = (batch, value_heads, key_dim, value_dim)
        dispatch.check_shape(OPERATOR, "initial_state", initial_state, shape, "[B, HV, K, V]")
        dispatch.check_floating(OPERATOR, initial_state=initial_state)
    if segment_ids is not None:
        dispatch.check_shape(OPERATOR, "segment_ids", segment_ids, (batch, time), "[B, T]")
        dispatch.check_integers(OPERATOR, segment_ids=segment_ids)
    dispatch.check_whole(OPERATOR, "chunk_size", chunk_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _delta_scan(q, k, v, beta, log_decay, state, run):
    return _forward(q, k, v, beta, log_decay, state, run)[0]


def _forward(q, k, v, beta, log_decay, state, run):
    o, final, states = run.forward(q, k, v, beta, log_decay, state)
    states = checkpoint_name(states, "delta_scan_states")
    return (checkpoint_name(o.astype(v.dtype), "delta_scan_out"), final), (q, k, v, beta, log_decay, states)


def _backward(run, saved, cotangents):
    q, k, v, beta, log_decay, states = saved
    do, dfinal = cotangents
    grads = run.backward(q, k, v, beta, log_decay, states, do, dfinal)
    dtypes = (q.dtype, k.dtype, v.dtype, beta.dtype, log_decay.dtype, dfinal.dtype)
    return tuple(g.astype(t) for g, t in zip(grads, dtypes, strict=True))


_delta_scan.defvjp(_forward, _backward)
