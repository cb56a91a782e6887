"""attention in plain XLA operations: all logits at once where they are few, else block by block with a running softmax.

Block by block, memory beside the inputs is linear in T, and blocks of keys that no query of a block may see (by
causality, window or documents) are skipped at both ends, so a window costs time linear in T. The forward pass saves the
logarithm of each row's softmax denominator (lse), from which the backward pass recomputes probabilities; a row that
sees nothing has lse = +inf, which makes all of its probabilities, and with them its gradients, exactly zero.

Inside: q, o [B,H,G,Tq,·] with H key heads and G query heads to each; k, v [B,H,Tk,·]; lse [B,H,G,Tq].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels import dispatch
from hyjax.kernels.attention import block_sizes


class Rows(NamedTuple):
    """Positions and segment ids of queries or keys, each [B or 1, T]; ids None where nothing is packed or padded."""

    positions: jax.Array
    segments: jax.Array | None


class Options(NamedTuple):
    """What is static in a call."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None


def _einsum(subscripts: str, x: jax.Array, y: jax.Array, precision: lax.Precision) -> jax.Array:
    return jnp.einsum(subscripts, x, y, precision=precision)


def _precision(dtype: jnp.dtype) -> lax.Precision:
    """Products of float32 inputs keep their digits; those of bfloat16 inputs have none to lose."""
    return lax.Precision.DEFAULT if jnp.finfo(dtype).bits < 32 else lax.Precision.HIGHEST


def _query_heads(x: jax.Array, heads: int) -> jax.Array:
    """[B, T, H*G, X] -> [B, H, G, T, X]."""
    b, t, all_heads, x_dim = x.shape
    return x.reshape(b, t, heads, all_heads // heads, x_dim).transpose(0, 2, 3, 1, 4)


def _query_rows(x: jax.Array) -> jax.Array:
    """[B, H, G, T, X] -> [B, T, H*G, X]."""
    b, h, g, t, x_dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, h * g, x_dim)


def _visible(q: Rows, kv: Rows, options: Options) -> jax.Array | None:
    """[B or 1, 1, 1, Tq, Tk] bool: which key each query may see; None where it may see all."""
    mask = None
    if options.causal:
        ahead = q.positions[:, :, None] - kv.positions[:, None, :]
        mask = ahead >= 0
        if options.window is not None:
            mask &= ahead < options.window
    if q.segments is not None and kv.segments is not None:
        same = (q.segments[:, :, None] == kv.segments[:, None, :]) & (kv.segments != 0)[:, None, :]
        mask = same if mask is None else mask & same
    return None if mask is None else mask[:, None, None]


def _cap(logits, options: Options) -> jax.Array:
    return logits if options.soft_cap is None else options.soft_cap * jnp.tanh(logits / options.soft_cap)


def _logits(q, k, mask, options: Options, precision) -> jax.Array:
    """Scaled, capped, masked (-inf) logits [B,H,G,Tq,Tk]."""
    logits = options.scale * _einsum("bhgqd,bhkd->bhgqk", q, k, precision)
    logits = _cap(logits, options)
    return logits if mask is None else jnp.where(mask, logits, -jnp.inf)


def _dlogits(logits, probabilities, do, v, delta, options: Options, precision) -> jax.Array:
    """The gradient of q·k from that of the output; delta [B,H,G,Tq] is Σ do·o."""
    ds = probabilities * (_einsum("bhgqd,bhkd->bhgqk", do, v, precision) - delta[..., None])
    if options.soft_cap is not None:
        capped = jnp.where(jnp.isfinite(logits), logits, 0) / options.soft_cap
        ds = ds * (1 - capped * capped)
    return options.scale * ds


def _finish(accumulated, top, total):
    """The output and lse from Σ e^{s - top} v, top (-inf for a row that sees nothing) and Σ e^{s - top}."""
    empty = total == 0
    lse = jnp.where(empty, jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))
    return accumulated / jnp.where(empty, 1, total)[..., None], lse


def _finite(top: jax.Array) -> jax.Array:
    return jnp.where(jnp.isneginf(top), 0, top)


