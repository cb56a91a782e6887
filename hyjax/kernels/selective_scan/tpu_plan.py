"""Which calls of selective_scan the TPU kernels serve, and how these cut channels into blocks."""

from typing import NamedTuple

import jax.numpy as jnp

from hyjax.kernels import dispatch
from hyjax.kernels.selective_scan import block_sizes

LANES, SUBLANES = 128, 8  # of a vector register of float32
TOKENS = 128  # a block, and from one saved state to the next: B and C have tokens along lanes
ROWS = 16  # tokens of a load: as many as a register of bfloat16 has
MOST_STATES = 64  # N: each takes 64 kB of fast memory for a block's B, its C, and its states


def refusal(u, delta, A, B, C, D, initial_state) -> str | None:
    """Why the TPU kernels can't serve a call, or None."""
    arrays = dict(u=u, delta=delta, A=A, B=B, C=C, D=D, initial_state=initial_state)
    for name, array in arrays.items():
        if array is not None and array.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} has dtype {array.dtype}, and it takes bfloat16 and float32"
    if A.shape[1] > MOST_STATES:
        return f"A {tuple(A.shape)} has {A.shape[1]} states a channel, and it takes up to {MOST_STATES}"
    return None


class Plan(NamedTuple):
    """Sizes of a call, all static."""

    packed: bool  # whether documents start inside a row
    time: int  # padded to whole blocks
    dim: int  # likewise
    registers: int  # that the states of 128 channels take, eight a register
    channels: int  # a block
    side_by_side: int  # groups of 128 channels that are walked together
    unroll: int  # sixteens of tokens

    @property
    def blocks(self) -> int:
        """Of time."""
        return self.time // TOKENS

    @property
    def states(self) -> int:
        """N, padded to whole registers."""
        return self.registers * SUBLANES


def plan(u_shape: tuple[int, int, int], A_shape: tuple[int, int], packed: bool) -> Plan:
    """u [B,T,D], A [D,N]."""
    (_, time, dim), states = u_shape, A_shape[1]
    table = block_sizes.PALLAS_TPU
    most_channels, most_registers, unroll = table.get(dispatch.device()[1], table["other"])
    groups, registers = -(-dim // LANES), -(-states // SUBLANES)
    block = _largest_divisor(groups, most_channels // LANES)
    side_by_side = _largest_divisor(block, max(1, most_registers // registers))
    time = -(-time // TOKENS) * TOKENS
    return Plan(packed, time, groups * LANES, registers, block * LANES, side_by_side, unroll)


def _largest_divisor(x: int, most: int) -> int:
    return max(n for n in range(1, most + 1) if x % n == 0)
