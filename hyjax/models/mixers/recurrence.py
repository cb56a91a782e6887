"""What the recurrences with a matrix a head share: projections, short convolution, state, read-out.

Each head keeps a matrix S [K,V] that a token writes into and reads from: what it decays by and how it is written is a
subclass's. q, k and v are projections of the input, through a short convolution where there is one; the read-out is
normalised per head, gated where the layer is gated, and projected back.
"""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.config.errors import divisors_near
from hyjax.models.cache import RecurrentState
from hyjax.models.context import Context
from hyjax.models.layers import Dense, ShortConv, dense, split_heads
from hyjax.models.mixers.base import Cost, Key, Mixer, check_heads, check_least, check_taps


class MatrixRecurrence(Mixer):
    """A recurrence over matrices.

    Attributes:
      width: D, the residual stream.
      heads, head_dim, value_dim: heads of values; key dims a head (0: D / heads); value dims a head (0: as the keys).
      key_heads: heads of queries and keys, each of which serves heads / key_heads of values (0: as many).
      conv_width: width of a causal depthwise convolution with SiLU over q, k and v; 0: none.
      gated: the normalised read-out is multiplied by an activation of a projection of the input.
      chunk_size: tokens that the operator handles at once; 0: its own choice.
    """

    kind: ClassVar[str] = "recurrence"
    mixing_flops: ClassVar[int] = 4  # for each number of the matrix: the write and the read
    out_activation: ClassVar[Any] = staticmethod(nn.silu)

    width: int
    heads: int
    head_dim: int = 0
    value_dim: int = 0
    key_heads: int = 0
    conv_width: int = 0
    gated: bool = False
    chunk_size: int = 0
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    state_dtype: Any = jnp.float32
    implementation: str = "auto"

    # ------------------------------------------------------------------------------------------ a subclass's own

    def mix(self, x, q, k, v, state: jax.Array | None, segment_ids) -> tuple[jax.Array, jax.Array]:
        """x [B,T,D], q, k [B,T,Hk,K], v [B,T,H,V], the matrix before -> (o [B,T,H,V], the matrix after the last)."""
        raise NotImplementedError

    @nn.nowrap
    def gate_axes(self) -> dict[str, tuple]:
        """Logical axes of the parameters that `mix` has."""
        return {}

    @nn.nowrap
    def gate_flops(self) -> int:
        """Of a token's products with those parameters."""
        return 0

    # ------------------------------------------------------------------------------------------ what they share

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """Heads of values, heads of keys, key dims and value dims a head."""
        key_dim = self.head_dim or self.width // self.heads
        return self.heads, self.key_heads or self.heads, key_dim, self.value_dim or key_dim

    @property
    def sizes(self) -> dict[str, int]:
        """Channels of q, k and v."""
        heads, key_heads, key_dim, value_dim = self.dims
        return {"query": key_heads * key_dim, "key": key_heads * key_dim, "value": heads * value_dim}

    @property
    def channels(self) -> int:
        return sum(self.sizes.values())

    @nn.nowrap
    def check(self, key: Key) -> None:
        check_heads(self.width, self.heads, self.head_dim, key)
        check_least(self, key, value_dim=0, key_heads=0, conv_width=0, chunk_size=0)
        if self.heads % self.dims[1]:
            near = divisors_near(self.heads, self.key_heads)
            raise ValueError(
                f"{key('key_heads')}={self.key_heads} must divide {key('heads')}={self.heads}: nearest are {near}"
            )
        check_taps(self.conv_width, key)

    @nn.nowrap
    def init_state(self, batch: int, max_len: int) -> RecurrentState:
        heads, _, key_dim, value_dim = self.dims
        matrix = jnp.zeros((batch, heads, key_dim, value_dim), self.state_dtype)
        return RecurrentState(matrix, self._conv().init_state(batch) if self.conv_width else None)

    @nn.nowrap
    def _conv(self, name: str | None = None) -> ShortConv:
        return ShortConv(self.conv_width, self.channels, self.dtype, self.state_dtype, self.implementation, name=name)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: RecurrentState | None = None):
        """x [B,T,D] -> (y [B,T,D], state)."""
        q, k, v, tail = self._project(x, ctx, None if state is None else state.conv)
        matrix = None if state is None else state.matrix.astype(jnp.float32)
        o, matrix = self.mix(x, q, k, v, matrix, ctx.segment_ids)
        o = nn.RMSNorm(self.norm_eps, dtype=self.dtype, name="out_norm")(o).reshape(*x.shape[:2], -1)
        if self.gated:
            o = o * self.out_activation(self.out_gate(x))
        if state is not None:
            state = RecurrentState(matrix.astype(self.state_dtype), tail)
        return dense(self.width, "out", self.dtype)(o), state

    def _project(self, x: jax.Array, ctx: Context, tail: jax.Array | None):
        """q, k [B,T,Hk,K], v [B,T,H,V] and the convolution's tail."""
        _, key_heads, key_dim, _ = self.dims
        q, k, v = (split_heads(dense(size, name, self.dtype)(x), key_heads) for name, size in self.sizes.items())
        if self.conv_width:
            # Key head by key head with its values, so that heads on several devices stay where they are.
            qkv = jnp.concatenate([q, k, v], axis=-1)
            channels, tail = self._conv(name="conv")(qkv.reshape(*x.shape[:2], -1), ctx, tail)
            q, k, v = jnp.split(channels.reshape(qkv.shape), [key_dim, 2 * key_dim], axis=-1)
        return q, k, split_heads(v.reshape(*x.shape[:2], -1), self.heads), tail

    def out_gate(self, x: jax.Array) -> jax.Array:
        """[B,T,H·V], before its activation."""
        return dense(self.sizes["value"], "out_gate", self.dtype)(x)

    @nn.nowrap
    def out_gate_axes(self) -> dict[str, tuple]:
        return {"out_gate/kernel": ("embed", "heads")}

    @nn.nowrap
    def out_gate_flops(self) -> int:
        return 2 * self.width * self.sizes["value"]

    def gate(self, name: str, x: jax.Array, features: int, bias: float | None = None) -> jax.Array:
        """A projection [B,T,features] in float32: what a gate keeps is a product over the document."""
        return Dense(features, jnp.float32, None if bias is None else nn.initializers.constant(bias), name=name)(x)

    @property
    def operator_options(self) -> dict[str, Any]:
        return dict(chunk_size=self.chunk_size or None, implementation=self.implementation)

    @nn.nowrap
    def logical_axes(self) -> dict[str, tuple]:
        axes: dict[str, tuple] = {f"{name}/kernel": ("embed", "heads") for name in self.sizes}
        axes |= {"out_norm/scale": ("head_dim",), "out/kernel": ("heads", "embed")} | self.gate_axes()
        if self.conv_width:
            axes["conv/weight"] = (None, "heads")
        return axes | (self.out_gate_axes() if self.gated else {})

    @nn.nowrap
    def cost(self, seq_len: int) -> Cost:
        heads, _, key_dim, value_dim = self.dims
        projections = 2 * self.width * (self.channels + self.sizes["value"]) + 2 * self.conv_width * self.channels
        projections += self.gate_flops() + (self.out_gate_flops() if self.gated else 0)
        return Cost(projections=projections, mixing=self.mixing_flops * heads * key_dim * value_dim)
