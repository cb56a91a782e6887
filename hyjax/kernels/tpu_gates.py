"""Log decays for the TPU kernels of the scans: sums inside a chunk whose differences are exact.

A plain float32 cumulative sum loses a gate of -1e-4 beside one of -50 to cancellation. So a log decay is rounded to a
multiple of 2^-26 and cut in two,

    g = hi + lo      hi a multiple of 2^-9 with |hi| <= 128, lo a multiple of 2^-26 with |lo| <= 2^-10

whose sums over up to 256 tokens stay below 2^15 and 2^-2: both are whole multiples below 2^24 of their units, which
float32 holds exactly, in whatever order they are added. For i >= j in one chunk the decay from j to i is

    e^((hi_i - hi_j) + (lo_i - lo_j))

with an exact sum in the exponent up to its last rounding. It is never positive, and no gate before j is in it: what one
document holds doesn't change a bit of the next. The rounding of g by at most 2^-27 is less than what float32 makes of
e^g. A gate below -128, and -inf, which cuts, becomes -128: e^-128 is 0 in float32, and so is every decay across it, so
that a cut needs no mask.

These are XLA operations: cumulative sums don't compile in a TPU kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MOST_TOKENS = 256  # a chunk; sums over more aren't exact
CUT = -128.0


class Sums(NamedTuple):
    """Inclusive sums from the chunk's start, float32 [B, H, T] or [B, H, T, K]."""

    hi: jax.Array
    lo: jax.Array


def parts(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(hi, lo) of each token, float32, in the shape of `log_decay`."""
    g = jnp.maximum(log_decay.astype(jnp.float32), CUT)
    hi = jnp.round(g * 2.0**9) * 2.0**-9
    return hi, jnp.round((g - hi) * 2.0**26) * 2.0**-26


def chunk_sums(log_decay: jax.Array, chunk: int) -> Sums:
    """log_decay [B, T, H] or [B, T, H, K], at most 0, T a multiple of `chunk` -> its sums, heads before time."""
    if chunk > MOST_TOKENS:
        raise ValueError(f"a chunk of {chunk} tokens is longer than {MOST_TOKENS}, where sums stop being exact")
    by_head = jnp.moveaxis(log_decay, 1, 2)
    cut = by_head.reshape(*by_head.shape[:2], -1, chunk, *by_head.shape[3:])
    return Sums(*(jnp.cumsum(x, axis=3).reshape(by_head.shape) for x in parts(cut)))
