"""What a layer remembers between calls: key-value caches, recurrent matrices, convolution tails.

Each is a value that goes in and comes out of `apply`. `reset(fresh)` forgets the rows whose document has
ended; `sizes()` counts the bytes of the very arrays that are allocated, by what they are for.

Shapes: `B` batch, `L` slots, `H` heads, `K` key dim, `V` value dim, `T` time, `C` channels.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct

from hyjax.models.context import Context


def _forget(array: jax.Array, fresh: jax.Array) -> jax.Array:
    return jnp.where(fresh.reshape(-1, *[1] * (array.ndim - 1)), 0, array)


def _bytes(*arrays: jax.Array | None) -> int:
    return sum(a.size * a.dtype.itemsize for a in arrays if a is not None)


@struct.dataclass
class _KeysAndValues:
    k: jax.Array
    v: jax.Array

    @classmethod
    def zeros(cls, batch: int, slots: int, heads: int, key_dim: int, value_dim: int, dtype) -> Self:
        shape = (batch, slots, heads)
        return cls(jnp.zeros((*shape, key_dim), dtype), jnp.zeros((*shape, value_dim), dtype))

    def reset(self, fresh: jax.Array) -> Self:
        """Old slots stay where they are: the clock knows where the document began, and `extend` hides them."""
        return self

    def write(self, slot: jax.Array, k: jax.Array, v: jax.Array) -> Self:
        """Puts token t of a row into `slot[t]`; one past the last slot drops it."""
        rows = jnp.arange(slot.shape[0])[:, None]
        return dataclasses.replace(  # type: ignore[type-var]
            self,
            k=self.k.at[rows, slot].set(k.astype(self.k.dtype), mode="drop"),
            v=self.v.at[rows, slot].set(v.astype(self.v.dtype), mode="drop"),
        )


class Visible(NamedTuple):
    """What the queries of a call may look at: [B,S,H,K], [B,S,H,V], and the times and documents [B,S]."""

    k: jax.Array
    v: jax.Array
    times: jax.Array
    documents: jax.Array


@struct.dataclass
class KVCache(_KeysAndValues):
    """Keys and values of every token: slot t holds the row's token of time t. [B,L,H,K] and [B,L,H,V].

    Padding takes no slot, so a padded prompt leaves the cache that the bare prompt would.
    """

    def extend(self, k: jax.Array, v: jax.Array, ctx: Context) -> tuple[KVCache, Visible]:
        """Writes the call's keys and values; its queries see all L slots."""
        batch, slots = self.k.shape[:2]
        ids, time, clock = ctx.placed()
        slot = jnp.where(ids > 0, time, slots)  # padding, and what does not fit, is dropped
        cache = self.write(slot, k, v)
        times = jnp.broadcast_to(jnp.arange(slots), (batch, slots))
        open_document = (times >= clock.start[:, None]) & (times < clock.time[:, None])
        rows = jnp.arange(batch)[:, None]
        documents = open_document.astype(jnp.int32).at[rows, slot].set(ids, mode="drop")
        return cache, Visible(cache.k.astype(k.dtype), cache.v.astype(v.dtype), times, documents)

    def sizes(self) -> dict[str, int]:
        return {"kv": _bytes(self.k, self.v)}


@struct.dataclass
class WindowCache(_KeysAndValues):
    """Keys and values of the last L tokens, a ring: the token of time t is in slot t mod L. [B,L,H,K/V]."""

    def extend(self, k: jax.Array, v: jax.Array, ctx: Context) -> tuple[WindowCache, Visible]:
        """Writes the call's keys and values; its queries see the old ring and, after it, the call's own.

        Within one call a token may still need a key that the call's last tokens overwrite in the ring.
        """
        slots = self.k.shape[1]
        ids, time, clock = ctx.placed()
        newest = clock.time[:, None] - 1
        ring_times = newest - (newest - jnp.arange(slots)) % slots  # the latest time so far in each slot
        open_document = ring_times >= clock.start[:, None]
        visible = Visible(
            jnp.concatenate([self.k.astype(k.dtype), k], axis=1),
            jnp.concatenate([self.v.astype(v.dtype), v], axis=1),
            jnp.concatenate([ring_times, time], axis=1),
            jnp.concatenate([open_document.astype(jnp.int32), ids], axis=1),
        )
        end = clock.time + jnp.sum(ids > 0, axis=1, dtype=jnp.int32)
        kept = (ids > 0) & (time >= end[:, None] - slots)
        return self.write(jnp.where(kept, time % slots, slots), k, v), visible

    def sizes(self) -> dict[str, int]:
        return {"window": _bytes(self.k, self.v)}


@struct.dataclass
class RecurrentState:
    """A recurrence's matrix [B,H,K,V] and, where it has a short convolution, that one's tail [B,W-1,C]."""

    matrix: jax.Array
    conv: jax.Array | None = None

    def reset(self, fresh: jax.Array) -> RecurrentState:
        return jax.tree.map(lambda a: _forget(a, fresh), self)

    def sizes(self) -> dict[str, int]:
        return {"recurrent": _bytes(self.matrix), "conv": _bytes(self.conv)}
