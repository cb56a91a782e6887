"""What varies over the axes of a mesh: inside shard_map JAX asks of arrays that meet to say the same of it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes that x varies over; none outside of shard_map."""
    return frozenset(getattr(jax.typeof(x).manual_axis_type, "varying", ()))


def alike(*arrays: jax.Array | None) -> list[Any]:
    """The arrays, all varying over every mesh axis that one of them varies over: what shard_map asks of a custom_vjp.

    A weight that all devices share becomes a varying one here, and JAX sums its gradient over them. None stays None.
    """
    union = frozenset().union(*(axes(x) for x in arrays if x is not None))
    return [x if x is None else _cast(x, union - axes(x)) for x in arrays]


def zeros(shape: Sequence[int], dtype: jnp.dtype, like: jax.Array) -> jax.Array:
    """Zeros that vary as `like` does: what a loop's carry needs."""
    return _cast(jnp.zeros(tuple(shape), dtype), axes(like))


def _cast(x: jax.Array, missing: frozenset[str]) -> jax.Array:
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x
