"""Sizes of the TPU kernels of linear_scan, and which calls they can't serve.

A grid step takes a chunk of some value heads, and the key heads that these read: so many value heads that they share
key heads evenly, either several whole groups or a part of one. In the latter case the gradients of q and k come in
parts, one a step, that are added outside.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyjax.kernels import dispatch
from hyjax.kernels.linear_scan import block_sizes
from hyjax.kernels.tpu_sizes import heads_a_step, padded_dim, power_of_two

TILE = 128  # tokens that meet in one matrix: the size of the matrix unit, and of a register's lanes
LARGEST_HEAD_DIM = 512
MOST_TILES = 4  # a chunk: its tiles are written out, and the compiler's time grows with them
VMEM_BYTES = 48 << 20  # of 64 MiB on v5p and tpu7x, and 128 on v5e and v6e
BLOCK_BYTES = VMEM_BYTES // 2  # what the copied blocks may take; the rest is for what lives inside a step


def refusal(q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array) -> str | None:
    """Why the TPU kernels can't serve a call, or None."""
    for name, x in dict(q=q, k=k, v=v).items():
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} has dtype {x.dtype}, and it takes bfloat16 and float32"
        if x.shape[3] > LARGEST_HEAD_DIM:
            return f"{name} has head dim {x.shape[3]}, and it takes up to {LARGEST_HEAD_DIM}"
    if jnp.result_type(log_decay) == jnp.float64:
        return "log_decay has dtype float64, and it computes in float32"
    return None


class Plan(NamedTuple):
    """Sizes of a call, all static."""

    batch: int
    time: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    per_channel: bool
    chunk: int  # tokens a grid step, a multiple of TILE
    heads: int  # value heads a grid step

    @property
    def groups(self) -> int:
        """Value heads a key head."""
        return self.value_heads // self.key_heads

    @property
    def tiles(self) -> int:
        return self.chunk // TILE

    @property
    def chunks(self) -> int:
        return -(-self.time // self.chunk)

    @property
    def padded_time(self) -> int:
        return self.chunks * self.chunk

    @property
    def padded_dims(self) -> tuple[int, int]:
        return padded_dim(self.key_dim), padded_dim(self.value_dim)

    @property
    def step_keys(self) -> int:
        """Key heads a grid step."""
        return max(1, self.heads // self.groups)

    @property
    def parts(self) -> int:
        """Grid steps that share a key head."""
        return max(1, self.groups // self.heads)

    @property
    def steps(self) -> int:
        """Grid steps over heads."""
        return self.value_heads // self.heads


def plan(q_shape, v_shape, per_channel: bool, chunk_size: int | None) -> Plan:
    """q [B,T,H,K], v [B,T,HV,V]."""
    (batch, time, key_heads, key_dim), (value_heads, value_dim) = q_shape, v_shape[2:]
    table = block_sizes.PALLAS_TPU
    chunk, most = table.get(dispatch.device()[1], table["other"])["channel" if per_channel else "head"]
    chunk = max(TILE, power_of_two(min(chunk_size or chunk, time, MOST_TILES * TILE)))
    bytes_a_head = lambda chunk: _block_bytes(chunk, padded_dim(key_dim), padded_dim(value_dim))
    while chunk > TILE and bytes_a_head(chunk) > BLOCK_BYTES:
        chunk //= 2
    most = max(1, min(most, BLOCK_BYTES // bytes_a_head(chunk)))
    heads = heads_a_step(value_heads, value_heads // key_heads, most)
    return Plan(batch, time, key_heads, value_heads, key_dim, value_dim, per_channel, chunk, heads)


def _block_bytes(chunk: int, key_dim: int, value_dim: int) -> int:
    """Of one head in the backward kernel, all in float32 and twice: a block is copied while another is worked on."""
    # q, k, dq, dk and two of gates; v, do, dv; three states
    return 8 * (chunk * (6 * key_dim + 3 * value_dim) + 3 * key_dim * value_dim)
