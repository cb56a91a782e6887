"""Softmax attention: causal, grouped, with rotary, learned or no positions; full or over a sliding window."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.config.errors import divisors_near
from hyjax.models.cache import KVCache, WindowCache
from hyjax.models.context import Context
from hyjax.models.layers import dense, rope, split_heads
from hyjax.models.mixers.base import Cost, Key, Mixer, check_heads
from hyjax.parallel.sharded import attention


class Attention(Mixer):
    """Attention over the whole document.

    Attributes:
      width: D, the residual stream.
      heads, kv_heads, head_dim: query heads; key and value heads (0: as many); dims a head (0: D / heads).
      position: "rope" rotates queries and keys; anything else leaves positions to the embedding.
      rope_theta, rope_fraction: the base of the frequencies; the part of each head that turns.
      qk_norm: RMSNorm of queries and keys over a head's dims, one scale for all heads, before RoPE.
      gated: the heads' output is multiplied by sigmoid of a projection of the input.
    """

    kind: ClassVar[str] = "attention"

    width: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    position: str = "rope"
    rope_theta: float = 10000.0
    rope_fraction: float = 1.0
    qk_norm: bool = False
    gated: bool = False
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    state_dtype: Any = jnp.float32
    implementation: str = "auto"

    window: ClassVar[Any] = None  # tokens that a query sees, its own included; None: the whole document

    @property
    def dims(self) -> tuple[int, int, int]:
        """Query heads, key and value heads, dims a head."""
        return self.heads, self.kv_heads or self.heads, self.head_dim or self.width // self.heads

    @property
    def rotated(self) -> int:
        """Dims of a head that RoPE turns, in pairs."""
        dim = self.dims[2]
        return 2 * min(round(dim * self.rope_fraction / 2), dim // 2) if self.position == "rope" else 0

    @nn.nowrap
    def check(self, key: Key) -> None:
        check_heads(self.width, self.heads, self.head_dim, key)
        heads, kv_heads, dim = self.dims
        if heads % kv_heads:
            near = divisors_near(heads, kv_heads)
            raise ValueError(f"{key('kv_heads')}={kv_heads} must divide {key('heads')}={heads}: nearest are {near}")
        if self.position == "rope" and not self.rotated:
            instead = f"use at least {2 / dim:.2g}" if dim > 1 else f"set {key('position')} to 'none'"
            raise ValueError(f"{key('rope_fraction')}={self.rope_fraction} of {dim} dims a head is no pair: {instead}")

    @nn.nowrap
    def init_state(self, batch: int, max_len: int) -> KVCache | WindowCache:
        _, kv_heads, dim = self.dims
        cache, slots = (WindowCache, min(self.window, max_len)) if self.window else (KVCache, max_len)
        return cache.zeros(batch, slots, kv_heads, dim, dim, self.state_dtype)

    @nn.nowrap
    def capacity(self, max_len: int) -> int | None:
        """How many tokens a row may hold with caches made for `max_len`; None: any number."""
        return None if self.window and self.window <= max_len else max_len

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state=None):
        """x [B,T,D] -> (y [B,T,D], state)."""
        heads, kv_heads, dim = self.dims
        q, k, v = (
            split_heads(dense(n * dim, name, self.dtype)(x), n)
            for name, n in (("query", heads), ("key", kv_heads), ("value", kv_heads))
        )
        if self.qk_norm:
            q, k = (
                nn.RMSNorm(self.norm_eps, dtype=self.dtype, name=f"{n}_norm")(a) for n, a in (("query", q), ("key", k))
            )
        if self.rotated:
            q, k = (rope(a, ctx.positions, self.rope_theta, self.rotated) for a in (q, k))
        o, state = self._attend(q, k, v, ctx, state)
        o = o.reshape(*x.shape[:2], heads * dim)
        if self.gated:
            o = o * nn.sigmoid(dense(heads * dim, "gate", self.dtype)(x))
        return dense(self.width, "out", self.dtype)(o), state

    def _attend(self, q, k, v, ctx: Context, state):
        options: dict[str, Any] = dict(window=self.window, implementation=self.implementation)
        if state is not None and q.shape[1] == 1:
            state, (k, v, times, now) = state.step(k, v, ctx)
            return attention(q, k, v, q_positions=now, kv_positions=times, **options), state
        if state is not None:
            state, (k, v, times, documents) = state.extend(k, v, ctx)
            options |= dict(q_positions=ctx.time, kv_positions=times, kv_segment_ids=documents)
        elif ctx.segment_ids is not None:
            options |= dict(kv_segment_ids=ctx.segment_ids)
            if self.window and not ctx.contiguous:  # padding inside a document does not widen its tokens' distances
                options |= dict(q_positions=ctx.time, kv_positions=ctx.time)
        return attention(q, k, v, segment_ids=ctx.segment_ids, **options), state

    @nn.nowrap
    def logical_axes(self) -> dict[str, tuple]:
        axes: dict[str, tuple] = {f"{n}/kernel": ("embed", "heads") for n in ("query", "key", "value")}
        axes["out/kernel"] = ("heads", "embed")
        if self.qk_norm:
            axes |= {"query_norm/scale": ("head_dim",), "key_norm/scale": ("head_dim",)}
        return axes | ({"gate/kernel": ("embed", "heads")} if self.gated else {})

    @nn.nowrap
    def cost(self, seq_len: int) -> Cost:
        heads, kv_heads, dim = self.dims
        projections = 2 * self.width * dim * ((2 + self.gated) * heads + 2 * kv_heads)
        seen = _mean_seen(seq_len, self.window)
        return Cost(projections=projections, mixing=4 * heads * dim * seen)


class WindowAttention(Attention):
    """Attention over the last `window` tokens of the document, the query's own included."""

    window: int = 128  # type: ignore[misc]


def _mean_seen(seq_len: int, window: int | None) -> float:
    """Keys that a token of a causal row sees on average: half the context, or the window once it is full.

    The average of t / 1 over the row is taken as seq_len / 2 (DESIGN's convention: the own token's half is
    left out); with a window W < seq_len it is W − W² / (2·seq_len).
    """
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window * window / (2 * seq_len)
