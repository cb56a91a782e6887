"""attention for TPU: a flash kernel forward, and two backward, one for dq and one for dk and dv.

Everything is transposed, keys along sublanes and queries along lanes, so that what there is one of a query (running
maximum, denominator, lse, Σ do·o) is a row [1, R] that broadcasts down a tile for free, and a sum over keys is a sum of
registers. For a block of R query rows, a block of keys, and q, k, v, do as in tpu_blocks.py:

    sᵀ [keys, R] = k qᵀ               in units of log 2: scaled by scale·log2 e, so that p = 2^(s - m)
    forward:   m' = max(m, max_keys sᵀ); pᵀ = 2^(sᵀ - m')
               [oᵀ; l] = [oᵀ; l]·2^(m - m') + [vᵀ; 1] pᵀ, l = Σ_keys p being a row below oᵀ [V, R]: the matrix unit has
               time for that sum; at the end oᵀ/l and lse = m + log2 l (+inf where l = 0)
    backward:  pᵀ = 2^(sᵀ - lse); dpᵀ = v doᵀ; dsᵀ = pᵀ ∘ (dpᵀ - Σ do·o), times 1 - (s/cap)² under a soft cap
               dqᵀ [K, R] += kᵀ dsᵀ, over key blocks; dk [keys, K] += dsᵀ q and dv [keys, V] += pᵀ do, over query blocks

The mask sets sᵀ to -inf before 2^: a row that sees nothing has m = -inf, l = 0, lse = +inf, and so p = 0 everywhere.
Blocks that no query may see are not visited, and blocks that every query may see are not masked.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels.attention import tpu_blocks, tpu_grid
from hyjax.kernels.attention.tpu_blocks import Plan
from hyjax.kernels.attention.tpu_grid import Mask

ONES = 16  # rows of ones below vᵀ, as many as a register of bfloat16 has: their product with pᵀ is Σ_keys pᵀ
LOG2_E = math.log2(math.e)
_NN, _NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))


def forward(q, k, v, q_ids, kv_ids, sinks, options, interpret: Any):
    """q [B,Tq,Hq,K], k [B,Tk,Hk,K], v [B,Tk,Hk,V], ids [B,T] or None -> o [B,Tq,Hq,V] as v, lse [B,Hk,G,Tq] float32.

    options: xla.Options. interpret: as pallas_call's.
    """
    p = tpu_blocks.plan(q.shape, k.shape, v.shape, options.causal, options.window, q_ids is not None)
    (key_dim, value_dim), dtype = p.padded_dims, jnp.result_type(q, k, v)
    inputs = [
        ("rows", tpu_blocks.to_rows(q.astype(dtype), p, key_dim)),
        ("keys", tpu_blocks.to_keys(k.astype(dtype), p, key_dim)),
        ("key_columns", _with_ones(tpu_blocks.to_keys(v.astype(dtype), p, value_dim, transposed=True))),
    ]
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(p.heads, p.groups) * LOG2_E, p.places, axis=1)
        inputs.append(("sinks", sinks[:, None]))
    outputs = [("row_columns", value_dim, v.dtype), ("row_values", 1, jnp.float32)]
    kernel = functools.partial(_forward_kernel, p, options)
    scratch = [(value_dim + ONES, p.rows), (1, p.rows)]
    run = tpu_grid.Run("attention_forward", "queries", (1, 1), interpret)
    o, lse = tpu_grid.call(kernel, run, p, tpu_blocks.packing(p, q_ids, kv_ids), inputs, outputs, scratch)
    return tpu_blocks.from_columns(o, p, p.value_dim), tpu_blocks.from_row_values(lse, p) / LOG2_E


def backward(q, k, v, q_ids, kv_ids, sinks, o, lse, do, options, interpret: Any):
    """The gradients of q, k, v and sinks (None without), in their dtypes; o and lse as forward returned them."""
    p = tpu_blocks.plan(q.shape, k.shape, v.shape, options.causal, options.window, q_ids is not None)
    (key_dim, value_dim), dtype = p.padded_dims, jnp.result_type(q, k, v)
    packing = tpu_blocks.packing(p, q_ids, kv_ids)
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)  # [B, Tq, Hq]
    delta = delta.reshape(p.batch, p.q_len, p.heads, p.groups).transpose(0, 2, 3, 1)
    dsinks = None
    if sinks is not None:
        weights = jnp.exp(sinks.astype(jnp.float32).reshape(p.heads, p.groups, 1) - lse)
        dsinks = -jnp.sum(weights * delta, axis=(0, 3)).reshape(sinks.shape).astype(sinks.dtype)
    inputs = [
        ("rows", tpu_blocks.to_rows(q.astype(dtype), p, key_dim)),
        ("rows", tpu_blocks.to_rows(do.astype(dtype), p, value_dim)),
        ("row_values", tpu_blocks.to_row_values(lse * LOG2_E, p, math.inf)),
        ("row_values", tpu_blocks.to_row_values(delta, p, 0.0)),
        ("keys", tpu_blocks.to_keys(k.astype(dtype), p, key_dim)),
        ("keys", tpu_blocks.to_keys(v.astype(dtype), p, value_dim)),
    ]
    outputs = [("keys", key_dim, k.dtype), ("keys", value_dim, v.dtype)]
    scratch = [(p.keys, key_dim), (p.keys, value_dim)]
    run = tpu_grid.Run("attention_dkv", "keys", (2, 2), interpret)
    dk, dv = tpu_grid.call(functools.partial(_dkv_kernel, p, options), run, p, packing, inputs, outputs, scratch)
    inputs.append(("key_columns", tpu_blocks.to_keys(k.astype(dtype), p, key_dim, transposed=True)))
    outputs = [("row_columns", key_dim, q.dtype)]
    run = tpu_grid.Run("attention_dq", "queries", (2, 1), interpret)
    (dq,) = tpu_grid.call(
        functools.partial(_dq_kernel, p, options), run, p, packing, inputs, outputs, [(key_dim, p.rows)]
    )
    dq = tpu_blocks.from_columns(dq, p, p.key_dim)
    return dq, tpu_blocks.from_keys(dk, p, p.key_dim), tpu_blocks.from_keys(dv, p, p.value_dim), dsinks


def _with_ones(columns: jax.Array) -> jax.Array:
    """[B, Hk, V, keys] -> [B, Hk, V + ONES, keys]."""
    return jnp.pad(columns, ((0, 0), (0, 0), (0, ONES), (0, 0)), constant_values=1)


def _dot(x: jax.Array, y: jax.Array, dims) -> jax.Array:
    """Products of float32 inputs keep their digits; those of bfloat16 inputs have none to lose."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _tiles(p: Plan, mask: Mask, keys_first: bool) -> list[tuple[slice, slice]]:
    """The tiles (keys, rows) of a block that are to be worked off, the first of the two in the outer loop."""
    all_keys, all_rows = (
        [slice(n, n + size) for n in range(0, length, size)]
        for length, size in ((p.keys, p.tile_keys), (p.rows, p.tile_rows))
    )
    if keys_first:
        tiles = [(keys, rows) for keys in all_keys for rows in all_rows]
    else:
        tiles = [(keys, rows) for rows in all_rows for keys in all_keys]
    return [tile for tile in tiles if not mask.skips(*tile)]


