"""What surrounds the TPU kernels of attention: sizes, layouts, and which blocks of keys a block of queries visits.

A block of queries holds all G query heads of one key head, so that these share a copy of its keys and values: R = G·P
rows, P places in time, head by head (row r is head r // P at the block's place r % P). Time is padded to whole blocks,
head dims to 64 or a multiple of 128.

Each block of queries visits a contiguous run of key blocks, told by two tables (first, length) that the kernel gets
before it starts: a grid step past the run points at the run's last block again, so that it copies nothing, and
computes nothing. Without segment ids the tables are constants; with them they come from each block's range of ids.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hyjax.kernels import dispatch
from hyjax.kernels.attention import block_sizes
from hyjax.kernels.tpu_sizes import LANES, padded_dim, power_of_two

LARGEST_HEAD_DIM = 512
MOST_ROWS = 2048  # R: more make a program that takes minutes to compile
# What stands for id 0, so that padding is equal to nothing.
PADDED_QUERY, PADDED_KEY = np.iinfo(np.int32).min, np.iinfo(np.int32).min + 1


def refusal(q: jax.Array, k: jax.Array, v: jax.Array, by_position: bool) -> str | None:
    """Why the TPU kernels can't serve a call, or None."""
    if by_position:
        return "it goes by place in the row, and the call has q_positions and kv_positions"
    for name, x in dict(q=q, k=k, v=v).items():
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            return f"{name} has dtype {x.dtype}, and it takes bfloat16 and float32"
        if x.shape[3] > LARGEST_HEAD_DIM:
            return f"{name} has head dim {x.shape[3]}, and it takes up to {LARGEST_HEAD_DIM}"
    groups = q.shape[2] // k.shape[2]
    if least_places(groups) * groups > MOST_ROWS:
        return f"{groups} query heads a key head make a block of more than {MOST_ROWS} rows"
    return None


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
    places: int  # of time in a block of queries, a power of two
    keys: int  # a block
    tile_rows: int
    tile_keys: int
    stagger: tuple[int, int]  # tiles that matrix products go ahead of, and behind, the softmax

    @property
    def rows(self) -> int:
        return self.groups * self.places

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.places)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_len // self.keys)

    @property
    def padded_dims(self) -> tuple[int, int]:
        return padded_dim(self.key_dim), padded_dim(self.value_dim)

    @property
    def ragged_keys(self) -> bool:
        """Whether padded keys need a mask of their own: causality and ids hide them anyway."""
        return self.kv_len % self.keys != 0 and not self.causal and not self.packed


def least_places(groups: int) -> int:
    """R has to be a multiple of the 128 lanes that a vector register has."""
    return LANES // int(np.gcd(groups, LANES))


