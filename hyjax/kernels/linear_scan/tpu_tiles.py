"""What the TPU kernels of linear_scan do to tiles, whichever gate they have."""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels.linear_scan.tpu_plan import TILE, Plan

NN, NT, TN = ((((x,), (y,)), ((), ())) for x, y in ((1, 0), (1, 1), (0, 0)))


def dot(x: jax.Array, y: jax.Array, dims) -> jax.Array:
    """Products of float32 inputs keep their digits; those of bfloat16 inputs have none to lose."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def iota(axis: int) -> jax.Array:
    """[TILE, TILE], the index along `axis`."""
    return lax.broadcasted_iota(jnp.int32, (TILE, TILE), axis)


def rows(tile: int) -> slice:
    """Of the chunk."""
    return slice(tile * TILE, (tile + 1) * TILE)


def walk(p: Plan, backwards: bool = False) -> Iterator[tuple[int, int, range]]:
    """The tiles of a chunk, one after the other, and of each the key heads with the value heads that read them."""
    each = p.heads // p.step_keys
    for tile in reversed(range(p.tiles)) if backwards else range(p.tiles):
        for key in range(p.step_keys):
            yield tile, key, range(key * each, (key + 1) * each)


def staggered(items: Sequence, *stages: Callable) -> list:
    """What the last stage makes of each item: stage(item, what the one before made of it), the first stage(item).

    The compiler schedules in about the order of the program: a stage of an item stands beside the next stage of the
    item before, so that matrix products run beside vector work that doesn't wait for them.
    """
    made: list = [()] * len(items)
    for n in range(len(items) + len(stages) - 1):
        for at, stage in zip(range(n, -1, -1), stages, strict=False):
            if at < len(items):
                made[at] = (stage(items[at], *made[at]),)
    return [x for (x,) in made]
