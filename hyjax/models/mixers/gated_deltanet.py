"""Gated DeltaNet (Yang et al. 2024): S ← e^g S, then S ← S + k β (v − Sᵀ k)ᵀ, one gate a head and token.

The decay is Mamba-2's, g = −e^A softplus(W x + b): A, log of a rate, and b, a step's, are learned a head.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.models.mixers.deltanet import DeltaNet

STEPS = (1e-3, 1e-1)  # what softplus(b) is drawn from at its start, log-uniformly
RATES = (1e-3, 16.0)  # what e^A is drawn from, uniformly


def draw_log_rate(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A = log U(RATES), float32."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, *RATES))


def draw_step_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """b with softplus(b) log-uniform in STEPS, float32."""
    low, high = (jnp.log(jnp.float32(step)) for step in STEPS)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return step + jnp.log(-jnp.expm1(-step))


class GatedDeltaNet(DeltaNet):
    """The delta rule with a forget gate a head.

    Attributes:
      gated: on, as in the release: SiLU.
    """

    gated: bool = True  # type: ignore[misc]

    def log_decay(self, x):
        steps_f32 = self.gate("step", x, self.heads) + self.param("step_bias", draw_step_bias, (self.heads,))
        return -jnp.exp(self.param("log_rate", draw_log_rate, (self.heads,))) * jax.nn.softplus(steps_f32)

    @nn.nowrap
    def gate_axes(self) -> dict[str, tuple]:
        own = {"step/kernel": ("embed", "heads"), "step_bias": ("heads",), "log_rate": ("heads",)}
        return super().gate_axes() | own

    @nn.nowrap
    def gate_flops(self) -> int:
        return super().gate_flops() + 2 * self.width * self.heads
