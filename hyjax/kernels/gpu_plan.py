"""What surrounds the GPU kernels of linear_scan and delta_scan: sizes, padding, and the gates' cumulative sums.

Inside a chunk of C = 64 tokens, with d_t = e^{g_t}, hyjax.kernels.chunks defines D_ij = Π_{j<s<=i} d_s,
a_i = Π_{s<=i} d_s and b_j = Π_{s>j} d_s. A kernel makes D from differences of cumulative sums, and these are exact for
gates of any size: a gate below -88 (e^-88 is no normal float32) is a reset, kept by a mask, and any other is split
g = hi + lo, hi a multiple of 2^-9 and lo, at most 2^-10, one of 2^-28. A chunk's sums of hi are below 2^13 and those of
lo at most 2^-4, so float32's 24 bits hold them; what lo is rounded by, 2^-29 a token, changes D by 1e-7 at most. So

    D_ij = e^{(hi_i − hi_j) + (lo_i − lo_j)} for first_i <= j <= i, else 0,

hi_i and lo_i being the sums up to i, and first_i the last reset at or before i, a place in the chunk. What stands
before a reset changes not a bit of what comes after it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.kernels import dispatch, varying

HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # as found in device kinds
CHUNK = 64  # tokens: the rows of a wgmma instruction
LARGEST_HEAD_DIM = 128
VALUE_BLOCK = 64  # channels of values, and of the state, that a program walks with
RESET = -88.0
HI, LO, FIRST, UPTO, AFTER, BETA = range(6)  # rows of `gate_rows`


class Plan(NamedTuple):
    """Sizes of a call, all static."""

    batch: int
    time: int
    heads: int  # of keys
    groups: int  # value heads a key head
    key_dim: int
    value_dim: int
    stages: int  # chunks whose inputs are in shared memory or on their way there

    @property
    def value_heads(self) -> int:
        return self.heads * self.groups

    @property
    def chunks(self) -> int:
        return -(-self.time // CHUNK)

    @property
    def padded_time(self) -> int:
        return self.chunks * CHUNK

    @property
    def padded_dims(self) -> tuple[int, int]:
        return _padded_dim(self.key_dim), _padded_dim(self.value_dim)


def _padded_dim(dim: int) -> int:
    return 64 if dim <= 64 else 128


def plan(q_shape, v_shape, stages: int) -> Plan:
    """q [B,T,H,K], v [B,T,HV,V]."""
    batch, time, heads, key_dim = q_shape
    stages = min(stages, -(-time // CHUNK))
    return Plan(batch, time, heads, v_shape[2] // heads, key_dim, v_shape[3], stages)


def refusal(q, k, v, log_decay, chunk_size: int | None, interpret) -> str | None:
    """Why the GPU kernels can't serve a call, or None."""
    for name, x in dict(q=q, k=k, v=v).items():
        if x.dtype != jnp.bfloat16:
            return f"{name} has dtype {x.dtype}, and it takes bfloat16 (tensor cores have no float32)"
        if x.shape[3] > LARGEST_HEAD_DIM:
            return f"{name} has head dim {x.shape[3]}, and it takes up to {LARGEST_HEAD_DIM}"
    if log_decay is not None and log_decay.ndim == 4:
        return "there is a gate for each key channel, and it takes one a head"
    if log_decay is not None and log_decay.dtype == jnp.float64:
        return "log_decay has dtype float64, and it computes in float32"
    if chunk_size is not None and not CHUNK // 2 < chunk_size <= CHUNK:
        return f"chunk_size is {chunk_size}, and its chunks have {CHUNK} tokens"
    kind = dispatch.device()[1]
    if not interpret and not any(name in kind for name in HOPPER):
        return f"it is written for {', '.join(HOPPER)} and not for {kind}"
    if interpret and varying.axes(q):
        return "JAX's interpreter doesn't run under shard_map with check_vma=True"
    return None


def fit(x: jax.Array, p: Plan, dim: int | None = None) -> jax.Array:
    """[B, T, H] or [B, T, H, X] in bfloat16 or as it is, with zeros up to whole chunks and to `dim` channels."""
    widths = [(0, 0), (0, p.padded_time - x.shape[1]), (0, 0)]
    if dim is not None:
        widths.append((0, dim - x.shape[3]))
        x = x.astype(jnp.bfloat16)
    return jnp.pad(x, widths) if any(after for _, after in widths) else x


