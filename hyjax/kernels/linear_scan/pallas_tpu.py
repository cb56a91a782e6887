"""linear_scan for TPU: the walk over chunks in one kernel forward and one backward, the states in fast memory.

Arrays are [B, H, T, D] inside. The grid is (B, heads, chunks), chunks in order; a step takes a chunk of some value
heads and of the key heads that they read. The final state [heads, V, K], in float32, is an output whose block stays in
fast memory from chunk to chunk: it is the walk's state. The state before each chunk is saved. Backward starts at the
last chunk; what it carries is the state's gradient, and the states inside a chunk are made again. What a step does is
in tpu_head.py for a gate a head, in tpu_channel.py for a gate a channel.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels import dispatch, tpu_gates
from hyjax.kernels.linear_scan import tpu_channel, tpu_head, tpu_plan, xla
from hyjax.kernels.linear_scan.tpu_plan import TILE, VMEM_BYTES, Plan
from hyjax.kernels.varying import alike


def forward(q, k, v, log_decay, state, *, scale: float, chunk_size: int | None, interpret: Any):
    """q, k [B,T,H,K], v [B,T,HV,V], log_decay [B,T,HV] or [B,T,HV,K] (-inf resets), state [B,HV,K,V].

    Returns o [B,T,HV,V] as v, the final state in float32, and the states that `backward` wants.
    """
    if q.shape[1] == 1:  # no walk: the recurrence itself
        return xla.forward(q, k, v, log_decay, state, scale=scale, chunk_size=chunk_size)
    p = tpu_plan.plan(q.shape, v.shape, log_decay.ndim == 4, chunk_size)
    inputs = [*_tensors(p, q, k, v), *_gates(p, log_decay), ("state", _to_state(state, p))]
    outputs = [("values", v.dtype), ("states", jnp.float32), ("state", jnp.float32)]
    kernel = functools.partial(_kernels(p).forward_kernel, p, scale)
    o, states, last = _call(kernel, "linear_scan_forward", p, inputs, outputs, False, interpret)
    return _from_heads(o, p, p.value_dim), _from_state(last, p), states


def backward(q, k, v, log_decay, states, do, dstate, *, scale: float, chunk_size: int | None, interpret: Any):
    """The gradients of q, k, v in their dtypes, and of log_decay and the initial state in float32."""
    if q.shape[1] == 1:
        return xla.backward(q, k, v, log_decay, states, do, dstate, scale=scale, chunk_size=chunk_size)
    p = tpu_plan.plan(q.shape, v.shape, log_decay.ndim == 4, chunk_size)
    inputs = [*_tensors(p, q, k, v), *_gates(p, log_decay), ("states", states)]
    inputs += [("values", _to_heads(do, p, inputs[0][1].dtype)), ("state", _to_state(dstate, p))]
    part = lambda x: x.dtype if p.parts == 1 else jnp.float32
    gate = "channel_gates" if p.per_channel else "dgates"
    outputs = [("key_parts", part(q)), ("key_parts", part(k)), ("values", v.dtype), (gate, jnp.float32)]
    outputs.append(("state", jnp.float32))
    kernel = functools.partial(_kernels(p).backward_kernel, p, scale)
    dq, dk, dv, dg, dfirst = _call(kernel, "linear_scan_backward", p, inputs, outputs, True, interpret)
    dq, dk = (_from_heads(_add_parts(x, p), p, p.key_dim) for x in (dq, dk))
    dg = _from_heads(dg, p, p.key_dim) if p.per_channel else dg.reshape(p.batch, p.value_heads, -1).swapaxes(1, 2)
    dv, dfirst = _from_heads(dv, p, p.value_dim), _from_state(dfirst, p)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv, dg[:, : p.time], dfirst


def _kernels(p: Plan) -> ModuleType:
    return tpu_channel if p.per_channel else tpu_head


def _tensors(p: Plan, q, k, v) -> list[tuple[str, jax.Array]]:
    dtype = jnp.result_type(q, k, v)
    return [(kind, _to_heads(x, p, dtype)) for kind, x in (("keys", q), ("keys", k), ("values", v))]


def _to_heads(x: jax.Array, p: Plan, dtype) -> jax.Array:
    """[B, T, heads, D] -> [B, heads, padded time, padded D]."""
    dims = dict(zip((p.key_dim, p.value_dim), p.padded_dims, strict=True))
    x = jnp.pad(x.astype(dtype), ((0, 0), (0, p.padded_time - p.time), (0, 0), (0, dims[x.shape[3]] - x.shape[3])))
    return x.swapaxes(1, 2)


def _from_heads(x: jax.Array, p: Plan, dim: int) -> jax.Array:
    """[B, heads, padded time, padded D] -> [B, T, heads, dim]."""
    return x[:, :, : p.time, :dim].swapaxes(1, 2)


def _add_parts(x: jax.Array, p: Plan) -> jax.Array:
    """[B, H * parts, T, K] -> [B, H, T, K]."""
    return x if p.parts == 1 else jnp.sum(x.reshape(p.batch, p.key_heads, p.parts, *x.shape[2:]), axis=2)


def _to_state(state: jax.Array, p: Plan) -> jax.Array:
    """[B, HV, K, V] -> [B, HV, padded V, padded K]."""
    extra = [new - old for new, old in zip(p.padded_dims, state.shape[2:], strict=True)]
    return jnp.pad(state.astype(jnp.float32), ((0, 0), (0, 0), *((0, n) for n in extra))).swapaxes(2, 3)


def _from_state(state: jax.Array, p: Plan) -> jax.Array:
    """[B, HV, padded V, padded K] -> [B, HV, K, V]."""
    return state[..., : p.value_dim, : p.key_dim].swapaxes(2, 3)


def _gates(p: Plan, log_decay: jax.Array) -> list[tuple[str, jax.Array]]:
    """Sums within tiles; a padded token doesn't decay."""
    padding = ((0, 0), (0, p.padded_time - p.time)) + ((0, 0),) * (log_decay.ndim - 2)
    log_decay = jnp.pad(log_decay, padding)
    if p.per_channel:
        return [("channel_gates", _to_heads(log_decay, p, jnp.float32))]
    sums = jnp.stack(tpu_gates.chunk_sums(log_decay, TILE), axis=2)
    sums = sums.reshape(p.batch, p.value_heads, 2, -1, TILE).swapaxes(2, 3)
    return [("gates", sums)]


