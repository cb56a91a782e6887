"""What surrounds the GPU kernels of attention: what they take, their sizes, and which blocks of a row meet.

Arrays stay [B, T, heads, dim], as the copy engine takes blocks out of them with their strides; time is padded to whole
blocks, and head dims, of keys and values alike, to 64 or 128.

A kernel has an outer block (of queries or of keys) and visits a contiguous run of blocks of the other side. Its table
holds where that run starts and ends, and where inside of it a run starts and ends of blocks
that are visible as a whole, which need no mask. Without segment ids the table is a constant.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hyjax.kernels import dispatch, varying
from hyjax.kernels.attention import block_sizes
from hyjax.kernels.gpu_plan import HOPPER

LARGEST_HEAD_DIM = 128
WARPGROUP_ROWS = 64  # of a matrix product on Hopper
CONSUMERS = 2  # warpgroups that compute; one more copies
OUTER = CONSUMERS * WARPGROUP_ROWS
# What stands for id 0, so that padding is equal to nothing.
PADDED_QUERY, PADDED_KEY = np.iinfo(np.int32).min, np.iinfo(np.int32).min + 1


def refusal(q: jax.Array, k: jax.Array, v: jax.Array, by_position: bool, interpret: bool) -> str | None:
    """Why the GPU kernels can't serve a call, or None."""
    if by_position:
        return "it goes by place in the row, and the call has q_positions and kv_positions"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes q, k, v all bfloat16 or all float16, not {q.dtype}, {k.dtype}, {v.dtype}"
    for name, x in dict(q=q, v=v).items():
        if x.shape[3] > LARGEST_HEAD_DIM:
            return f"{name} has head dim {x.shape[3]}, and it takes up to {LARGEST_HEAD_DIM}"
    kind = dispatch.device()[1]
    if not interpret and not any(name in kind for name in HOPPER):
        return f"it is written for {', '.join(HOPPER)} and not for {kind}"
    if interpret and varying.axes(q):
        return "JAX's GPU interpreter runs on one device at a time, and the call is inside shard_map"
    return None


class Tiles(NamedTuple):
    """Of one kernel: what it visits in one step, and how many steps' copies are in flight."""

    inner: int
    stages: int


class Plan(NamedTuple):
    """Sizes of a call, all static."""

    causal: bool
    window: int | None
    packed: bool  # with segment ids
    batch: int
    heads: int  # of keys
    groups: int  # query heads a key head
    q_len: int
    kv_len: int
    key_dim: int
    value_dim: int
    forward: Tiles
    dq: Tiles
    dkv: Tiles

    @property
    def dim(self) -> int:
        return _padded_dim(self.key_dim, self.value_dim)

    @property
    def q_padded(self) -> int:
        return _padded(self.q_len, self.dkv.inner)

    @property
    def kv_padded(self) -> int:
        return _padded(self.kv_len, self.forward.inner, self.dq.inner)

    @property
    def offset(self) -> int:
        """Place in time of the first query, the first key's being 0."""
        return self.kv_len - self.q_len

    @property
    def ragged_keys(self) -> bool:
        """Whether padded keys need a mask of their own: causality and ids hide them anyway."""
        return self.kv_len != self.kv_padded and not self.causal and not self.packed

    @property
    def masks(self) -> bool:
        """Whether any block needs a mask."""
        return self.causal or self.packed or self.ragged_keys


def _padded_dim(*dims: int) -> int:
    return 64 if max(dims) <= 64 else LARGEST_HEAD_DIM


def _padded(length: int, *blocks: int) -> int:
    whole = int(np.lcm.reduce([OUTER, *blocks]))
    return -(-length // whole) * whole


def plan(q_shape, k_shape, v_shape, options, packed: bool) -> Plan:
    """q [B,Tq,Hq,K], k [B,Tk,Hk,K], v [B,Tk,Hk,V]; options: xla.Options."""
    batch, q_len, q_heads, key_dim = q_shape
    kv_len, heads, value_dim = k_shape[1], k_shape[2], v_shape[3]
    sizes = block_sizes.PALLAS_GPU[_padded_dim(key_dim, value_dim)]
    shape = (batch, heads, q_heads // heads, q_len, kv_len, key_dim, value_dim)
    return Plan(options.causal, options.window, packed, *shape, *(Tiles(*s) for s in sizes))


def pad_rows(x: jax.Array, p: Plan) -> jax.Array:
    """[B, Tq, Hq, K or V] -> [B, padded, Hq, dim]."""
    return jnp.pad(x, ((0, 0), (0, p.q_padded - p.q_len), (0, 0), (0, p.dim - x.shape[3])))


def pad_keys(x: jax.Array, p: Plan) -> jax.Array:
    """[B, Tk, Hk, K or V] -> [B, padded, Hk, dim]."""
    return jnp.pad(x, ((0, 0), (0, p.kv_padded - p.kv_len), (0, 0), (0, p.dim - x.shape[3])))


def pad_row_values(x: jax.Array, p: Plan, fill: float) -> jax.Array:
    """One number a query [B, Hk, G, Tq] -> [B, Hq, padded]."""
    x = x.reshape(p.batch, p.heads * p.groups, p.q_len)
    return jnp.pad(x, ((0, 0), (0, 0), (0, p.q_padded - p.q_len)), constant_values=fill)


def pad_ids(p: Plan, q_ids: jax.Array | None, kv_ids: jax.Array | None) -> tuple[jax.Array, jax.Array] | None:
    """[B, Tq] and [B, Tk] -> padded in time, padding as PADDED_QUERY and PADDED_KEY."""
    if q_ids is None or kv_ids is None:
        return None
    return _pad_ids(q_ids, p.q_padded, PADDED_QUERY), _pad_ids(kv_ids, p.kv_padded, PADDED_KEY)


def _pad_ids(ids, length, padding):
    ids = jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, length - ids.shape[1])))
    return jnp.where(ids == 0, padding, ids)


