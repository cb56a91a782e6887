"""linear_scan for Hopper GPUs, one gate a head: forward and backward by the kernels of hyjax.kernels.gpu_walks and
hyjax.kernels.gpu_gradients.

forward:   forward_walk with u = v, which saves each chunk's entry state S [K, V] in bfloat16
backward:  backward_walk, whose du is dv and which saves each chunk's dS'; then chunk_gradients
"""

from hyjax.kernels.gpu_gradients import chunk_gradients
from hyjax.kernels.gpu_plan import fit, fit_state, gate_gradient, gate_rows, sum_groups
from hyjax.kernels.gpu_walks import backward_walk, forward_walk
from hyjax.kernels.linear_scan import gpu_plan


def forward(q, k, v, log_decay, state, *, scale: float, chunk_size: int | None, interpret=False):
    """q, k [B,T,H,K], v [B,T,HV,V] in bfloat16, log_decay [B,T,HV] (-inf resets), state [B,HV,K,V] in float32.

    Returns o [B,T,HV,V] in bfloat16, the final state in float32, and the states that `backward` wants.
    """
    p = gpu_plan.plan(q.shape, v.shape)
    key_dim, value_dim = p.padded_dims
    inputs = fit(q, p, key_dim), fit(k, p, key_dim), fit(v, p, value_dim), None
    rows = gate_rows(log_decay, p)
    o, states, final = forward_walk(*inputs, rows, fit_state(state, p), p, float(scale), interpret)
    return o[:, : p.time, :, : p.value_dim], final[:, :, : p.key_dim, : p.value_dim], states


def backward(q, k, v, log_decay, states, do, dstate, *, scale: float, chunk_size: int | None, interpret=False):
    """The gradients of q, k, v, log_decay and the initial state: of v in bfloat16, of the others in float32."""
    p = gpu_plan.plan(q.shape, v.shape)
    key_dim, value_dim = p.padded_dims
    q, k = fit(q, p, key_dim), fit(k, p, key_dim)
    v, do = fit(v, p, value_dim), fit(do, p, value_dim)
    rows, options = gate_rows(log_decay, p), dict(scale=float(scale), interpret=interpret)
    dv, dstates, dinitial = backward_walk(q, k, do, None, rows, fit_state(dstate, p), p, **options)
    dq, dk, sums, through = chunk_gradients(q, k, v, do, None, rows, states, dstates, p, **options)
    dg = gate_gradient(rows, sums, through, p)
    dv, dinitial = dv[:, : p.time, :, : p.value_dim], dinitial[:, :, : p.key_dim, : p.value_dim]
    return sum_groups(dq, p), sum_groups(dk, p), dv, dg, dinitial
