"""Where each token stands: its document, its position in it, and its place in a row that spans calls.

`Context` is what a caller gives (or leaves out). `enter` turns it into what the layers are told, and
carries the row's `Clock` to the next call, so that splitting a row at a document's edge, in its middle
or inside padding gives the same answer as one call.

Shapes: `B` batch, `T` time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


@struct.dataclass
class Clock:
    """What the model remembers of a row between calls; int32 [B] each."""

    time: jax.Array  # tokens seen so far, padding not counted
    start: jax.Array  # the time at which the current document began
    position: jax.Array  # the position that follows the last token's
    segment: jax.Array  # the last non-zero segment id (0: none yet)

    @classmethod
    def zeros(cls, batch: int) -> Clock:
        # four arrays, not one four times: a donated state must not alias itself
        return cls(*(jnp.zeros((batch,), jnp.int32) for _ in range(4)))


@struct.dataclass
class Context:
    """Positions and documents of a batch of rows.

    A caller gives `positions [B,T]` and `segment_ids [B,T]` (0 is padding; a document ends where a
    non-zero id differs from the last non-zero id before it). The model fills in the rest for its layers:

    Attributes:
      positions: int32 [B,T], the position of each token in its document (what RoPE and tables read).
      segment_ids: int32 [B,T] or None (no padding, and the document that is open goes on). Inside the model the ids
        are renumbered: 1 is the document that an earlier call left open, 2, 3, … those that begin here.
      time: int32 [B,T], how many tokens of the row (padding not counted) stand before this one.
      clock: the row's clock at entry.
      fresh: bool [B], whether the row's first document here is not the one an earlier call left open.
      contiguous: the caller's word that padding stands between documents only, never inside one, as in a packed batch.
        A window then goes by place in the row, which kernels that skip blocks ask for.
    """

    positions: jax.Array
    segment_ids: jax.Array | None
    time: jax.Array | None = None
    clock: Clock | None = None
    fresh: jax.Array | None = None
    contiguous: bool = struct.field(pytree_node=False, default=False)

    def placed(self) -> tuple[jax.Array, jax.Array, Clock]:
        """Segment ids, times and the clock: what every call with a state has."""
        assert self.segment_ids is not None and self.time is not None and self.clock is not None
        return self.segment_ids, self.time, self.clock


def enter(ctx: Context | None, clock: Clock | None, batch: int, length: int) -> tuple[Context, Clock | None]:
    """The context as the layers see it, and the clock after this call (None where there is no state)."""
    steps = jnp.arange(length, dtype=jnp.int32)[None]
    if ctx is None and clock is None:
        return Context(jnp.broadcast_to(steps, (batch, length)), None), None
    stateless, clock = clock is None, Clock.zeros(batch) if clock is None else clock
    open_id = jnp.where(clock.segment == 0, 1, clock.segment)[:, None]
    ids = jnp.broadcast_to(open_id, (batch, length))
    positions = clock.position[:, None] + steps
    if ctx is not None:
        positions = jnp.asarray(ctx.positions, jnp.int32)
        ids = ids if ctx.segment_ids is None else jnp.asarray(ctx.segment_ids, jnp.int32)
        for name, a in (("positions", positions), ("segment_ids", ids)):
            if a.shape != (batch, length):
                raise ValueError(f"ctx.{name} has shape {a.shape}; the tokens ask for {(batch, length)}")

    valid = ids != 0
    # the index (1-based) of the last token up to and including each column, 0 before the first
    last = lax.cummax(jnp.where(valid, steps + 1, 0), axis=1)
    before = jnp.pad(last, ((0, 0), (1, 0)))[:, :-1]
    padded = jnp.concatenate([clock.segment[:, None], ids], axis=1)
    previous = jnp.take_along_axis(padded, before, axis=1)
    begins = valid & (previous != 0) & (ids != previous)
    document = jnp.where(valid, 1 + jnp.cumsum(begins, axis=1, dtype=jnp.int32), 0)
    time = clock.time[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - valid
    first = jnp.where(valid, document, length + 2).min(axis=1)
    fresh = (first > 1) & (first <= length + 1)
    inside = Context(positions, document, time, clock, fresh, contiguous=ctx is not None and ctx.contiguous)

    end = last[:, -1:]
    following = jnp.concatenate([clock.position[:, None], positions + 1], axis=1)
    after = Clock(
        time=clock.time + valid.sum(axis=1, dtype=jnp.int32),
        start=jnp.maximum(clock.start, jnp.where(begins, time, 0).max(axis=1)),
        position=jnp.take_along_axis(following, end, axis=1)[:, 0],
        segment=jnp.take_along_axis(padded, end, axis=1)[:, 0],
    )
    return inside, None if stateless else after
