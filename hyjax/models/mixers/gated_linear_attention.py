"""Scalar-gated linear attention: S ← e^g S + k vᵀ, o = K^(−1/2) Sᵀ q, one gate g ≤ 0 a head and token.

The recurrence is simple GLA (Yang et al. 2024 with a scalar gate; Dao & Gu 2024 without its discretisation):
a state of fixed size, whatever the length of the document.
"""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.models.cache import RecurrentState
from hyjax.models.context import Context
from hyjax.models.layers import Dense, ShortConv, dense, split_heads
from hyjax.models.mixers.base import Cost, Key, Mixer, check_heads
from hyjax.parallel.sharded import linear_scan

MOST_TAPS = 128  # of the short convolution, whose program has a product for each; the field uses 2 to 4


class GatedLinearAttention(Mixer):
    """Linear attention with a learned forget gate, g = −softplus(W x + b).

    Attributes:
      width: D, the residual stream.
      heads, head_dim, value_dim: heads; key dims a head (0: D / heads); value dims a head (0: as the keys).
      conv_width: width of a causal depthwise convolution with SiLU over q, k and v; 0: none.
      gate_bias: b at its start. −4.5 gives e^g = 0.989, a half-life of 63 tokens.
      gated: the normalised read-out is multiplied by SiLU of a projection of the input.
      chunk_size: tokens that the operator handles at once; 0: its own choice.
    """

    kind: ClassVar[str] = "recurrence"

    width: int
    heads: int
    head_dim: int = 0
    value_dim: int = 0
    conv_width: int = 0
    gate_bias: float = -4.5
    gated: bool = False
    chunk_size: int = 0
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    state_dtype: Any = jnp.float32
    implementation: str = "auto"

    @property
    def dims(self) -> tuple[int, int, int]:
        """Heads, key dims and value dims a head."""
        key_dim = self.head_dim or self.width // self.heads
        return self.heads, key_dim, self.value_dim or key_dim

    @nn.nowrap
    def check(self, key: Key) -> None:
        check_heads(self.width, self.heads, self.head_dim, key)
        for name in ("value_dim", "conv_width", "chunk_size"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{key(name)}={value} must be at least 0")
        if self.conv_width > MOST_TAPS:
            raise ValueError(f"{key('conv_width')}={self.conv_width} must be at most {MOST_TAPS}: each tap is traced")

    @property
    def channels(self) -> int:
        heads, key_dim, value_dim = self.dims
        return heads * (2 * key_dim + value_dim)

    @nn.nowrap
    def init_state(self, batch: int, max_len: int) -> RecurrentState:
        matrix = jnp.zeros((batch, *self.dims), self.state_dtype)
        return RecurrentState(matrix, self._conv().init_state(batch) if self.conv_width else None)

    @nn.nowrap
    def _conv(self, name: str | None = None) -> ShortConv:
        return ShortConv(self.conv_width, self.channels, self.dtype, self.state_dtype, self.implementation, name=name)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: RecurrentState | None = None):
        """x [B,T,D] -> (y [B,T,D], state)."""
        heads, key_dim, value_dim = self.dims
        sizes = {"query": heads * key_dim, "key": heads * key_dim, "value": heads * value_dim}
        q, k, v = (split_heads(dense(size, name, self.dtype)(x), heads) for name, size in sizes.items())
        tail = None
        if self.conv_width:
            # Head by head, so that heads on several devices stay where they are.
            qkv = jnp.concatenate([q, k, v], axis=-1)
            tail = None if state is None else state.conv
            channels, tail = self._conv(name="conv")(qkv.reshape(*x.shape[:2], -1), ctx, tail)
            q, k, v = jnp.split(channels.reshape(qkv.shape), [key_dim, 2 * key_dim], axis=-1)
        log_decay_f32 = -nn.softplus(self._gate(x))

        o, matrix = self.scan(q, k, v, log_decay_f32, state, ctx.segment_ids)
        o = nn.RMSNorm(self.norm_eps, dtype=self.dtype, name="out_norm")(o).reshape(*x.shape[:2], -1)
        if self.gated:
            o = o * nn.silu(dense(heads * value_dim, "out_gate", self.dtype)(x))
        if state is not None:
            state = RecurrentState(matrix.astype(self.state_dtype), tail)
        return dense(self.width, "out", self.dtype)(o), state

    def scan(self, q, k, v, log_decay, state, segment_ids) -> tuple[jax.Array, jax.Array]:
        """(o [B,T,H,V], the matrix after the last token [B,H,K,V])."""
        return linear_scan(
            q,
            k,
            v,
            log_decay,
            initial_state=None if state is None else state.matrix.astype(jnp.float32),
            segment_ids=segment_ids,
            chunk_size=self.chunk_size or None,
            implementation=self.implementation,
        )

    def _gate(self, x: jax.Array) -> jax.Array:
        """The gate before its softplus, [B,T,H], in float32: what it keeps is a product over the document."""
        bias = nn.initializers.constant(self.gate_bias)
        return Dense(self.heads, jnp.float32, bias, name="gate")(x)

    @nn.nowrap
    def logical_axes(self) -> dict[str, tuple]:
        axes: dict[str, tuple] = {f"{n}/kernel": ("embed", "heads") for n in ("query", "key", "value")}
        axes |= {"gate/kernel": ("embed", "heads"), "gate/bias": ("heads",), "out_norm/scale": ("head_dim",)}
        axes |= {"out/kernel": ("heads", "embed")}
        if self.conv_width:
            axes["conv/weight"] = (None, "heads")
        return axes | ({"out_gate/kernel": ("embed", "heads")} if self.gated else {})

    @nn.nowrap
    def cost(self, seq_len: int) -> Cost:
        heads, key_dim, value_dim = self.dims
        outputs = self.channels + heads + heads * value_dim * (1 + self.gated)
        convolution = 2 * self.conv_width * self.channels
        return Cost(projections=2 * self.width * outputs + convolution, mixing=4 * heads * key_dim * value_dim)
