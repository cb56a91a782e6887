"""Which calls of diagonal_scan the TPU kernels serve, and how these cut time, channels and the batch into blocks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyjax.kernels import dispatch
from hyjax.kernels.diagonal_scan import block_sizes

LANES, SUBLANES = 128, 8  # of a vector register of float32
ROWS = 16  # tokens of a load: as many as a register of bfloat16 has


def refusal(x: jax.Array, log_decay: jax.Array, initial_state: jax.Array | None) -> str | None:
    """Why the TPU kernels can't serve a call, or None."""
    taken = (jnp.bfloat16, jnp.float32, jnp.complex64)
    for name, array in dict(x=x, log_decay=log_decay, initial_state=initial_state).items():
        if array is not None and array.dtype not in taken:
            return f"{name} has dtype {array.dtype}, and it takes bfloat16, float32 and complex64"
    return None


class Plan(NamedTuple):
    """Sizes of a call, all static."""

    planes: int  # 1, or 2 for the real and the imaginary part
    time: int  # padded to whole blocks
    dim: int  # likewise
    rows: int  # of the batch a block, a divisor of it
    tokens: int  # a block
    channels: int  # a block


def plan(shape: tuple[int, int, int], is_complex: bool) -> Plan:
    """x [B,T,D]."""
    batch, time, dim = shape
    most_tokens, most_channels = block_sizes.PALLAS_TPU.get(dispatch.device()[1], block_sizes.PALLAS_TPU["other"])
    tokens = min(most_tokens, -(-time // ROWS) * ROWS)
    padded_dim = -(-dim // LANES) * LANES
    channels = _largest_divisor(padded_dim // LANES, most_channels // LANES) * LANES
    rows = _largest_divisor(batch, most_channels // channels)
    return Plan(2 if is_complex else 1, -(-time // tokens) * tokens, padded_dim, rows, tokens, channels)


def _largest_divisor(x: int, most: int) -> int:
    return max(n for n in range(1, most + 1) if x % n == 0)
