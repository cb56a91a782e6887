"""Which calls of delta_scan the GPU kernels serve, and their sizes."""

from hyjax.kernels import gpu_plan
from hyjax.kernels.delta_scan import block_sizes

# The fewer channels a key has, the more of a chunk's 64 writes are taken back by others of the chunk, and the more of
# o = P u + a ∘ (q S) cancels. With β from 0 to 1 and no decay, o is off by 3.5e-3 of its size for 64 channels, 4e-3 for
# 32, 5e-3 for 16 and 8e-3 for 5; with β up to 2 by 5e-3, 5.5e-3, 7e-3 and 1e-2.
LEAST_KEY_DIM = 32


def refusal(q, k, v, beta, log_decay, chunk_size: int | None, interpret) -> str | None:
    """Why the kernels can't serve a call, or None; log_decay None is no decay."""
    if q.shape[3] < LEAST_KEY_DIM:
        return f"q has head dim {q.shape[3]}, and it takes at least {LEAST_KEY_DIM}, which bfloat16 products need"
    if beta.dtype == "float64":
        return "beta has dtype float64, and it computes in float32"
    return gpu_plan.refusal(q, k, v, log_decay, chunk_size, interpret)


def plan(q_shape, v_shape) -> gpu_plan.Plan:
    """q [B,T,H,K], v [B,T,HV,V]."""
    return gpu_plan.plan(q_shape, v_shape, block_sizes.PALLAS_GPU["stages"])
