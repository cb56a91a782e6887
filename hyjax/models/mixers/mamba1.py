"""Mamba (Gu & Dao 2023): h ← e^{Δ A} h + Δ B u, y = C h + D u, N numbers a channel, steps that depend on the input."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.models.cache import RecurrentState
from hyjax.models.context import Context
from hyjax.models.layers import Dense, ShortConv, dense
from hyjax.models.mixers.base import Cost, Key, Mixer, check_least, check_taps
from hyjax.models.mixers.gated_deltanet import draw_step_bias
from hyjax.parallel.sharded import selective_scan


class Mamba1(Mixer):
    """A selective state space with a decay for each number of the state.

    Attributes:
      width: D, the residual stream.
      inner: channels (0: 2 D).
      state_dim: N, numbers a channel.
      step_rank: R, the width that the steps pass through (0: D / 16, rounded up).
      conv_width: width of a causal depthwise convolution with SiLU and a bias.
      chunk_size: tokens that the operator walks one after the other; 0: its own choice.
    """

    kind: ClassVar[str] = "recurrence"

    width: int
    inner: int = 0
    state_dim: int = 16
    step_rank: int = 0
    conv_width: int = 4
    chunk_size: int = 0
    dtype: Any = jnp.float32
    state_dtype: Any = jnp.float32
    implementation: str = "auto"

    @property
    def channels(self) -> int:
        return self.inner or 2 * self.width

    @property
    def rank(self) -> int:
        return self.step_rank or math.ceil(self.width / 16)

    @nn.nowrap
    def check(self, key: Key) -> None:
        check_least(self, key, inner=0, state_dim=1, step_rank=0, conv_width=1, chunk_size=0)
        check_taps(self.conv_width, key)

    @nn.nowrap
    def init_state(self, batch: int, max_len: int) -> RecurrentState:
        matrix = jnp.zeros((batch, self.channels, self.state_dim), self.state_dtype)
        return RecurrentState(matrix, jnp.zeros((batch, self.conv_width - 1, self.channels), self.state_dtype))

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, state: RecurrentState | None = None):
        """x [B,T,D] -> (y [B,T,D], state)."""
        z, u = (dense(self.channels, name, self.dtype)(x) for name in ("gate", "input"))
        conv = ShortConv(
            self.conv_width, self.channels, self.dtype, self.state_dtype, self.implementation, True, name="conv"
        )
        u, tail = conv(u, ctx, None if state is None else state.conv)
        narrow, B, C = jnp.split(
            dense(self.rank + 2 * self.state_dim, "step_BC", self.dtype)(u),
            [self.rank, self.rank + self.state_dim], axis=-1,
        )  # fmt: skip
        raw = Dense(self.channels, jnp.float32, name="step")(narrow)
        step_f32 = jax.nn.softplus(raw + self.param("step_bias", draw_step_bias, (self.channels,)))
        rates = lambda key, shape: jnp.log(jnp.broadcast_to(jnp.arange(1, shape[1] + 1, dtype=jnp.float32), shape))
        A = -jnp.exp(self.param("log_rate", rates, (self.channels, self.state_dim)))
        skip = self.param("skip", nn.initializers.ones_init(), (self.channels,))

        y, matrix = selective_scan(
            u, step_f32, A, B, C, skip,
            initial_state=None if state is None else state.matrix.astype(jnp.float32),
            segment_ids=ctx.segment_ids, chunk_size=self.chunk_size or None, implementation=self.implementation,
        )  # fmt: skip
        if state is not None:
            state = RecurrentState(matrix.astype(self.state_dtype), tail)
        return dense(self.width, "out", self.dtype)(y * nn.silu(z)), state

    @nn.nowrap
    def logical_axes(self) -> dict[str, tuple]:
        axes: dict[str, tuple] = {f"{name}/kernel": ("embed", "heads") for name in ("gate", "input")}
        axes |= {"step_BC/kernel": ("heads", None), "step/kernel": (None, "heads"), "out/kernel": ("heads", "embed")}
        axes |= {name: ("heads",) for name in ("step_bias", "skip", "conv/bias")}
        return axes | {"log_rate": ("heads", "state"), "conv/weight": (None, "heads")}

    @nn.nowrap
    def cost(self, seq_len: int) -> Cost:
        inner, narrow = 2 * self.channels * (self.rank + 2 * self.state_dim), 2 * self.rank * self.channels
        projections = 2 * self.width * 3 * self.channels + inner + narrow + 2 * self.conv_width * self.channels
        return Cost(projections=projections, mixing=4 * self.channels * self.state_dim)
