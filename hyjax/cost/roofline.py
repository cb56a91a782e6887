"""What an operator has to compute and to move at least: the bound that a kernel's time is measured against.

Products are counted as a chunked kernel does them, with chunks of CHUNK tokens, and bytes as one that reads each input
and writes each output once, saves float32 states at the chunks' borders, and recomputes the rest. A multiply-add is 2.
Per value head and token, with K key and V value dims, C tokens a chunk, r value heads that share q and k, and s bytes a
number of the inputs (gates and states are float32):

    linear_scan   forward 2C(K+V) + 4KV FLOP, 2sK/r + 2sV + 4 + 4KV/C bytes
                  backward 2C(3K+2V) + 8KV,   4sK/r + 3sV + 8 + 4KV/C
    delta_scan    as linear_scan with, for the overlaps, the inverse and its two products, 2C(K+K+V) + 2C² FLOP more
                  forward and twice that backward; 4 bytes more for beta, and 8 backward
    attention     per query head and token, causal: forward 2DT, backward 5DT, D = (K+V)/2; every input and output once

Per channel and token:

    diagonal_scan   forward 2 FLOP, 3s bytes; backward 3 FLOP, 5s bytes
    selective_scan  N states: forward 6N, 3s + 2sN/D + 4N/C; backward 16N, 5s + 4sN/D + 4N/C
    short_conv      W taps: forward 2W, 2s; backward 4W, 3s
"""

from __future__ import annotations

from typing import NamedTuple

from hyjax.cost.chips import Chip

CHUNK = 64


class Work(NamedTuple):
    """Of a pass over all rows, heads and tokens."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, count: float) -> Work:
        return Work(self.flops * count, self.bytes * count)

    def seconds(self, chip: Chip) -> float:
        """The least time on a chip: of its arithmetic or of its memory, whichever takes longer."""
        return max(self.flops / chip.flops, self.bytes / chip.bandwidth)


class Passes(NamedTuple):
    forward: Work
    backward: Work


def linear_scan(
    tokens: int, heads: int, key_dim: int, value_dim: int, *, shared: float = 1, itemsize: int = 2,
    per_channel: bool = False,
) -> Passes:  # fmt: skip
    """`tokens` of all rows, `heads` of values; `shared`: value heads a key head; `itemsize`: bytes of q, k and v."""
    k, v, c, s, gate = key_dim, value_dim, CHUNK, itemsize, 4 * (key_dim if per_channel else 1)
    forward = Work(2 * c * (k + v) + 4 * k * v, 2 * s * k / shared + 2 * s * v + gate + 4 * k * v / c)
    backward = Work(2 * c * (3 * k + 2 * v) + 8 * k * v, 4 * s * k / shared + 3 * s * v + 2 * gate + 4 * k * v / c)
    return Passes(forward.times(tokens * heads), backward.times(tokens * heads))


def delta_scan(
    tokens: int, heads: int, key_dim: int, value_dim: int, *, shared: float = 1, itemsize: int = 2,
    per_channel: bool = False, gated: bool = True,
) -> Passes:  # fmt: skip
    """As linear_scan; without a gate its bytes are not counted."""
    scan = linear_scan(tokens, heads, key_dim, value_dim, shared=shared, itemsize=itemsize, per_channel=per_channel)
    gate = 0 if gated else -4
    more = 2 * CHUNK * (2 * key_dim + value_dim) + 2 * CHUNK**2
    forward = scan.forward + Work(more, 4 + gate).times(tokens * heads)
    return Passes(forward, scan.backward + Work(2 * more, 8 + 2 * gate).times(tokens * heads))


def attention(
    rows: int, length: int, heads: int, kv_heads: int, key_dim: int, value_dim: int, *, itemsize: int = 2
) -> Passes:
    """Causal, over whole rows of `length` tokens."""
    products = heads * rows * length * length * (key_dim + value_dim) / 2
    queries, keys = (rows * length * n * (key_dim + value_dim) * itemsize for n in (heads, kv_heads))
    lse = 4 * rows * length * heads
    return Passes(Work(2 * products, queries + keys + lse), Work(5 * products, 2 * queries + 2 * keys + 2 * lse))


def diagonal_scan(tokens: int, channels: int, *, itemsize: int = 2) -> Passes:
    s = itemsize
    return Passes(Work(2, 3 * s).times(tokens * channels), Work(3, 5 * s).times(tokens * channels))


def selective_scan(tokens: int, channels: int, states: int, *, itemsize: int = 2) -> Passes:
    s, saved = itemsize, 4 * states / CHUNK
    forward = Work(6 * states, 3 * s + 2 * s * states / channels + saved)
    backward = Work(16 * states, 5 * s + 4 * s * states / channels + saved)
    return Passes(forward.times(tokens * channels), backward.times(tokens * channels))


def short_conv(tokens: int, channels: int, taps: int, *, itemsize: int = 2) -> Passes:
    s = itemsize
    return Passes(Work(2 * taps, 2 * s).times(tokens * channels), Work(4 * taps, 3 * s).times(tokens * channels))