def plan(q_shape, k_shape) -> str:
    """ "row" (one query), "dense" or "blocks"."""
    batch, q_len, heads, _ = q_shape
    if q_len <= dispatch.by_backend(block_sizes.ROW_QUERIES):
        return "row"
    most = dispatch.by_backend(block_sizes.DENSE_LOGITS)
    few = q_len <= block_sizes.DENSE_QUERIES or batch * heads * q_len * k_shape[1] <= most
    return "dense" if few else "blocks"


def forward(q, k, v, q_rows: Rows, kv_rows: Rows, sinks, options: Options, dtype):
    """q [B,Tq,Hq,K], k [B,Tk,Hk,K], v [B,Tk,Hk,V], sinks [Hq] or None -> o [B,Tq,Hq,V], lse [B,Hk,G,Tq] in `dtype`."""
    form = plan(q.shape, k.shape)
    heads, precision = k.shape[2], _precision(q.dtype)
    q = _query_heads(q.astype(dtype), heads)
    extra = None if sinks is None else sinks.astype(dtype).reshape(heads, -1, 1)
    k, v = (x.astype(dtype).swapaxes(1, 2) for x in (k, v))
    run = {"row": _row_forward, "dense": _dense_forward, "blocks": _blocks_forward}[form]
    o, lse = run(q, k, v, q_rows, kv_rows, extra, options, precision)
    return _query_rows(o), lse


def backward(q, k, v, q_rows: Rows, kv_rows: Rows, sinks, o, lse, do, options: Options, dtype):
    """The gradients of q, k, v and sinks (None without) in `dtype`; o and lse as forward returned them."""
    run = _blocks_backward if plan(q.shape, k.shape) == "blocks" else _dense_backward
    heads, precision = k.shape[2], _precision(q.dtype)
    q, o, do = (_query_heads(x.astype(dtype), heads) for x in (q, o, do))
    k, v = (x.astype(dtype).swapaxes(1, 2) for x in (k, v))
    delta = jnp.sum(do * o, axis=-1)
    dq, dk, dv = run(q, k, v, q_rows, kv_rows, lse, do, delta, options, precision)
    dsinks = None
    if sinks is not None:
        weights = jnp.exp(sinks.astype(dtype).reshape(heads, -1, 1) - lse)
        dsinks = -jnp.sum(weights * delta, axis=(0, 3)).reshape(sinks.shape)
    return _query_rows(dq), dk.swapaxes(1, 2), dv.swapaxes(1, 2), dsinks


def _row_forward(q, k, v, q_rows, kv_rows, extra, options, precision):
    """One query: all logits at once, over the shortest of a few prefixes of the keys that holds all it may see.

    A cache is as long as a row may become, and most of it is empty while the row is short. Keys and values that lie
    heads first, as caches do, are read as they lie; a prefix but the whole is a copy, which costs about as much again.
    """
    length, mask = k.shape[2], _visible(q_rows, kv_rows, options)
    lengths = _prefixes(length) if mask is not None else [length]
    mask = jnp.ones((1, 1, 1, length), bool) if mask is None else mask[..., 0, :]

    def prefix(n):
        return lambda: _row_prefix(q[..., 0, :], k[:, :, :n], v[:, :, :n], mask[..., :n], extra, options, precision)

    needed = jnp.max(jnp.where(mask, jnp.arange(1, length + 1), 0))
    index = sum((needed > n).astype(jnp.int32) for n in lengths[:-1])
    o, lse = lax.switch(index, [prefix(n) for n in lengths]) if len(lengths) > 1 else prefix(length)()
    return o[..., None, :], lse[..., None]


