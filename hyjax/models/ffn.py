"""Feed-forward layers: what a token does on its own. x [B,T,D] -> y [B,T,D]."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.models.layers import dense


class MLP(nn.Module):
    """down(activation(up(x))), without biases.

    Attributes:
      width: D, the residual stream.
      ffn_width: the hidden width; 0 is 4·D.
    """

    kind: ClassVar[str] = "mlp"

    width: int
    ffn_width: int = 0
    dtype: Any = jnp.float32

    @property
    def hidden(self) -> int:
        return self.ffn_width or 4 * self.width

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = dense(self.hidden, "up", self.dtype)(x)
        # the backward pass keeps h and works the activation out again: cheaper than to keep what it is made of
        return dense(self.width, "down", self.dtype)(jax.checkpoint(self.activation)(h))

    def activation(self, x: jax.Array) -> jax.Array:
        raise NotImplementedError

    @nn.nowrap
    def logical_axes(self) -> dict[str, tuple]:
        return {"up/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed")}

    @nn.nowrap
    def flops(self) -> float:
        """Forward FLOPs per token."""
        return 2 * 2 * self.width * self.hidden


class GeluMLP(MLP):
    """MLP with GELU, tanh form."""

    def activation(self, x: jax.Array) -> jax.Array:
        return nn.gelu(x)


class Relu2MLP(MLP):
    """MLP with squared ReLU (So et al. 2021)."""

    def activation(self, x: jax.Array) -> jax.Array:
        return jnp.square(nn.relu(x))


class SwiGLU(MLP):
    """down(silu(gate(x)) · up(x)) (Shazeer 2020); hidden width 0 is 8/3·D, rounded up to a multiple of 8.

    So it has the parameters of an MLP four times as wide as D.
    """

    @property
    def hidden(self) -> int:
        return self.ffn_width or -(-8 * self.width // 24) * 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = (dense(self.hidden, name, self.dtype)(x) for name in ("gate", "up"))
        return dense(self.width, "down", self.dtype)(jax.checkpoint(self.product)(gate, up))

    def product(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return nn.silu(gate) * up

    @nn.nowrap
    def logical_axes(self) -> dict[str, tuple]:
        return super().logical_axes() | {"gate/kernel": ("embed", "mlp")}

    @nn.nowrap
    def flops(self) -> float:
        return 3 * 2 * self.width * self.hidden


FFNS: dict[str, type[MLP]] = {"swiglu": SwiGLU, "gelu": GeluMLP, "relu2": Relu2MLP}
