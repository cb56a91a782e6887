"""What a layer remembers between calls: key-value caches, recurrent matrices, convolution tails.

Each is a value that goes in and comes out of `apply`. `reset(fresh)` forgets the rows whose document has
ended; `sizes()` counts the bytes of the very arrays that are allocated, by what they are for.

Keys and values lie heads first, [B,H,L,·]: so the two products of a decoding step read them as they lie, where time
first would have them copied.

Shapes: `B` batch, `L` slots, `H` heads, `K` key dim, `V` value dim, `T` time, `C` channels.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct

from hyjax.models.context import Context

NEVER = jnp.iinfo(jnp.int32).max  # a time that no query reaches


def _forget(array: jax.Array, fresh: jax.Array) -> jax.Array:
    return jnp.where(fresh.reshape(-1, *[1] * (array.ndim - 1)), 0, array)


def _bytes(*arrays: jax.Array | None) -> int:
    return sum(a.size * a.dtype.itemsize for a in arrays if a is not None)


class Visible(NamedTuple):
    """What the queries of a call may look at: keys and values [B,S,H,·], their times and documents [B,S]."""

    k: jax.Array
    v: jax.Array
    times: jax.Array
    documents: jax.Array


class Seen(NamedTuple):
    """What the one query of a decoding step sees: [B,S,H,·] at times [B,S], and its own time [B,1].

    Times say it all: a key that it may not see has NEVER, and padding stands before every key.
    """

    k: jax.Array
    v: jax.Array
    times: jax.Array
    now: jax.Array


@struct.dataclass
class _KeysAndValues:
    k: jax.Array
    v: jax.Array

    @classmethod
    def zeros(cls, batch: int, slots: int, heads: int, key_dim: int, value_dim: int, dtype) -> Self:
        shape = (batch, heads, slots)
        return cls(jnp.zeros((*shape, key_dim), dtype), jnp.zeros((*shape, value_dim), dtype))

    @property
    def slots(self) -> int:
        return self.k.shape[2]

    def reset(self, fresh: jax.Array) -> Self:
        """Old slots stay where they are: the clock knows where the document began, and `extend` hides them."""
        return self

    def write(self, slot: jax.Array, k: jax.Array, v: jax.Array) -> Self:
        """Puts token t of a row, k and v [B,T,H,·], into `slot[t]`; one past the last slot drops it."""
        rows = jnp.arange(slot.shape[0])[:, None]
        return dataclasses.replace(  # type: ignore[type-var]
            self,
            k=self.k.at[rows, :, slot].set(k.astype(self.k.dtype), mode="drop"),
            v=self.v.at[rows, :, slot].set(v.astype(self.v.dtype), mode="drop"),
        )

    def read(self, dtype) -> tuple[jax.Array, jax.Array]:
        """Keys and values as attention wants them, [B,L,H,·]."""
        return self.k.swapaxes(1, 2).astype(dtype), self.v.swapaxes(1, 2).astype(dtype)

    def _seen(self, times: jax.Array, ctx: Context, dtype) -> Seen:
        """`times` [B,L] of what the slots hold, this step's token included."""
        ids, time, clock = ctx.placed()
        start = jnp.where(ids > 1, time, clock.start[:, None])  # above 1: its document begins with this token
        return Seen(*self.read(dtype), jnp.where(times < start, NEVER, times), jnp.where(ids > 0, time, -1))


