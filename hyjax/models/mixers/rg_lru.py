"""RG-LRU (De et al. 2024, Griffin): h ← a h + √(1 − a²) (i ∘ x), elementwise, a = e^{−8 softplus(Λ) r}.

Two branches of the input: one through a short convolution and the recurrence, the other through GELU, multiplied. The
gates r and i are sigmoids of products that stay within a head's channels.
"""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.config.errors import divisors_near
from hyjax.models.cache import RecurrentState
from hyjax.models.context import Context
from hyjax.models.layers import ShortConv, dense, split_heads
from hyjax.models.mixers.base import Cost, Key, Mixer, check_least, check_taps
from hyjax.parallel.sharded import diagonal_scan

POWER = 8.0  # c of the paper
LEAST = 1e-12
DECAYS = (0.9, 0.999)  # what e^{−8 softplus(Λ)}, the decay of an open gate, is drawn from: its square uniformly


def draw_rate(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Λ, float32."""
    low, high = (decay**2 for decay in DECAYS)
    log_decay = 0.5 * jnp.log(jax.random.uniform(key, shape, jnp.float32, low, high))
    return jnp.log(jnp.expm1(-log_decay / POWER))


class WithinHeads(nn.Module):
    """u [B,T,C] -> products within each head's channels, with a bias, in float32."""

    heads: int

    @nn.compact
    def __call__(self, u: jax.Array) -> jax.Array:
        blocks = split_heads(u.astype(jnp.float32), self.heads)
        size = blocks.shape[-1]
        init = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
        kernel = self.param("kernel", init, (self.heads, size, size), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), (u.shape[-1],), jnp.float32)
        return jnp.einsum("bthi,hij->bthj", blocks, kernel).reshape(u.shape) + bias


class RGLRU(Mixer):
    """A gated elementwise recurrence.

    Attributes:
      width: D, the residual stream.
      heads: blocks of channels that the gates' products stay within.
      inner: channels (0: D).
      conv_width: width of a causal depthwise convolution with a bias, before the recurrence.
      chunk_size: tokens that the operator walks one after the other; 0: its own choice.
    """

    kind: ClassVar[str] = "recurrence"

    width: int
    heads: int
    inner: int = 0
    conv_width: int = 4
    chunk_size: int = 0
    dtype: Any = jnp.float32
    state_dtype: Any = jnp.float32
    implementation: str = "auto"

    @property
    def channels(self) -> int:
        return self.inner or self.width

    @nn.nowrap
    def check(self, key: Key) -> None:
        check_least(self, key, inner=0, conv_width=1, chunk_size=0)
        check_taps(self.conv_width, key)
        if self.channels % self.heads:
            near, inner = divisors_near(self.channels, self.heads), "inner" if self.inner else "width"
            raise ValueError(
                f"{key('heads')}={self.heads} must divide {key(inner)}={self.channels}: nearest are {near}"
            )

    @nn.nowrap
    def init_state(self, batch: int, max_len: int) -> RecurrentState:
        tail = jnp.zeros((batch, self.conv_width - 1, self.channels), self.state_dtype)
        return RecurrentState(jnp.zeros((batch, self.channels), self.state_dtype), tail)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: RecurrentState | None = None):
        """x [B,T,D] -> (y [B,T,D], state)."""
        gate, u = (dense(self.channels, name, self.dtype)(x) for name in ("gate", "input"))
        conv = ShortConv(
            self.conv_width, self.channels, self.dtype, self.state_dtype, self.implementation, True, None, name="conv"
        )
        u, tail = conv(u, ctx, None if state is None else state.conv)
        reset, admit = (jax.nn.sigmoid(WithinHeads(self.heads, name=name)(u)) for name in ("reset", "admit"))
        rate = POWER * jax.nn.softplus(self.param("rate", draw_rate, (self.channels,)))
        log_decay_f32 = -rate * reset
        # 1 − a² by expm1, since a is close to 1; not below LEAST, where the root would have no slope
        written_f32 = jnp.sqrt(jnp.maximum(-jnp.expm1(2 * log_decay_f32), LEAST)) * admit * u.astype(jnp.float32)
        h, last = diagonal_scan(
            written_f32, log_decay_f32,
            initial_state=None if state is None else state.matrix.astype(jnp.float32),
            segment_ids=ctx.segment_ids, chunk_size=self.chunk_size or None, implementation=self.implementation,
        )  # fmt: skip
        if state is not None:
            state = RecurrentState(last.astype(self.state_dtype), tail)
        y = h.astype(self.dtype) * nn.gelu(gate)
        return dense(self.width, "out", self.dtype)(y), state

    @nn.nowrap
    def logical_axes(self) -> dict[str, tuple]:
        axes: dict[str, tuple] = {f"{name}/kernel": ("embed", "heads") for name in ("gate", "input")}
        for name in ("reset", "admit"):
            axes |= {f"{name}/kernel": ("heads", None, None), f"{name}/bias": ("heads",)}
        axes |= {"rate": ("heads",), "conv/weight": (None, "heads"), "conv/bias": ("heads",)}
        return axes | {"out/kernel": ("heads", "embed")}

    @nn.nowrap
    def cost(self, seq_len: int) -> Cost:
        gates = 2 * 2 * self.channels * self.channels // self.heads
        projections = 2 * self.width * 3 * self.channels + gates + 2 * self.conv_width * self.channels
        return Cost(projections=projections, mixing=4 * self.channels)