def fit_state(state: jax.Array, p: Plan) -> jax.Array:
    """[B, HV, K, V] in float32, with zeros up to the padded head dims."""
    key_dim, value_dim = p.padded_dims
    return jnp.pad(state.astype(jnp.float32), ((0, 0), (0, 0), (0, key_dim - p.key_dim), (0, value_dim - p.value_dim)))


def by_chunk(x: jax.Array) -> jax.Array:
    """[B, T, HV] -> [B, HV, n, C]."""
    batch, time, heads = x.shape
    return x.transpose(0, 2, 1).reshape(batch, heads, time // CHUNK, CHUNK)


def by_time(x: jax.Array) -> jax.Array:
    """[B, HV, n, C] -> [B, T, HV]."""
    return x.reshape(*x.shape[:2], -1).transpose(0, 2, 1)


def gate_rows(log_decay: jax.Array, p: Plan, beta: jax.Array | None = None) -> jax.Array:
    """log_decay and beta [B, T, HV] -> [B, HV, n, 5 or 6, C]: of each chunk hi, lo, first, a, b and β."""
    g = by_chunk(fit(log_decay.astype(jnp.float32), p))
    reset = g < RESET
    g = jnp.where(reset, 0, g)
    coarse = jnp.round(g * 2.0**9) / 2.0**9
    fine = jnp.round((g - coarse) * 2.0**28) / 2.0**28
    hi, lo = jnp.cumsum(coarse, -1), jnp.cumsum(fine, -1)
    place = lax.broadcasted_iota(jnp.int32, g.shape, 3)
    last = lax.cummax(jnp.where(reset, place, -1), axis=3)
    upto = jnp.where(last < 0, jnp.exp(hi + lo), 0)
    after = jnp.where(place >= last[..., -1:], jnp.exp((hi[..., -1:] - hi) + (lo[..., -1:] - lo)), 0)
    rows = [hi, lo, jnp.maximum(last, 0).astype(jnp.float32), upto, after]
    if beta is not None:
        rows.append(by_chunk(fit(beta.astype(jnp.float32), p)))
    return jnp.stack(rows, axis=3)


def pair_decays(rows: jax.Array) -> jax.Array:
    """D [B, HV, n, C, C] from gate_rows, for what is computed outside of the kernels."""
    hi, lo, first = (rows[..., i, :] for i in (HI, LO, FIRST))
    exponent = (hi[..., :, None] - hi[..., None, :]) + (lo[..., :, None] - lo[..., None, :])
    i, j = (lax.broadcasted_iota(jnp.int32, exponent.shape, axis) for axis in (3, 4))
    alive = (j <= i) & (j >= first[..., :, None].astype(jnp.int32))
    return jnp.where(alive, jnp.exp(jnp.where(alive, exponent, 0)), 0)


def gate_gradient(rows: jax.Array, grad_rows: jax.Array, through: jax.Array, p: Plan) -> jax.Array:
    """d(log_decay) [B, T, HV] of what crosses each token.

    Args:
      grad_rows: [B, HV, n, 3, C]: of token t the sum over the chunk's pairs i >= t > j, and what row t has to do with
        the chunk's entry state (to be summed over i >= t) and with its exit state (over j < t).
      through: [B, HV, n, K], Σ_v S ∘ dS'.
    """
    pairs, entering, leaving = (grad_rows[..., i, :] for i in range(3))
    ones = jnp.ones((CHUNK, CHUNK), jnp.float32)
    total = lambda x, which: jnp.einsum("...j,tj->...t", x, which, precision=lax.Precision.HIGHEST)
    crossing = rows[..., UPTO, -1:] * jnp.sum(through, -1, keepdims=True)
    dg = pairs + total(entering, jnp.triu(ones)) + total(leaving, jnp.tril(ones, -1)) + crossing
    return by_time(dg)[:, : p.time]


def sum_groups(x: jax.Array, p: Plan) -> jax.Array:
    """Gradients [B, T, HV, X] of a key head's copies, fitted -> [B, T, H, key_dim] in float32."""
    x = x[:, : p.time, :, : p.key_dim].astype(jnp.float32)
    return x.reshape(p.batch, p.time, p.heads, p.groups, p.key_dim).sum(3)