@struct.dataclass
class KVCache(_KeysAndValues):
    """Keys and values of every token: slot t holds the row's token of time t. [B,H,L,K] and [B,H,L,V].

    Padding takes no slot, so a padded prompt leaves the cache that the bare prompt would.
    """

    def extend(self, k: jax.Array, v: jax.Array, ctx: Context) -> tuple[KVCache, Visible]:
        """Writes the call's keys and values; its queries see all L slots."""
        ids, _, clock = ctx.placed()
        cache, slot = self._written(k, v, ctx)
        times = jnp.broadcast_to(jnp.arange(self.slots), (ids.shape[0], self.slots))
        open_document = (times >= clock.start[:, None]) & (times < clock.time[:, None])
        rows = jnp.arange(ids.shape[0])[:, None]
        documents = open_document.astype(jnp.int32).at[rows, slot].set(ids, mode="drop")
        return cache, Visible(*cache.read(k.dtype), times, documents)

    def step(self, k: jax.Array, v: jax.Array, ctx: Context) -> tuple[KVCache, Seen]:
        """`extend` for one token a row."""
        cache, _ = self._written(k, v, ctx)
        return cache, cache._seen(jnp.arange(self.slots)[None], ctx, k.dtype)

    def _written(self, k: jax.Array, v: jax.Array, ctx: Context) -> tuple[KVCache, jax.Array]:
        ids, time, _ = ctx.placed()
        slot = jnp.where(ids > 0, time, self.slots)  # padding, and what does not fit, is dropped
        return self.write(slot, k, v), slot

    def sizes(self) -> dict[str, int]:
        return {"kv": _bytes(self.k, self.v)}


@struct.dataclass
class WindowCache(_KeysAndValues):
    """Keys and values of the last L tokens, a ring: the token of time t is in slot t mod L. [B,H,L,K/V]."""

    def extend(self, k: jax.Array, v: jax.Array, ctx: Context) -> tuple[WindowCache, Visible]:
        """Writes the call's keys and values; its queries see the old ring and, after it, the call's own.

        Within one call a token may still need a key that the call's last tokens overwrite in the ring.
        """
        ids, time, clock = ctx.placed()
        ring_times = self._times(clock.time)
        open_document = ring_times >= clock.start[:, None]
        old_k, old_v = self.read(k.dtype)
        visible = Visible(
            jnp.concatenate([old_k, k], axis=1),
            jnp.concatenate([old_v, v], axis=1),
            jnp.concatenate([ring_times, time], axis=1),
            jnp.concatenate([open_document.astype(jnp.int32), ids], axis=1),
        )
        return self._written(k, v, ctx), visible

    def step(self, k: jax.Array, v: jax.Array, ctx: Context) -> tuple[WindowCache, Seen]:
        """`extend` for one token a row, which overwrites the one key that it is too late to see."""
        ids, _, clock = ctx.placed()
        cache = self._written(k, v, ctx)
        return cache, cache._seen(self._times(clock.time + (ids[:, 0] > 0)), ctx, k.dtype)

    def _times(self, end: jax.Array) -> jax.Array:
        """[B,L] the latest time in each slot once a row holds `end` [B] tokens; negative where there is none."""
        newest = end[:, None] - 1
        return newest - (newest - jnp.arange(self.slots)) % self.slots

    def _written(self, k: jax.Array, v: jax.Array, ctx: Context) -> WindowCache:
        ids, time, clock = ctx.placed()
        end = clock.time + jnp.sum(ids > 0, axis=1, dtype=jnp.int32)
        kept = (ids > 0) & (time >= end[:, None] - self.slots)
        return self.write(jnp.where(kept, time % self.slots, self.slots), k, v)

    def sizes(self) -> dict[str, int]:
        return {"window": _bytes(self.k, self.v)}


@struct.dataclass
class RecurrentState:
    """A recurrence's matrix, [B,H,K,V] or as it has it, and the tails [B,W-1,C] of its short convolutions.

    `conv` is one tail, a tuple of them, or None.
    """

    matrix: jax.Array
    conv: Any = None

    def reset(self, fresh: jax.Array) -> RecurrentState:
        return jax.tree.map(lambda a: _forget(a, fresh), self)

    def sizes(self) -> dict[str, int]:
        return {"recurrent": _bytes(self.matrix), "conv": _bytes(*jax.tree.leaves(self.conv))}
