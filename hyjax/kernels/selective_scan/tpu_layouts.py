"""How the TPU kernels of selective_scan want their arrays: see tpu_plan.py for S, registers and columns."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from hyjax.kernels.selective_scan.tpu_plan import ROWS, SUBLANES, Plan

LOG2_E = math.log2(math.e)
# RESET · LEAST is -1e4, and 2 to this is zero. A slower decay than LEAST is none at all: 2^(Δ LEAST) rounds to 1.
RESET, LEAST = 1e38, -1e-34


def pad_tokens(x: jax.Array, p: Plan) -> jax.Array:
    """[B,T,D] with zeros behind: Δ = u = 0 leaves the state as it is."""
    return jnp.pad(x, ((0, 0), (0, p.time - x.shape[1]), (0, p.dim - x.shape[2])))


def to_registers(x: jax.Array, p: Plan) -> jax.Array:
    """[...,D,N] -> [...,S,8,D] float32, zeros behind."""
    x = jnp.swapaxes(x.astype(jnp.float32), -1, -2)
    padding = ((0, 0),) * (x.ndim - 2) + ((0, p.states - x.shape[-2]), (0, p.dim - x.shape[-1]))
    return jnp.pad(x, padding).reshape(*x.shape[:-2], p.registers, SUBLANES, p.dim)


def from_registers(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The inverse of to_registers, for A's shape (D, N)."""
    x = jnp.swapaxes(x.reshape(*x.shape[:-3], -1, x.shape[-1]), -1, -2)
    return x[..., : shape[0], : shape[1]]


def rate(A: jax.Array, p: Plan) -> jax.Array:
    """A log2 e, so that a decay is 2^(Δ rate)."""
    return jnp.minimum(to_registers(A, p) * LOG2_E, LEAST)


def skip(D: jax.Array, p: Plan) -> jax.Array:
    """[D] -> [1, p.dim]."""
    return jnp.pad(D.astype(jnp.float32), (0, p.dim - D.shape[0]))[None]


def columns(p: Plan, arrays: Sequence[jax.Array], starts: jax.Array | None) -> jax.Array:
    """B, or B and C, [B,T,N], and the resets where documents start -> [B,8R,p.time], R registers a token."""
    parts = [_pad_states(x.astype(jnp.float32), p) for x in arrays]
    if starts is not None:
        resets = jnp.pad(jnp.where(starts, RESET, 0.0), ((0, 0), (0, p.time - starts.shape[1])))
        parts.append(jnp.repeat(resets[..., None], SUBLANES, axis=2))
    return jnp.swapaxes(jnp.concatenate(parts, axis=2), 1, 2)


def rows(p: Plan, x: jax.Array, dtype) -> jax.Array:
    """[B,T,N] -> [B,p.time,16*8S]: token t has its numbers at place t % 16 of sixteen, and zeros at the others."""
    return jnp.where(_own(p), jnp.tile(_pad_states(x.astype(dtype), p), ROWS), 0)


def from_rows(sums: jax.Array, p: Plan) -> jax.Array:
    """[B,outer,p.time,16*8S] -> what a token has at its own place, summed over `outer`: [B,p.time,8S]."""
    fold = jnp.tile(jnp.eye(p.states), (ROWS, 1))
    return jnp.matmul(jnp.where(_own(p), jnp.sum(sums, axis=1), 0), fold, precision=jax.lax.Precision.HIGHEST)


def _own(p: Plan) -> jax.Array:
    """[p.time,16*8S] bool."""
    return jnp.arange(p.time)[:, None] % ROWS == jnp.arange(ROWS * p.states) // p.states


def _pad_states(x: jax.Array, p: Plan) -> jax.Array:
    """[B,T,N] -> [B,p.time,8S], zeros behind."""
    return jnp.pad(x, ((0, 0), (0, p.time - x.shape[1]), (0, p.states - x.shape[2])))
