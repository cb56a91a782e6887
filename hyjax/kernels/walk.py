"""What the walks over tokens share: one token read or written where it lies, and chunks walked side by side.

A diagonal recurrence s_t = a_t ∘ s_{t-1} + b_t is walked token by token with the state as the loop's carry. An
accelerator is slow at T small steps; there, n chunks of a row are walked side by side, as rows of a larger batch
(`fold`), in three passes:

1. every chunk from a zero state: its end e, and the product p of its decays;
2. the borders (`borders`): S_{j+1} = p_j ∘ S_j + e_j, which gives every chunk the state that it is entered with;
3. every chunk from that state.

The products are of decays, at most 1, and exactly zero where a document starts in the chunk. The gradient of the state
obeys the same recurrence from the end to the start, with the same products.
"""

import jax
import jax.numpy as jnp
from jax import lax


def read(x: jax.Array, t: jax.Array | int, dtype: jnp.dtype | None = None) -> jax.Array:
    """Token t of x [R, T, ...] as [R, ...], cast to `dtype`: so that no copy of the whole of x is ever cast."""
    token = lax.dynamic_index_in_dim(x, t, 1, keepdims=False)
    return token if dtype is None else token.astype(dtype)


def write(x: jax.Array, token: jax.Array, t: jax.Array | int) -> jax.Array:
    """x [R, T, ...] with its token t set, in x's dtype; in place where x is a loop's carry."""
    return lax.dynamic_update_index_in_dim(x, token.astype(x.dtype), t, 1)


def fold(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, ...] -> [B*n, chunk, ...], n = ceil(T / chunk), with zeros after the last token."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk)) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(-1, chunk, *x.shape[2:])


def unfold(x: jax.Array, batch: int, time: int) -> jax.Array:
    """The inverse of fold: [B*n, chunk, ...] -> [B, T, ...]."""
    return x.reshape(batch, -1, *x.shape[2:])[:, :time]


def borders(product: jax.Array, end: jax.Array, state: jax.Array, reverse: bool = False) -> tuple[jax.Array, jax.Array]:
    """product, end [B*n, ...] of the chunks and the state [B, ...] before the first (reverse: after the last).

    Returns the state after the last (reverse: before the first), and the state [B*n, ...] that each is entered with.
    """
    batch = state.shape[0]
    product, end = (jnp.moveaxis(x.reshape(batch, -1, *x.shape[1:]), 1, 0) for x in (product, end))
    last, entries = lax.scan(lambda s, chunk: (chunk[0] * s + chunk[1], s), state, (product, end), reverse=reverse)
    return last, jnp.moveaxis(entries, 0, 1).reshape(-1, *entries.shape[2:])
