"""Which calls of linear_scan the GPU kernels serve, and their sizes."""

from hyjax.kernels import gpu_plan
from hyjax.kernels.linear_scan import block_sizes


def refusal(q, k, v, log_decay, chunk_size: int | None, interpret) -> str | None:
    """Why the kernels can't serve a call, or None."""
    return gpu_plan.refusal(q, k, v, log_decay, chunk_size, interpret)


def plan(q_shape, v_shape) -> gpu_plan.Plan:
    """q [B,T,H,K], v [B,T,HV,V]."""
    return gpu_plan.plan(q_shape, v_shape, block_sizes.PALLAS_GPU["stages"])