def _prefixes(length: int) -> list[int]:
    """Lengths that one query's keys are cut to, each a quarter of the next: three times a quarter is less than one."""
    lengths = [length]
    while lengths[0] >= 4 * dispatch.by_backend(block_sizes.ROW_PREFIX):
        lengths.insert(0, lengths[0] // 4)
    return lengths


def _row_prefix(q, k, v, mask, extra, options, precision):
    """q [B,H,G,K], k, v [B,H,n,·], mask [B or 1,1,1,n] -> o [B,H,G,V], lse [B,H,G].

    The products have no dim of queries: with one of length 1, XLA's CPU backend transposes the keys.
    """
    logits = _cap(options.scale * _einsum("bhgd,bhkd->bhgk", q, k, precision), options)
    logits = jnp.where(mask, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1)
    top = top if extra is None else jnp.maximum(top, extra[..., 0])
    weights = jnp.exp(logits - _finite(top)[..., None])
    total = jnp.sum(weights, axis=-1)
    total = total if extra is None else total + jnp.exp(extra[..., 0] - _finite(top))
    return _finish(_einsum("bhgk,bhkd->bhgd", weights, v, precision), top, total)


def _dense_forward(q, k, v, q_rows, kv_rows, extra, options, precision):
    logits = _logits(q, k, _visible(q_rows, kv_rows, options), options, precision)
    top = jnp.max(logits, axis=-1)
    top = top if extra is None else jnp.maximum(top, extra)
    weights = jnp.exp(logits - _finite(top)[..., None])
    total = jnp.sum(weights, axis=-1)
    total = total if extra is None else total + jnp.exp(extra - _finite(top))
    return _finish(_einsum("bhgqk,bhkd->bhgqd", weights, v, precision), top, total)


def _dense_backward(q, k, v, q_rows, kv_rows, lse, do, delta, options, precision):
    logits = _logits(q, k, _visible(q_rows, kv_rows, options), options, precision)
    probabilities = jnp.exp(logits - lse[..., None])
    ds = _dlogits(logits, probabilities, do, v, delta, options, precision)
    dq = _einsum("bhgqk,bhkd->bhgqd", ds, k, precision)
    dk = _einsum("bhgqk,bhgqd->bhkd", ds, q, precision)
    dv = _einsum("bhgqk,bhgqd->bhkd", probabilities, do, precision)
    return dq, dk, dv


def _blocked(x: jax.Array, size: int, axis: int, fill: float = 0) -> jax.Array:
    """Pad `axis` with `fill` to a multiple of `size` and bring the blocks to the front: [blocks, ..., size, ...]."""
    axis %= x.ndim
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, pad, constant_values=fill)
    x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _unblocked(x: jax.Array, length: int, axis: int) -> jax.Array:
    """The inverse of _blocked, cut to `length`."""
    axis %= x.ndim - 1
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)


def _blocked_rows(rows: Rows, size: int) -> Rows:
    """Rows in blocks [blocks, B or 1, size]; ids are made where there are none, so that what is padded is unseen."""
    segments = jnp.ones_like(rows.positions) if rows.segments is None else rows.segments
    return Rows(_blocked(rows.positions, size, 1), _blocked(segments, size, 1))


def _ranges(rows: Rows):
    """Least and greatest position and id of each block [blocks, B or 1], of its rows that aren't padding."""
    valid, most = rows.segments != 0, jnp.iinfo(jnp.int32).max
    low = lambda x: jnp.min(jnp.where(valid, x, most), axis=-1)
    high = lambda x: jnp.max(jnp.where(valid, x, -most), axis=-1)
    return low(rows.positions), high(rows.positions), low(rows.segments), high(rows.segments)


def _block_bounds(q: Rows, kv: Rows, options: Options):
    """Which blocks of keys each block of queries has to visit, as [first, end) by query block, and the transpose."""
    q_low, q_high, q_first, q_last = (x[:, None] for x in _ranges(q))
    k_low, k_high, k_first, k_last = (x[None] for x in _ranges(kv))
    meet = (q_first <= k_last) & (k_first <= q_last)
    if options.causal:
        meet &= k_low <= q_high
        if options.window is not None:
            meet &= k_high > q_low - options.window
    meet = jnp.any(meet, axis=-1)  # [query blocks, key blocks]

    def bounds(x):
        end = jnp.where(jnp.any(x, 1), x.shape[1] - jnp.argmax(x[:, ::-1], axis=1), 0)
        return jnp.where(jnp.any(x, 1), jnp.argmax(x, axis=1), 0).astype(jnp.int32), end.astype(jnp.int32)

    return bounds(meet), bounds(meet.T)


