"""Kimi delta attention (Kimi Linear, 2025): the gated delta rule with a gate a key channel.

S ← diag(e^g) S, then S ← S + k β (v − Sᵀ k)ᵀ, g = −e^A softplus(W₂ W₁ x + b) with A a head's and b a channel's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.models.layers import Dense
from hyjax.models.mixers.deltanet import DeltaNet
from hyjax.models.mixers.gated_deltanet import draw_log_rate, draw_step_bias


class KimiDeltaAttention(DeltaNet):
    """The delta rule with a forget gate a channel; both gates pass through a head's width, as in the release.

    Attributes:
      gated: on, as in the release: sigmoid, of a projection through V dims.
    """

    out_activation: ClassVar[Any] = staticmethod(nn.sigmoid)

    gated: bool = True  # type: ignore[misc]

    def log_decay(self, x):
        heads, _, key_dim, value_dim = self.dims
        narrow = Dense(value_dim, self.dtype, name="step_in")(x)
        bias = self.param("step_bias", draw_step_bias, (heads * key_dim,))
        steps_f32 = (self.gate("step", narrow, heads * key_dim) + bias).reshape(*x.shape[:2], heads, key_dim)
        return -jnp.exp(self.param("log_rate", draw_log_rate, (heads,)))[:, None] * jax.nn.softplus(steps_f32)

    def out_gate(self, x):
        narrow = Dense(self.dims[3], self.dtype, name="out_gate_in")(x)
        return Dense(self.sizes["value"], self.dtype, nn.initializers.zeros_init(), name="out_gate")(narrow)

    @nn.nowrap
    def gate_axes(self) -> dict[str, tuple]:
        own = {"step_in/kernel": ("embed", None), "step/kernel": (None, "heads"), "step_bias": ("heads",)}
        return super().gate_axes() | own | {"log_rate": ("heads",)}

    @nn.nowrap
    def gate_flops(self) -> int:
        heads, _, key_dim, value_dim = self.dims
        return super().gate_flops() + 2 * value_dim * (self.width + heads * key_dim)

    @nn.nowrap
    def out_gate_axes(self) -> dict[str, tuple]:
        kernels = {"out_gate_in/kernel": ("embed", None), "out_gate/kernel": (None, "heads")}
        return kernels | {"out_gate/bias": ("heads",)}

    @nn.nowrap
    def out_gate_flops(self) -> int:
        return 2 * self.dims[3] * (self.width + self.sizes["value"])