def _staggered(p: Plan, tiles: Sequence, products: Callable, middle: Callable, accumulate: Callable) -> None:
    """accumulate(*tile, middle(*tile, products(*tile))) for each tile, `products` ahead and `accumulate` behind.

    The compiler schedules in about the order of the program: a tile's matrix products then stand beside the vector work
    of another, which does not depend on them.
    """
    ahead, behind = p.stagger
    made, waiting = [products(*tile) for tile in tiles[:ahead]], []
    for n, tile in enumerate(tiles):
        if n + ahead < len(tiles):
            made.append(products(*tiles[n + ahead]))
        waiting.append((*tile, middle(*tile, made.pop(0))))
        if len(waiting) > behind:
            accumulate(*waiting.pop(0))
    for done in waiting:
        accumulate(*done)


def _logits(dot: jax.Array, options) -> tuple[jax.Array, jax.Array | None]:
    """(sᵀ in units of log 2, s / cap or None), from q·k."""
    if options.soft_cap is None:
        return dot * (options.scale * LOG2_E), None
    share = jnp.tanh(dot * (options.scale / options.soft_cap))
    return share * (options.soft_cap * LOG2_E), share


def _masked(s: jax.Array, mask: Mask, keys: slice, rows: slice) -> jax.Array:
    visible = mask.visible(keys, rows)
    return s if visible is None else jnp.where(visible, s, -jnp.inf)


