"""What surrounds the TPU kernels of delta_scan: which calls they can't serve, sizes, and layouts.

A grid step takes one chunk of some value heads and the key heads that these read: several whole groups, or a part of
one. In the latter case the gradients of q and k come in parts, one a step, that are added outside.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hyjax.kernels import dispatch
from hyjax.kernels.delta_scan import block_sizes
from hyjax.kernels.tpu_sizes import LANES, heads_a_step, padded_dim, power_of_two

SUBLANES = 8
LARGEST_HEAD_DIM = 256
# Keys of fewer channels overlap so much that what bfloat16 products lose grows past its own precision.
LEAST_HALF_DIM = 64
# Tokens a chunk: blocks of 16 are solved by substitution, and more than 128 would only add products of C x C matrices.
CHUNKS = (16, 128)


def refusal(q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, log_decay: jax.Array | None) -> str | None:
    """Why the TPU kernels can't serve a call, or None."""
    for name, x in dict(q=q, k=k, v=v).items():
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} has dtype {x.dtype}, and it takes bfloat16 and float32"
        if x.ndim == 4 and x.shape[3] > LARGEST_HEAD_DIM:
            return f"{name} has head dim {x.shape[3]}, and it takes up to {LARGEST_HEAD_DIM}"
    gates = dict(beta=beta) if log_decay is None else dict(beta=beta, log_decay=log_decay)
    for name, x in gates.items():
        if x.dtype == jnp.float64:
            return f"{name} has dtype {x.dtype}, and it computes in float32"
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
    dtype: str  # of what q, k and v become
    chunk: int  # tokens, a power of two
    heads: int  # value heads a grid step
    scale: float

    @property
    def groups(self) -> int:
        """Value heads a key head."""
        return self.value_heads // self.key_heads

    @property
    def chunks(self) -> int:
        return -(-self.time // self.chunk)

    @property
    def padded_time(self) -> int:
        return self.chunks * self.chunk

    @property
    def key_width(self) -> int:
        return padded_dim(self.key_dim)

    @property
    def value_width(self) -> int:
        return padded_dim(self.value_dim)

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


def plan(q, k, v, per_channel: bool, scale: float, chunk_size: int | None) -> Plan:
    """q, k [B,T,H,K], v [B,T,HV,V]."""
    (batch, time, key_heads, key_dim), (value_heads, value_dim) = q.shape, v.shape[2:]
    dtype = jnp.dtype(jnp.float32) if key_dim < LEAST_HALF_DIM else jnp.result_type(q, k, v)
    table = block_sizes.PALLAS_TPU
    chunk, most = table.get(dispatch.device()[1], table["other"])["channel" if per_channel else "head"]
    chunk = min(max(CHUNKS[0], power_of_two(min(chunk_size or chunk, time))), CHUNKS[1])
    # The table is for states of up to 128 x 128 beside bfloat16: what is larger takes fewer heads for as much work.
    size = max(1, padded_dim(key_dim) * padded_dim(value_dim) // LANES**2) * (dtype.itemsize // 2)
    heads = heads_a_step(value_heads, value_heads // key_heads, max(1, most // size))
    dims = (batch, time, key_heads, value_heads, key_dim, value_dim)
    return Plan(*dims, per_channel, dtype.name, chunk, heads, scale)


def by_head(x: jax.Array, p: Plan, width: int, dtype) -> jax.Array:
    """[B, T, heads, D] -> [B, heads, padded T, width], zeros at the end of both."""
    padding = ((0, 0), (0, p.padded_time - p.time), (0, 0), (0, width - x.shape[3]))
    return jnp.pad(x.astype(dtype), padding).swapaxes(1, 2)


def by_time(x: jax.Array, p: Plan, dim: int) -> jax.Array:
    """The inverse of by_head."""
    return x.swapaxes(1, 2)[:, : p.time, :, :dim]


def to_readers(q: jax.Array, k: jax.Array, p: Plan) -> jax.Array:
    """Of each chunk q and, below it, k: [B, H, chunks, 2C, padded K]."""
    q, k = (by_head(x, p, p.key_width, p.dtype) for x in (q, k))
    q, k = (x.reshape(p.batch, p.key_heads, p.chunks, p.chunk, p.key_width) for x in (q, k))
    return jnp.concatenate([q, k], axis=3)


def from_readers(x: jax.Array, p: Plan) -> list[jax.Array]:
    """Gradients [B, H * parts, chunks, 2C, padded K] -> those of q and of k, [B, T, H, K]."""
    x = x.reshape(p.batch, p.key_heads, p.parts, p.chunks, 2, p.chunk, p.key_width)
    x = jnp.sum(x, axis=2) if p.parts > 1 else x[:, :, 0]
    halves = (x[:, :, :, n].reshape(p.batch, p.key_heads, p.padded_time, p.key_width) for n in range(2))
    return [by_time(half, p, p.key_dim) for half in halves]


def pad_time(x: jax.Array, p: Plan) -> jax.Array:
    """[B, T, ...] -> [B, padded T, ...] with zeros: β = 0 writes nothing, and a log decay of 0 keeps everything."""
    return jnp.pad(x, ((0, 0), (0, p.padded_time - p.time)) + ((0, 0),) * (x.ndim - 2))


def to_rows(kinds: list[jax.Array], p: Plan) -> jax.Array:
    """Numbers a token and head, each [B, HV, padded T] -> [B, steps, chunks, R, C]: row i * heads + h is kind i's."""
    by_step = [x.reshape(p.batch, p.steps, p.heads, p.chunks, p.chunk) for x in kinds]
    rows = jnp.concatenate(by_step, axis=2).swapaxes(2, 3)
    return jnp.pad(rows, ((0, 0),) * 3 + ((0, -rows.shape[3] % SUBLANES), (0, 0)))


def from_rows(rows: jax.Array, p: Plan, count: int) -> list[jax.Array]:
    """The inverse of to_rows, but as [B, T, HV], for `count` kinds."""
    rows = rows[:, :, :, : count * p.heads].reshape(p.batch, p.steps, p.chunks, count, p.heads, p.chunk)
    rows = rows.transpose(3, 0, 2, 5, 1, 4).reshape(count, p.batch, p.padded_time, p.value_heads)
    return list(rows[:, :, : p.time])


def pad_state(x: jax.Array, p: Plan) -> jax.Array:
    """[B, HV, K, V] -> float32 [B, HV, padded K, padded V]."""
    padding = ((0, 0), (0, 0), (0, p.key_width - p.key_dim), (0, p.value_width - p.value_dim))
    return jnp.pad(x.astype(jnp.float32), padding)