def plan(q_shape, k_shape, v_shape, causal: bool, window: int | None, packed: bool) -> Plan:
    """q [B,Tq,Hq,K], k [B,Tk,Hk,K], v [B,Tk,Hk,V]."""
    batch, q_len, q_heads, key_dim = q_shape
    kv_len, heads = k_shape[1:3]
    groups = q_heads // heads
    table = block_sizes.PALLAS_TPU
    most_rows, most_keys, tile_rows, tile_keys, ahead, behind = table.get(dispatch.device()[1], table["other"])
    places = max(least_places(groups), min(power_of_two(most_rows // groups + 1) // 2, power_of_two(q_len)))
    keys = min(most_keys, max(LANES, power_of_two(kv_len)))
    tile_rows = tile_rows if groups * places % tile_rows == 0 else LANES
    shape = (batch, heads, groups, q_len, kv_len, key_dim, v_shape[3])
    return Plan(causal, window, packed, *shape, places, keys, tile_rows, min(tile_keys, keys), (ahead, behind))


def _pad(x: jax.Array, **lengths: int) -> jax.Array:
    """Zeros at the end of axes 1 ("time") and -1 ("dim") up to these lengths."""
    pad = [(0, 0)] * x.ndim
    for name, length in lengths.items():
        axis = dict(time=1, dim=x.ndim - 1)[name]
        pad[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, pad)


def to_rows(x: jax.Array, p: Plan, dim: int) -> jax.Array:
    """[B, Tq, Hk*G, D] -> [B, Hk, blocks*R, dim]."""
    x = _pad(x, time=p.q_blocks * p.places, dim=dim)
    x = x.reshape(p.batch, p.q_blocks, p.places, p.heads, p.groups, dim).transpose(0, 3, 1, 4, 2, 5)
    return x.reshape(p.batch, p.heads, p.q_blocks * p.rows, dim)


def from_columns(x: jax.Array, p: Plan, dim: int) -> jax.Array:
    """[B, Hk, D, blocks*R] -> [B, Tq, Hk*G, dim]."""
    x = x.reshape(p.batch, p.heads, -1, p.q_blocks, p.groups, p.places)[:, :, :dim].transpose(0, 3, 5, 1, 4, 2)
    return x.reshape(p.batch, -1, p.heads * p.groups, dim)[:, : p.q_len]


def to_row_values(x: jax.Array, p: Plan, fill: float) -> jax.Array:
    """One number a query [B, Hk, G, Tq] -> [B, Hk, blocks, 1, R]."""
    padding = ((0, 0),) * 3 + ((0, p.q_blocks * p.places - p.q_len),)
    x = jnp.pad(x, padding, constant_values=fill)
    x = x.reshape(p.batch, p.heads, p.groups, p.q_blocks, p.places).swapaxes(2, 3)
    return x.reshape(p.batch, p.heads, p.q_blocks, 1, p.rows)


def from_row_values(x: jax.Array, p: Plan) -> jax.Array:
    """[B, Hk, blocks, 1, R] -> [B, Hk, G, Tq]."""
    x = x.reshape(p.batch, p.heads, p.q_blocks, p.groups, p.places).swapaxes(2, 3)
    return x.reshape(p.batch, p.heads, p.groups, -1)[..., : p.q_len]


def to_keys(x: jax.Array, p: Plan, dim: int, transposed: bool = False) -> jax.Array:
    """[B, Tk, Hk, D] -> [B, Hk, blocks*keys, dim], or [B, Hk, dim, blocks*keys]."""
    x = _pad(x, time=p.kv_blocks * p.keys, dim=dim)
    return x.transpose((0, 2, 3, 1) if transposed else (0, 2, 1, 3))


def from_keys(x: jax.Array, p: Plan, dim: int) -> jax.Array:
    """[B, Hk, blocks*keys, D] -> [B, Tk, Hk, dim]."""
    return x[:, :, : p.kv_len, :dim].swapaxes(1, 2)


def row_ids(ids: jax.Array, p: Plan) -> jax.Array:
    """[B, Tq] -> [B, blocks, 1, R], padding as PADDED_QUERY."""
    ids = _padded_ids(ids, p.q_blocks * p.places, PADDED_QUERY)
    ids = jnp.broadcast_to(ids.reshape(p.batch, p.q_blocks, 1, p.places), (p.batch, p.q_blocks, p.groups, p.places))
    return ids.reshape(p.batch, p.q_blocks, 1, p.rows)


def key_ids(ids: jax.Array, p: Plan) -> jax.Array:
    """[B, Tk] -> [B, blocks, 1, keys], padding as PADDED_KEY."""
    return _padded_ids(ids, p.kv_blocks * p.keys, PADDED_KEY).reshape(p.batch, p.kv_blocks, 1, p.keys)


def _padded_ids(ids, length, padding):
    ids = _pad(ids.astype(jnp.int32), time=length)
    return jnp.where(ids == 0, padding, ids)


class Visits(NamedTuple):
    """For each outer block, the run of blocks of the other side that it visits: int32 [rows of ids * blocks]."""

    first: jax.Array | np.ndarray
    length: jax.Array | np.ndarray
    steps: int  # the longest run, as far as is known before ids are
    total: int  # all visits of a row of the batch and a head, likewise


class Packing(NamedTuple):
    """What the kernels get of segment ids, and which blocks meet by them and by place."""

    ids: tuple[jax.Array, jax.Array] | None  # [B, q blocks, 1, R] and [B, kv blocks, 1, keys]
    uniform: tuple[jax.Array, jax.Array] | None  # [B * blocks], the id of a block that has but one, else padding
    by_query: Visits
    by_key: Visits


def packing(p: Plan, q_ids: jax.Array | None, kv_ids: jax.Array | None) -> Packing:
    """From ids [B, Tq] and [B, Tk], or None."""
    static = static_meeting(p)
    if q_ids is None or kv_ids is None:
        return Packing(None, None, _runs(static[None], static), _runs(static.T[None], static.T))
    ids = (row_ids(q_ids, p), key_ids(kv_ids, p))
    (q_low, q_high), (k_low, k_high) = _id_range(ids[0], PADDED_QUERY), _id_range(ids[1], PADDED_KEY)
    meet = (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None]) & static
    uniform = _uniform(ids[0], PADDED_QUERY), _uniform(ids[1], PADDED_KEY)
    return Packing(ids, uniform, _runs(meet, static), _runs(meet.swapaxes(1, 2), static.T))


def ahead(p: Plan, i, j):
    """Time of the first query of block i less that of the first key of block j."""
    return i * p.places + (p.kv_len - p.q_len) - j * p.keys


def static_meeting(p: Plan) -> np.ndarray:
    """[q blocks, kv blocks] bool: whether some query may see some key, by place in time alone."""
    first = ahead(p, np.arange(p.q_blocks)[:, None], np.arange(p.kv_blocks)[None])
    meet = np.ones(first.shape, bool)
    if p.causal:
        # The last block of queries may be padded: what lies past the end of the keys is no query.
        meet &= np.minimum(first + p.places, p.kv_len - np.arange(p.kv_blocks)[None] * p.keys) > 0
        if p.window is not None:
            meet &= first - p.window < p.keys - 1
    return meet


def partly_visible(p: Plan, ahead):
    """Whether some query of a block that meets a block of keys may not see some key, by causality or window."""
    part = ahead < p.keys - 1
    return part if p.window is None else part | (ahead + p.places - 1 >= p.window)


def partly_visible_aheads(p: Plan) -> list[int]:
    """The values of `ahead` of such blocks."""
    first = ahead(p, np.arange(p.q_blocks)[:, None], np.arange(p.kv_blocks)[None])
    return [int(x) for x in np.unique(first[static_meeting(p) & partly_visible(p, first)])]


def _id_range(ids, padding):
    """[B, blocks, 1, n] -> least and greatest id of each block that isn't padding; an empty range where all is."""
    most, least = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    valid = ids != padding
    low = jnp.min(jnp.where(valid, ids, most), axis=(2, 3))
    return low, jnp.max(jnp.where(valid, ids, least), axis=(2, 3))


def _uniform(ids, padding):
    first = ids[:, :, 0, 0]
    return jnp.where(jnp.all(ids == first[:, :, None, None], axis=(2, 3)), first, padding).reshape(-1)


def _run(meet):
    """[..., n] bool -> the first True and one past the last, 0 and 0 where there is none."""
    xp = np if isinstance(meet, np.ndarray) else jnp
    some = meet.any(-1)
    return xp.where(some, meet.argmax(-1), 0), xp.where(some, meet.shape[-1] - meet[..., ::-1].argmax(-1), 0)


def _runs(meet, static: np.ndarray) -> Visits:
    """meet [rows, n, m], static [n, m]."""
    first, end = _run(meet)
    longest = np.subtract(*_run(static)[::-1]).max()
    table = lambda x: x.astype(np.int32).reshape(-1)
    return Visits(table(first), table(end - first), max(1, int(longest)), int(static.sum()))
