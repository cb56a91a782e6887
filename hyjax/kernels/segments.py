"""Documents in a row, as the recurrences see them.

Segment id 0 is padding. A document ends where a non-zero id differs from the last non-zero id before it; zeros in
between change nothing. The first non-zero id of a row continues what came before the row.
"""

import jax
import jax.numpy as jnp
from jax import lax


def last_valid(valid: jax.Array) -> jax.Array:
    """[B, T] bool -> [B, T] int32: the index of the last True at or before each place, -1 where there is none."""
    index = jnp.where(valid, lax.broadcasted_iota(jnp.int32, valid.shape, 1), -1)
    return lax.cummax(index, axis=1)


def document_index(segment_ids: jax.Array) -> jax.Array:
    """[B, T] ids -> [B, T] int32: how many documents ended at or before each place; padding inherits its past's.

    Equal values mean the same document, and 0 the document that continues the initial state, however ids repeat.
    """
    valid = segment_ids != 0
    last = last_valid(valid)
    before = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    previous_id = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    first = valid & (before >= 0) & (segment_ids != previous_id)
    return jnp.cumsum(first.astype(jnp.int32), axis=1)


def starts(segment_ids: jax.Array) -> jax.Array:
    """[B, T] ids -> [B, T] bool: the first token of each document but the one that continues what came before."""
    index = document_index(segment_ids)
    return index != jnp.pad(index, ((0, 0), (1, 0)))[:, :-1]
