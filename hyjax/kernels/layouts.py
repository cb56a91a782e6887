"""How the scans cut and turn their arrays: pieces and chunks of tokens, pairs of blocks, tokens or rows first."""

import jax
import jax.numpy as jnp


def cut(x: jax.Array, pieces: int) -> jax.Array:
    """[B, T, ...] -> [pieces, B, T/pieces, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], pieces, -1, *x.shape[2:]), 1, 0)


def uncut(x: jax.Array) -> jax.Array:
    """The inverse of cut."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def split(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, H, X] -> [T/C, B, H, C, X]."""
    b, t, h, x_dim = x.shape
    return x.reshape(b, t // chunk, chunk, h, x_dim).transpose(1, 0, 3, 2, 4)


def merge(x: jax.Array) -> jax.Array:
    """[T/C, B, H, C, X] -> [B, T, H, X]."""
    n, b, h, c, x_dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(b, n * c, h, x_dim)


def split_groups(x: jax.Array, chunk: int, heads: int) -> jax.Array:
    """[B, T, H*G, X] -> [T/C, B, H, G, C, X]."""
    b, t, all_heads, x_dim = x.shape
    x = x.reshape(b, t // chunk, chunk, heads, all_heads // heads, x_dim)
    return x.transpose(1, 0, 3, 4, 2, 5)


def merge_groups(x: jax.Array) -> jax.Array:
    """[T/C, B, H, G, C, X] -> [B, T, H*G, X]."""
    n, b, h, g, c, x_dim = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(b, n * c, h * g, x_dim)


def rows(x: jax.Array) -> jax.Array:
    """[..., G, C, X] -> [..., G*C, X]: what is done block by block needs no dimension of its own for the groups.

    Fewer dimensions matter: XLA on a CPU aborts at products of eight, which a vmap around seven makes.
    """
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def halves(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """[..., R, X] -> earlier and later blocks of `size` tokens, each [..., R/(2 size), size, X]."""
    x = x.reshape(*x.shape[:-2], -1, 2, size, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def join(earlier: jax.Array, later: jax.Array) -> jax.Array:
    """The inverse of halves."""
    x = jnp.stack([earlier, later], axis=-3)
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def time_major(x: jax.Array) -> jax.Array:
    """[B, T, H, K] -> [T, K, B*H]."""
    b, t, h, k = x.shape
    return x.transpose(1, 3, 0, 2).reshape(t, k, b * h)


def batch_major(x: jax.Array, batch: int) -> jax.Array:
    """[T, K, B*H] -> [B, T, H, K]."""
    t, k, n = x.shape
    return x.reshape(t, k, batch, n // batch).transpose(2, 0, 3, 1)


def rows_last(state: jax.Array) -> jax.Array:
    """[B, H, K, V] -> [K, V, B*H]."""
    b, h, k, v = state.shape
    return state.transpose(2, 3, 0, 1).reshape(k, v, b * h)


def rows_first(state: jax.Array, batch: int) -> jax.Array:
    """[K, V, B*H] -> [B, H, K, V]."""
    k, v, n = state.shape
    return state.reshape(k, v, batch, n // batch).transpose(2, 3, 0, 1)
