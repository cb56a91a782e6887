"""attention for Hopper GPUs: a flash kernel forward, and two backward, one for dq and one for dk and dv.

For 64 query rows of one head and a block of its keys, by one warpgroup, in units of log 2 so that p = 2^(s - m):

    s [64, keys] = q kᵀ               scaled by scale·log2 e, and masked to -inf
    forward:   m' = max(m, max_keys s); p = 2^(s - m'); l = l·2^(m - m') + Σ_keys p; o = o·2^(m - m') + p v
               at the end o/l and lse = m + log2 l (+inf where l = 0)
    dq:        p = 2^(s - lse); ds = p ∘ (do vᵀ - Σ do·o), times 1 - (s/cap)² under a soft cap; dq += ds k
    dk, dv:    the same transposed, for 64 keys and a block of queries: sᵀ = k qᵀ, dv += pᵀ do, dk += dsᵀ q

Left operands p and ds go through shared memory. A row that sees nothing has m = -inf, l = 0, lse = +inf, and so p = 0.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hyjax.kernels.attention import gpu_plan, gpu_stream
from hyjax.kernels.attention.gpu_plan import CONSUMERS, WARPGROUP_ROWS, Plan
from hyjax.kernels.attention.gpu_stream import Run, along, filled, masked, product
from hyjax.kernels.gpu_tiles import OF_COLUMNS, OF_ROWS, load, tile

LOG2_E = math.log2(math.e)


def forward(q, k, v, q_ids, kv_ids, sinks, options, interpret: Any):
    """q [B,Tq,Hq,K], k [B,Tk,Hk,K], v [B,Tk,Hk,V], ids [B,T] or None -> o [B,Tq,Hq,V] as v, lse [B,Hk,G,Tq] float32.

    options: xla.Options. interpret: False, True, or plgpu.InterpretGPUParams.
    """
    p = gpu_plan.plan(q.shape, k.shape, v.shape, options, q_ids is not None)
    ids = gpu_plan.pad_ids(p, q_ids, kv_ids)
    q, k, v = gpu_plan.pad_rows(q, p), gpu_plan.pad_keys(k, p), gpu_plan.pad_keys(v, p)
    q_ids, k_ids = _id_inputs(ids)
    lse_type = jax.ShapeDtypeStruct((p.batch, q.shape[2], p.q_padded), jnp.float32)
    o, lse = gpu_stream.call(
        functools.partial(_forward_kernel, p, options),
        Run("attention_forward", "queries", p.forward, 2, interpret),
        p,
        gpu_plan.by_query(p, p.forward.inner, ids),
        resident=[("rows", q), *q_ids],
        streamed=[[("keys", k), *k_ids], [("keys", v)]],
        outputs=[("rows", jax.ShapeDtypeStruct(q.shape, q.dtype)), ("row_values", lse_type)],
        own=[tile(CONSUMERS, WARPGROUP_ROWS, p.forward.inner, dtype=q.dtype)],
        extra=None if sinks is None else sinks.astype(jnp.float32) * LOG2_E,
    )
    lse = lse[:, :, : p.q_len].reshape(p.batch, p.heads, p.groups, p.q_len)
    return o[:, : p.q_len, :, : p.value_dim], lse / LOG2_E


def backward(q, k, v, q_ids, kv_ids, sinks, o, lse, do, options, interpret: Any):
    """The gradients of q, k, v and sinks (None without), in their dtypes; o and lse as forward returned them."""
    p = gpu_plan.plan(q.shape, k.shape, v.shape, options, q_ids is not None)
    ids = gpu_plan.pad_ids(p, q_ids, kv_ids)
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)  # [B, Tq, Hq]
    delta = delta.reshape(p.batch, p.q_len, p.heads, p.groups).transpose(0, 2, 3, 1)
    dsinks = None
    if sinks is not None:
        weights = jnp.exp(sinks.astype(jnp.float32).reshape(p.heads, p.groups, 1) - lse)
        dsinks = -jnp.sum(weights * delta, axis=(0, 3)).reshape(sinks.shape).astype(sinks.dtype)
    q, do = gpu_plan.pad_rows(q, p), gpu_plan.pad_rows(do.astype(q.dtype), p)
    k, v = gpu_plan.pad_keys(k, p), gpu_plan.pad_keys(v, p)
    # +inf makes p = 0 for padded queries.
    lse, delta = gpu_plan.pad_row_values(lse * LOG2_E, p, math.inf), gpu_plan.pad_row_values(delta, p, 0.0)
    q_ids, k_ids = _id_inputs(ids)
    (dq,) = gpu_stream.call(
        functools.partial(_dq_kernel, p, options),
        Run("attention_dq", "queries", p.dq, 3, interpret),
        p,
        gpu_plan.by_query(p, p.dq.inner, ids),
        resident=[("rows", q), ("rows", do), ("row_values", lse), ("row_values", delta), *q_ids],
        streamed=[[("keys", k), *k_ids], [("keys", v)]],
        outputs=[("rows", jax.ShapeDtypeStruct(q.shape, q.dtype))],
        own=[tile(CONSUMERS, WARPGROUP_ROWS, p.dq.inner, dtype=q.dtype)],
    )
    dk, dv = gpu_stream.call(
        functools.partial(_dkv_kernel, p, options),
        Run("attention_dkv", "keys", p.dkv, 4, interpret),
        p,
        gpu_plan.by_key(p, p.dkv.inner, ids),
        resident=[("keys", k), ("keys", v), *k_ids],
        streamed=[[("rows", q), ("rows", do), ("row_values", lse), ("row_values", delta), *q_ids]],
        outputs=[("keys", jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in (k, v)],
        own=[tile(CONSUMERS, WARPGROUP_ROWS, p.dkv.inner, dtype=q.dtype)] * (1 if options.soft_cap is None else 2),
    )
    dq = dq[:, : p.q_len, :, : p.key_dim]
    return dq, dk[:, : p.kv_len, :, : p.key_dim], dv[:, : p.kv_len, :, : p.value_dim], dsinks


def _id_inputs(ids):
    return ([], []) if ids is None else ([("row_ids", ids[0])], [("key_ids", ids[1])])


def _logits(dot: jax.Array, options) -> tuple[jax.Array, float]:
    """(x, unit) from q·k, such that unit · x is s in units of log 2 and unit > 0; under a soft cap x is s / cap."""
    if options.soft_cap is not None:
        # tanh y = 1 - 2 / (1 + e^{2y}); the processor's own has 11 bits.
        return 1 - 2 / (1 + jnp.exp2(dot * (2 * LOG2_E * options.scale / options.soft_cap))), options.soft_cap * LOG2_E
    if options.scale > 0:
        return dot, options.scale * LOG2_E
    return dot * (options.scale * LOG2_E), 1.0


def _finite(top: jax.Array) -> jax.Array:
    return jnp.where(top == -jnp.inf, 0.0, top)


def _load_ids(q_ids, k_ids, rows_dim: int):
    """How `masked` gets at ids, from lists that hold their reference, or nothing."""
    if not q_ids:
        return None
    q_layout, k_layout = (OF_ROWS, OF_COLUMNS) if rows_dim == 0 else (OF_COLUMNS, OF_ROWS)
    return lambda: (plgpu.load(q_ids[0], layout=q_layout), plgpu.load(k_ids[0], layout=k_layout))


def _forward_kernel(p: Plan, options, sinks_ref, resident, loop, head):
    rows, dim = resident[0].shape

    def visit(step, carry):
        o, top, total = carry
        (q_ref, *q_ids), (weights_ref,) = step.resident, step.own
        k_ref, *k_ids = step.wait(0)
        x, unit = _logits(product(q_ref, k_ref.T), options)
        x = masked(x, p, step, 0, _load_ids(q_ids, k_ids, 0))
        new_top = jnp.maximum(top, jnp.max(x, axis=1) * unit)
        finite = _finite(new_top)
        weights = jnp.exp2(x * unit - along(finite, x.shape, 0))
        shrink = jnp.exp2(top - finite)
        weights_ref[...] = weights.astype(weights_ref.dtype)
        plgpu.commit_smem()
        step.release(0)
        total = total * shrink + jnp.sum(weights, axis=1)
        (v_ref,) = step.wait(1)
        o = o * along(shrink, o.shape, 0) + product(weights_ref, v_ref)
        step.release(1)
        return o, new_top, total

    start, whole = (-jnp.inf, 0.0) if sinks_ref is None else (sinks_ref[head], 1.0)
    init = filled((rows, dim), 0.0), filled((rows,), start, OF_ROWS), filled((rows,), whole, OF_ROWS)
    o, top, total = loop(visit, init)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    return o / along(total, o.shape, 0), jnp.where(empty, jnp.inf, top + jnp.log2(total))


def _weights(options, p: Plan, step, rows_dim: int, ids, s, lse: Callable, dtype) -> tuple[jax.Array, jax.Array]:
    """(p, p times 1 - (s/cap)² if there is a cap) of a tile, from q·k."""
    x, unit = _logits(s, options)

    def weights(x):
        weights = jnp.exp2(x * unit - along(lse(), s.shape, rows_dim))
        made = [weights.astype(dtype)]
        if options.soft_cap is not None:
            share = jnp.maximum(x, -1.0)  # -1 <= s/cap, but for -inf
            made.append((weights * (1 - share * share)).astype(dtype))
        # Rounded before branches meet, and not after, for want of registers.
        return lax.optimization_barrier(made)

    made = masked(x, p, step, rows_dim, ids, weights)
    return made[0], made[-1]


def _dq_kernel(p: Plan, options, _, resident, loop, head):
    lse, delta = (plgpu.load(x, layout=OF_ROWS) for x in resident[2:4])

    def run(dq_ref):
        def visit(step, _):
            (q_ref, do_ref, _, _, *q_ids), (ds_ref,) = step.resident, step.own
            k_ref, *k_ids = step.wait(0)
            s = product(q_ref, k_ref.T)
            _, slope = _weights(options, p, step, 0, _load_ids(q_ids, k_ids, 0), s, lambda: lse, ds_ref.dtype)
            (v_ref,) = step.wait(1)
            dp = product(do_ref, v_ref.T)
            step.release(1)
            ds_ref[...] = (slope.astype(jnp.float32) * (dp - along(delta, dp.shape, 0))).astype(ds_ref.dtype)
            plgpu.commit_smem()
            plgpu.wgmma(dq_ref, ds_ref, k_ref)
            plgpu.wgmma_wait(0)
            step.release(0)
            return ()

        loop(visit, ())
        return dq_ref[...]

    return [options.scale * pl.run_scoped(run, plgpu.ACC(resident[0].shape, jnp.float32))]


def _dkv_kernel(p: Plan, options, _, resident, loop, head):
    def run(dk_ref, dv_ref):
        def visit(step, _):
            k_ref, v_ref, *k_ids = step.resident
            weights_ref, ds_ref = step.own[0], step.own[-1]  # the same but under a soft cap
            q_ref, do_ref, lse_ref, delta_ref, *q_ids = step.wait(0)
            s = product(k_ref, q_ref.T)
            lse = lambda: plgpu.load(lse_ref, layout=OF_COLUMNS)
            weights, slope = _weights(options, p, step, 1, _load_ids(q_ids, k_ids, 1), s, lse, ds_ref.dtype)
            weights_ref[...] = weights
            if options.soft_cap is not None:
                ds_ref[...] = slope
            plgpu.commit_smem()
            plgpu.wgmma(dv_ref, weights_ref, do_ref)
            dp = product(v_ref, do_ref.T)
            delta = plgpu.load(delta_ref, layout=OF_COLUMNS)
            # Read back, for want of registers beside the two sums.
            ds_ref[...] = (load(ds_ref) * (dp - along(delta, dp.shape, 1))).astype(ds_ref.dtype)
            plgpu.commit_smem()
            plgpu.wgmma(dk_ref, ds_ref, q_ref)
            plgpu.wgmma_wait(0)
            step.release(0)
            return ()

        loop(visit, ())
        return dk_ref[...], dv_ref[...]

    accumulator = plgpu.ACC(resident[0].shape, jnp.float32)
    dk, dv = pl.run_scoped(run, accumulator, accumulator)
    return [options.scale * dk, dv]
