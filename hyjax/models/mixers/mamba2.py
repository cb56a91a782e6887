"""Mamba-2 (Dao & Gu 2024): S ← e^{Δ A} S + B (Δ x)ᵀ, y = Sᵀ C + D x, with steps Δ that depend on the input.

It is linear_scan with q = C, k = B, v = Δ x and g = Δ A, a gate a head; groups of heads share B and C.
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
from hyjax.models.mixers.base import Cost, Key, Mixer, check_least, check_taps
from hyjax.models.mixers.gated_deltanet import draw_step_bias
from hyjax.parallel.sharded import linear_scan

RATES = (1.0, 16.0)  # what -A is drawn from at its start, uniformly


class Mamba2(Mixer):
    """A selective state space with one decay a head.

    Attributes:
      width: D, the residual stream.
      inner: channels of x, z and y (0: 2 D).
      ssm_head_dim: P, channels a head; inner / P heads.
      state_dim: N, numbers a channel.
      groups: of heads that share B and C.
      conv_width: width of a causal depthwise convolution with SiLU and a bias over x, B and C.
      step_limit: the largest Δ; 0: none.
      chunk_size: tokens that the operator handles at once; 0: its own choice.
    """

    kind: ClassVar[str] = "recurrence"

    width: int
    inner: int = 0
    ssm_head_dim: int = 64
    state_dim: int = 128
    groups: int = 1
    conv_width: int = 4
    step_limit: float = 0.0
    chunk_size: int = 0
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32
    state_dtype: Any = jnp.float32
    implementation: str = "auto"

    @property
    def channels(self) -> int:
        return self.inner or 2 * self.width

    @property
    def heads(self) -> int:
        return self.channels // self.ssm_head_dim

    @nn.nowrap
    def check(self, key: Key) -> None:
        check_least(self, key, inner=0, ssm_head_dim=1, state_dim=1, groups=1, conv_width=1, chunk_size=0)
        check_taps(self.conv_width, key)
        if self.step_limit < 0:
            raise ValueError(f"{key('step_limit')}={self.step_limit} must be at least 0, which is no limit")
        if self.channels % self.ssm_head_dim:
            near = divisors_near(self.channels, self.ssm_head_dim)
            inner = f"{key('inner')}={self.inner}" if self.inner else f"2 * {key('width')} = {self.channels}"
            raise ValueError(f"{key('ssm_head_dim')}={self.ssm_head_dim} must divide {inner}: nearest are {near}")
        if self.heads % self.groups:
            near = divisors_near(self.heads, self.groups)
            raise ValueError(f"{key('groups')}={self.groups} must divide the {self.heads} heads: nearest are {near}")

    @nn.nowrap
    def _convs(self) -> dict[str, ShortConv]:
        """Of x, whose channels are the heads', and of B and C, which heads share."""
        options = (self.dtype, self.state_dtype, self.implementation, True)
        return {
            "conv": ShortConv(self.conv_width, self.channels, *options, name="conv"),
            "conv_BC": ShortConv(self.conv_width, 2 * self.groups * self.state_dim, *options, name="conv_BC"),
        }

    @nn.nowrap
    def init_state(self, batch: int, max_len: int) -> RecurrentState:
        matrix = jnp.zeros((batch, self.heads, self.state_dim, self.ssm_head_dim), self.state_dtype)
        tails = [
            jnp.zeros((batch, self.conv_width - 1, size), self.state_dtype)
            for size in (self.channels, 2 * self.groups * self.state_dim)
        ]
        return RecurrentState(matrix, tuple(tails))

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: RecurrentState | None = None):
        """x [B,T,D] -> (y [B,T,D], state)."""
        z, inputs = (dense(self.channels, name, self.dtype)(x) for name in ("gate", "input"))
        shared = dense(2 * self.groups * self.state_dim, "BC", self.dtype)(x)
        tails = (None, None) if state is None else state.conv
        (inputs, tail), (shared, tail_BC) = (
            conv(a, ctx, t) for conv, a, t in zip(self._convs().values(), (inputs, shared), tails, strict=True)
        )
        B, C = (split_heads(a, self.groups) for a in jnp.split(shared, 2, axis=-1))
        step_f32, log_decay_f32 = self._steps(x)
        inputs = split_heads(inputs, self.heads)

        matrix = None if state is None else state.matrix.astype(jnp.float32)
        y, matrix = linear_scan(
            C, B, (inputs * step_f32[..., None]).astype(self.dtype), log_decay_f32,
            scale=1.0, initial_state=matrix, segment_ids=ctx.segment_ids,
            chunk_size=self.chunk_size or None, implementation=self.implementation,
        )  # fmt: skip
        y += self.param("skip", nn.initializers.ones_init(), (self.heads,)).astype(self.dtype)[:, None] * inputs
        y = nn.silu(z) * y.reshape(z.shape)
        grouped = split_heads(y, self.groups)
        y = nn.RMSNorm(self.norm_eps, dtype=self.dtype, use_scale=False)(grouped).reshape(z.shape)
        y *= self.param("out_norm", nn.initializers.ones_init(), (self.channels,)).astype(self.dtype)
        if state is not None:
            state = RecurrentState(matrix.astype(self.state_dtype), (tail, tail_BC))
        return dense(self.width, "out", self.dtype)(y), state

    def _steps(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Δ and Δ A [B,T,H], in float32."""
        raw = Dense(self.heads, jnp.float32, name="step")(x) + self.param("step_bias", draw_step_bias, (self.heads,))
        step = jax.nn.softplus(raw)
        if self.step_limit:
            step = jnp.minimum(step, self.step_limit)
        draw = lambda key, shape: jnp.log(jax.random.uniform(key, shape, jnp.float32, *RATES))
        return step, -step * jnp.exp(self.param("log_rate", draw, (self.heads,)))

    @nn.nowrap
    def logical_axes(self) -> dict[str, tuple]:
        axes: dict[str, tuple] = {f"{name}/kernel": ("embed", "heads") for name in ("gate", "input", "step")}
        axes |= {"BC/kernel": ("embed", None), "out/kernel": ("heads", "embed")}
        axes |= {name: ("heads",) for name in ("step_bias", "log_rate", "skip", "out_norm", "conv/bias")}
        return axes | {"conv/weight": (None, "heads"), "conv_BC/weight": (None, None), "conv_BC/bias": (None,)}

    @nn.nowrap
    def cost(self, seq_len: int) -> Cost:
        shared = 2 * self.groups * self.state_dim
        projections = 2 * self.width * (3 * self.channels + shared + self.heads)
        convolution = 2 * self.conv_width * (self.channels + shared)
        return Cost(projections=projections + convolution, mixing=4 * self.channels * self.state_dim)