class Visits(NamedTuple):
    table: np.ndarray | jax.Array  # int32 [B or 1, outer blocks, 4]
    total: int  # of a row of the batch and a head, as far as is known before ids are


def by_query(p: Plan, keys: int, ids) -> Visits:
    """Of a kernel whose outer blocks are OUTER queries, and which visits blocks of `keys` keys."""
    return Visits(_runs(*_meeting(p, OUTER, keys, ids)), int(_meeting(p, OUTER, keys, None)[0].sum()))


def by_key(p: Plan, rows: int, ids) -> Visits:
    """Of a kernel whose outer blocks are OUTER keys, and which visits blocks of `rows` queries."""
    table = _runs(*(x.swapaxes(1, 2) for x in _meeting(p, rows, OUTER, ids)))
    return Visits(table, int(_meeting(p, rows, OUTER, None)[0].sum()))


def _meeting(p: Plan, rows: int, keys: int, ids):
    """Two bool [B or 1, q blocks, kv blocks]: whether some query may see some key, and whether each may see each."""
    q_first = np.arange(0, p.q_padded, rows)[:, None] + p.offset
    q_last = np.minimum(q_first + rows, p.kv_len) - 1  # kv_len is where queries end
    k_first = np.arange(0, p.kv_padded, keys)[None]
    k_last = np.minimum(k_first + keys, p.kv_len) - 1
    meet = (q_last >= q_first) & (k_last >= k_first)
    whole = meet & (k_first + keys <= p.kv_len)
    if p.causal:
        meet = meet & (q_last >= k_first)
        whole = whole & (q_first >= k_last)
    if p.window is not None:
        meet = meet & (k_last > q_first - p.window)
        whole = whole & (k_first > q_last - p.window)
    meet, whole = meet[None], whole[None]
    if ids is None:
        return meet, whole
    (q_low, q_high), (k_low, k_high) = _id_range(ids[0], rows, PADDED_QUERY), _id_range(ids[1], keys, PADDED_KEY)
    meet = meet & (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
    q_only, k_only = _uniform(ids[0], rows), _uniform(ids[1], keys)
    one = (q_low == q_high)[:, :, None] & (k_low == k_high)[:, None] & (q_low[:, :, None] == k_low[:, None])
    return meet, whole & one & q_only[:, :, None] & k_only[:, None]


def _id_range(ids, length, padding):
    """[B, T] -> least and greatest id of each block that isn't padding; an empty range where all is."""
    ids = ids.reshape(ids.shape[0], -1, length)
    most, least = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    valid = ids != padding
    return jnp.min(jnp.where(valid, ids, most), axis=2), jnp.max(jnp.where(valid, ids, least), axis=2)


def _uniform(ids, length):
    """[B, T] -> whether each block has one id, which may be padding."""
    ids = ids.reshape(ids.shape[0], -1, length)
    return jnp.all(ids == ids[:, :, :1], axis=2)


def _runs(meet, whole):
    """[B or 1, n, m] twice -> int32 [B or 1, n, 4]: first and end of what meets, first and end of what is whole.

    Of several runs of whole blocks the last is taken: masking a whole block does no harm.
    """
    xp = np if isinstance(meet, np.ndarray) else jnp
    place = np.arange(meet.shape[2])
    first = xp.where(meet.any(2), meet.argmax(2), 0)
    end = xp.where(meet, place + 1, 0).max(2)
    whole_end = xp.where(whole, place + 1, 0).max(2)
    whole_first = xp.where(~whole & (place < whole_end[:, :, None]), place + 1, 0).max(2)
    return xp.stack([first, end, whole_first, whole_end], axis=2).astype(np.int32)