def _forward_kernel(p: Plan, options, q_ref, k_ref, v_columns_ref, *refs):
    *sinks_ref, o_ref, lse_ref, sum_ref, top_ref = refs
    value_dim = o_ref.shape[0]

    def begin():
        sum_ref[:value_dim] = jnp.zeros_like(o_ref, jnp.float32)
        sum_ref[value_dim:] = jnp.full((sum_ref.shape[0] - value_dim, sum_ref.shape[1]), 1.0 if sinks_ref else 0.0)
        top_ref[...] = sinks_ref[0][...] if sinks_ref else jnp.full_like(top_ref, -jnp.inf)

    def block(mask: Mask):
        def products(keys, rows):
            return _dot(k_ref[keys], q_ref[rows], _NT)

        def softmax(keys, rows, dot):
            s = _masked(_logits(dot, options)[0], mask, keys, rows)
            old = top_ref[:, rows]
            top = jnp.maximum(old, jnp.max(s, axis=0, keepdims=True))
            finite = jnp.where(jnp.isneginf(top), 0.0, top)
            weights, shrink = jnp.exp2(s - finite), jnp.exp2(old - finite)
            top_ref[:, rows] = top
            return weights.astype(v_columns_ref.dtype), shrink

        def accumulate(keys, rows, made):
            weights, shrink = made
            sum_ref[:, rows] = sum_ref[:, rows] * shrink + _dot(v_columns_ref[:, keys], weights, _NN)

        _staggered(p, _tiles(p, mask, keys_first=False), products, softmax, accumulate)

    def end():
        total = sum_ref[value_dim : value_dim + 1]
        empty = total == 0
        total = jnp.where(empty, 1.0, total)
        o_ref[...] = (sum_ref[:value_dim] / total).astype(o_ref.dtype)
        lse_ref[...] = jnp.where(empty, jnp.inf, top_ref[...] + jnp.log2(total))

    return begin, block, end


def _gradients(options, mask: Mask, q_ref, do_ref, lse_ref, delta_ref, k_ref, v_ref):
    """The steps `products` and `middle` of both backward kernels; the latter gives (pᵀ, dsᵀ / scale), as q's dtype."""

    def products(keys, rows):
        return _dot(k_ref[keys], q_ref[rows], _NT), _dot(v_ref[keys], do_ref[rows], _NT)

    def middle(keys, rows, dots):
        dot, dp = dots
        s, share = _logits(dot, options)
        weights = jnp.exp2(_masked(s, mask, keys, rows) - lse_ref[:, rows])
        ds = weights * (dp - delta_ref[:, rows])
        if share is not None:
            ds = ds * (1 - share * share)
        return weights.astype(q_ref.dtype), ds.astype(q_ref.dtype)

    return products, middle


def _dq_kernel(p: Plan, options, *refs):
    *block_refs, k_columns_ref, dq_ref, dq_sum_ref = refs

    def begin():
        dq_sum_ref[...] = jnp.zeros_like(dq_sum_ref)

    def block(mask: Mask):
        products, middle = _gradients(options, mask, *block_refs)

        def accumulate(keys, rows, made):
            dq_sum_ref[:, rows] += _dot(k_columns_ref[:, keys], made[1], _NN)

        _staggered(p, _tiles(p, mask, keys_first=False), products, middle, accumulate)

    def end():
        dq_ref[...] = (options.scale * dq_sum_ref[...]).astype(dq_ref.dtype)

    return begin, block, end


def _dkv_kernel(p: Plan, options, *refs):
    *block_refs, dk_ref, dv_ref, dk_sum_ref, dv_sum_ref = refs
    q_ref, do_ref = block_refs[:2]

    def begin():
        dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
        dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

    def block(mask: Mask):
        products, middle = _gradients(options, mask, *block_refs)

        def accumulate(keys, rows, made):
            weights, ds = made
            dk_sum_ref[keys] += _dot(ds, q_ref[rows], _NN)
            dv_sum_ref[keys] += _dot(weights, do_ref[rows], _NN)

        _staggered(p, _tiles(p, mask, keys_first=True), products, middle, accumulate)

    def end():
        dk_ref[...] = (options.scale * dk_sum_ref[...]).astype(dk_ref.dtype)
        dv_ref[...] = dv_sum_ref[...].astype(dv_ref.dtype)

    return begin, block, end
