"""short_conv in plain XLA operations: shifted products, and for documents a mask a tap.

Padding between tokens is as if absent, so rows that have any are compacted first (a permutation of time that moves the
tokens to the front, undone at the end); rows with none, or with all of it at the end, skip that at run time.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels import segments


class Documents(NamedTuple):
    """What the convolution has to know of segment ids [B, T], in compacted order (tokens first, padding last)."""

    rank: jax.Array  # [B, T] the compacted place of each place
    scattered: jax.Array  # [] bool: some padding comes before a token, so that compacting does anything
    document: jax.Array  # [B, T] the document of each compacted place; 0 continues the initial state
    length: jax.Array  # [B] how many tokens


def documents(segment_ids: jax.Array) -> Documents:
    """[B, T] ids -> Documents."""
    valid = segment_ids != 0
    tokens = jnp.cumsum(valid.astype(jnp.int32), axis=1)
    padding = jnp.cumsum((~valid).astype(jnp.int32), axis=1)
    count = tokens[:, -1]
    rank = jnp.where(valid, tokens, count[:, None] + padding) - 1
    scattered = jnp.any(rank != jnp.arange(rank.shape[1]))
    index = segments.document_index(segment_ids)
    compacted = lax.cond(
        scattered, lambda: jnp.take_along_axis(index, jnp.argsort(rank, axis=1), axis=1), lambda: index
    )
    return Documents(rank, scattered, compacted, count)


def _compact(x: jax.Array, docs: Documents | None) -> jax.Array:
    """[B, T, D] with the tokens moved to the front."""
    if docs is None:
        return x
    moved = lambda: jnp.take_along_axis(x, jnp.argsort(docs.rank, axis=1)[..., None], axis=1)
    return lax.cond(docs.scattered, moved, lambda: x)


def _spread(x: jax.Array, docs: Documents | None) -> jax.Array:
    """The inverse of _compact."""
    if docs is None:
        return x
    return lax.cond(docs.scattered, lambda: jnp.take_along_axis(x, docs.rank[..., None], axis=1), lambda: x)


def _taps(x: jax.Array, state: jax.Array, docs: Documents | None) -> list[jax.Array]:
    """The inputs that each weight multiplies, oldest first: W arrays [B, T, D], zero across a document's start."""
    time, tail = x.shape[1], state.shape[1]
    seen = jnp.concatenate([state, x], axis=1)
    taps = [seen[:, w : w + time] for w in range(tail + 1)]
    if docs is None:
        return taps
    return [jnp.where(_same(docs, w, tail)[..., None], tap, 0) for w, tap in enumerate(taps)]


def _same(docs: Documents, w: int, tail: int) -> jax.Array:
    """[B, T] whether the token `tail - w` places earlier is of the same document."""
    before = jnp.pad(docs.document, ((0, 0), (tail, 0)))
    return before[:, w : w + docs.document.shape[1]] == docs.document


def _tail(docs: Documents, tail: int) -> tuple[jax.Array, jax.Array]:
    """Where in [state, x] the final state lies, [B, W-1], and which of it belongs to the last document, [B, W-1]."""
    places = docs.length[:, None] + jnp.arange(tail)
    before = jnp.pad(docs.document, ((0, 0), (tail, 0)))
    return places, jnp.take_along_axis(before, places, axis=1) == jnp.max(docs.document, axis=1, keepdims=True)


def _linear(taps: list[jax.Array], weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    y = functools.reduce(operator.add, (tap * w for tap, w in zip(taps, weight, strict=True)))
    return y if bias is None else y + bias


def forward(x, weight, bias, state, docs: Documents | None, activation: str | None):
    """x [B,T,D], weight [W,D], bias [D] or None, state [B,W-1,D] in the dtype of the arithmetic.

    x at padding must be finite. Returns y [B,T,D] (not zeroed at padding) and the final state, in `state`'s dtype.
    """
    tail, time = state.shape[1], x.shape[1]
    x = _compact(x.astype(state.dtype), docs)
    y = _linear(_taps(x, state, docs), weight, bias)
    if activation == "silu":
        y = jax.nn.silu(y)
    seen = jnp.concatenate([state, x], axis=1)
    if docs is None:
        return y, seen[:, time : time + tail]
    places, same = _tail(docs, tail)
    final = jnp.where(same[..., None], jnp.take_along_axis(seen, places[..., None], axis=1), 0)
    return _spread(y, docs), final


def backward(x, weight, bias, state, docs: Documents | None, activation: str | None, dy, dfinal):
    """The gradients of x, weight, bias (None without one) and state; dy must be zero at padding."""
    tail, time = state.shape[1], x.shape[1]
    x, dy = _compact(x.astype(state.dtype), docs), _compact(dy.astype(state.dtype), docs)
    taps = _taps(x, state, docs)
    if activation == "silu":
        y = _linear(taps, weight, bias)
        sigmoid = jax.nn.sigmoid(y)
        dy = dy * sigmoid * (1 + y * (1 - sigmoid))
    dweight = jnp.stack([jnp.sum(dy * tap, axis=(0, 1)) for tap in taps])
    dbias = None if bias is None else jnp.sum(dy, axis=(0, 1))
    dseen = jnp.zeros((x.shape[0], tail + time, x.shape[2]), state.dtype)
    for w in range(tail + 1):
        part = dy * weight[w]
        if docs is not None:
            part = jnp.where(_same(docs, w, tail)[..., None], part, 0)
        dseen += jnp.pad(part, ((0, 0), (w, tail - w), (0, 0)))
    if docs is None:
        dseen += jnp.pad(dfinal, ((0, 0), (time, 0), (0, 0)))
    else:
        places, same = _tail(docs, tail)
        rows = jnp.arange(x.shape[0])[:, None]
        dseen = dseen.at[rows, places].add(jnp.where(same[..., None], dfinal, 0))
    return _spread(dseen[:, tail:], docs), dweight, dbias, dseen[:, :tail]