def _blocks(q, k, v, q_rows, kv_rows):
    """Everything in blocks, block index first, and the block sizes."""
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    sizes = next(s[1:] for s in dispatch.by_backend(block_sizes.BLOCKS) if rows <= s[0])
    q_size, k_size = min(sizes[0], q.shape[3]), min(sizes[1], k.shape[2])
    blocked = _blocked(q, q_size, 3), _blocked(k, k_size, 2), _blocked(v, k_size, 2)
    return *blocked, _blocked_rows(q_rows, q_size), _blocked_rows(kv_rows, k_size), q_size


def _pick(tree, i):
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


def _blocks_forward(q, k, v, q_rows, kv_rows, extra, options, precision):
    length = q.shape[3]
    q, k, v, q_rows, kv_rows, _ = _blocks(q, k, v, q_rows, kv_rows)
    (first, end), _ = _block_bounds(q_rows, kv_rows, options)

    def query_block(inputs):
        qi, rows, lo, hi = inputs

        def key_block(j, carry):
            accumulated, top, total = carry
            kj, vj, kv = _pick((k, v, kv_rows), j)
            logits = _logits(qi, kj, _visible(rows, kv, options), options, precision)
            new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
            weights = jnp.exp(logits - _finite(new_top)[..., None])
            shrink = jnp.exp(top - _finite(new_top))
            accumulated = accumulated * shrink[..., None] + _einsum("bhgqk,bhkd->bhgqd", weights, vj, precision)
            return accumulated, new_top, total * shrink + jnp.sum(weights, axis=-1)

        # Zeros made from the inputs vary over the same mesh axes as they do.
        nothing = jnp.zeros_like(qi[..., 0])
        if extra is None:
            top, total = nothing - jnp.inf, nothing
        else:
            top, total = nothing + extra, nothing + 1
        start = (jnp.zeros_like(qi[..., :1]) * jnp.zeros_like(v[0, :, :, None, :1]), top, total)
        return _finish(*lax.fori_loop(lo, hi, key_block, start))

    o, lse = lax.map(query_block, (q, q_rows, first, end))
    return _unblocked(o, length, 3), _unblocked(lse, length, 3)


def _blocks_backward(q, k, v, q_rows, kv_rows, lse, do, delta, options, precision):
    q_length, k_length = q.shape[3], k.shape[2]
    q, k, v, q_rows, kv_rows, q_size = _blocks(q, k, v, q_rows, kv_rows)
    do = _blocked(do, q_size, 3)
    lse, delta = _blocked(lse, q_size, 3, jnp.inf), _blocked(delta, q_size, 3)
    _, (first, end) = _block_bounds(q_rows, kv_rows, options)

    def key_block(dq, inputs):
        kj, vj, kv, lo, hi = inputs

        def query_block(i, carry):
            dq, dk, dv = carry
            qi, rows, lse_i, do_i, delta_i = _pick((q, q_rows, lse, do, delta), i)
            logits = _logits(qi, kj, _visible(rows, kv, options), options, precision)
            probabilities = jnp.exp(logits - lse_i[..., None])
            ds = _dlogits(logits, probabilities, do_i, vj, delta_i, options, precision)
            dq_i = _pick(dq, i) + _einsum("bhgqk,bhkd->bhgqd", ds, kj, precision)
            dq = lax.dynamic_update_index_in_dim(dq, dq_i, i, 0)
            dk = dk + _einsum("bhgqk,bhgqd->bhkd", ds, qi, precision)
            return dq, dk, dv + _einsum("bhgqk,bhgqd->bhkd", probabilities, do_i, precision)

        dq, dk, dv = lax.fori_loop(lo, hi, query_block, (dq, jnp.zeros_like(kj), jnp.zeros_like(vj)))
        return dq, (dk, dv)

    dq, (dk, dv) = lax.scan(key_block, jnp.zeros_like(q), (k, v, kv_rows, first, end))
    return _unblocked(dq, q_length, 3), _unblocked(dk, k_length, 2), _unblocked(dv, k_length, 2)