# Kinds of arrays: shape, block, and a block's index from (b, heads, chunk).
def _kinds(p: Plan) -> dict[str, tuple[tuple, tuple, Callable]]:
    (key_dim, value_dim), time, tiles = p.padded_dims, p.padded_time, p.chunks * p.tiles
    every = lambda b, h, n: (b, h, n, 0)
    key_head = lambda b, h, n: (b, h // p.parts, n, 0)
    of_state = lambda b, h, n: (b, h, 0, 0)
    gates = lambda rows: (
        (p.batch, p.value_heads, tiles, rows, TILE),
        (None, p.heads, p.tiles, rows, TILE),
        lambda b, h, n: (b, h, n, 0, 0),
    )
    return {
        "keys": ((p.batch, p.key_heads, time, key_dim), (None, p.step_keys, p.chunk, key_dim), key_head),
        "key_parts": ((p.batch, p.key_heads * p.parts, time, key_dim), (None, p.step_keys, p.chunk, key_dim), every),
        "values": ((p.batch, p.value_heads, time, value_dim), (None, p.heads, p.chunk, value_dim), every),
        "channel_gates": ((p.batch, p.value_heads, time, key_dim), (None, p.heads, p.chunk, key_dim), every),
        "gates": gates(2),
        "dgates": gates(1),
        "state": ((p.batch, p.value_heads, value_dim, key_dim), (None, p.heads, value_dim, key_dim), of_state),
        "states": (
            (p.batch, p.value_heads, p.chunks, value_dim, key_dim),
            (None, p.heads, None, value_dim, key_dim),
            lambda b, h, n: (b, h, n, 0, 0),
        ),
    }


def _call(
    kernel: Callable,
    name: str,
    p: Plan,
    inputs: Sequence[tuple[str, jax.Array]],
    outputs: Sequence[tuple[str, Any]],
    backwards: bool,
    interpret: Any,
) -> Sequence[jax.Array]:
    """Run `kernel` over the grid; inputs: (kind, array), outputs: (kind, dtype)."""
    kinds = _kinds(p)

    def spec(kind):
        _, block, index = kinds[kind]
        return pl.BlockSpec(block, lambda b, h, n: index(b, h, p.chunks - 1 - n if backwards else n))

    arrays = alike(*(x for _, x in inputs))
    axis_type = jax.typeof(arrays[0]).manual_axis_type
    shapes = [jax.ShapeDtypeStruct(kinds[kind][0], dtype, manual_axis_type=axis_type) for kind, dtype in outputs]
    return pl.pallas_call(
        kernel,
        shapes,
        grid=(p.batch, p.steps, p.chunks),
        in_specs=[spec(kind) for kind, _ in inputs],
        out_specs=[spec(kind) for kind, _ in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=_cost(p, backwards, [*arrays, *shapes]),
        interpret=dispatch.interpreter(interpret, *arrays),
        name=name,
    )(*arrays)


def _cost(p: Plan, backwards: bool, arrays) -> pl.CostEstimate:
    key_dim, value_dim = p.padded_dims
    if backwards:
        products = 2 * TILE * (3 * key_dim + 2 * value_dim) + 8 * key_dim * value_dim
    else:
        products = 2 * TILE * (key_dim + value_dim) + 4 * key_dim * value_dim
    tokens = p.batch * p.value_heads * p.padded_time
    copied = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in arrays)
    return pl.CostEstimate(flops=tokens * products, transcendentals=tokens * TILE, bytes_accessed=copied)
