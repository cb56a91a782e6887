"""The small parts that mixers and blocks share: projections, norms, rotary positions.

Parameters are float32 masters; `dtype` is what the arithmetic runs in. Norm statistics and rotations are
float32 whatever `dtype` says.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.models.context import Context
from hyjax.parallel.sharded import short_conv

NORMS = ("rmsnorm", "layernorm")


def tokens_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., D] · kernel [D, F] -> [..., F], the tokens as one dim.

    The kernel's gradient is a sum over the tokens, which XLA's CPU backend does much slower over batch and time as
    two dims: 25 ms against 4 for an MLP of 32 and 128 on 128 rows of 128 tokens, on two cores.
    """
    return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


class Dense(nn.Module):
    """x [..., D] -> x · kernel (+ bias), [..., features]; kernel [D, features] drawn with variance 1/D."""

    features: int
    dtype: Any = jnp.float32
    bias_init: nn.initializers.Initializer | None = None  # None: no bias

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features), jnp.float32)
        y = tokens_product(x.astype(self.dtype), kernel.astype(self.dtype))
        if self.bias_init is not None:
            y += self.param("bias", self.bias_init, (self.features,), jnp.float32).astype(self.dtype)
        return y


def dense(features: int, name: str, dtype) -> Dense:
    return Dense(features, dtype, name=name)


def norm(kind: str, eps: float, dtype, name: str | None = None) -> nn.Module:
    """RMSNorm (a scale) or LayerNorm (a scale and a bias) over the last dim; eps is inside the root."""
    make = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}[kind]
    return make(epsilon=eps, dtype=dtype, param_dtype=jnp.float32, name=name)


def norm_axes(kind: str, dim: str | None = "embed") -> dict[str, tuple]:
    return {"scale": (dim,)} | ({"bias": (dim,)} if kind == "layernorm" else {})


def rope(x: jax.Array, positions: jax.Array, theta: float, dims: int) -> jax.Array:
    """Rotary position embedding (Su et al. 2021) of the first `dims` of x [B,T,H,K] by positions [B,T].

    Dim i turns with dim i + dims/2, by positions · theta^(−2i/dims).
    """
    frequency = theta ** (-jnp.arange(0, dims, 2, dtype=jnp.float32) / dims)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b, rest = jnp.split(x.astype(jnp.float32), [dims // 2, dims], axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1).astype(x.dtype)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[B,T,heads·K] -> [B,T,heads,K]."""
    return x.reshape(*x.shape[:-1], heads, -1)


class ShortConv(nn.Module):
    """Causal depthwise convolution, with SiLU or not, x [B,T,C] -> [B,T,C], that starts anew in every document.

    Its tail [B,width-1,C] is what the next call needs of this one's inputs. `implementation` is the layer's: where it
    names a kernel, the convolution, which has none, is as with "auto".
    """

    width: int
    channels: int
    dtype: Any = jnp.float32
    state_dtype: Any = jnp.float32
    implementation: str = "auto"
    bias: bool = False
    activation: str | None = "silu"

    @nn.nowrap
    def init_state(self, batch: int) -> jax.Array:
        return jnp.zeros((batch, self.width - 1, self.channels), self.state_dtype)

    @nn.compact
    def __call__(self, x: jax.Array, ctx: Context, tail: jax.Array | None):
        # uniform in ±1/√width, as depthwise convolutions of this width are drawn in the field
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=0, out_axis=())
        weight = self.param("weight", init, (self.width, self.channels), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.channels,), jnp.float32) if self.bias else None
        y, tail = short_conv(
            x,
            weight.astype(self.dtype),
            None if bias is None else bias.astype(self.dtype),
            activation=self.activation,
            initial_state=None if tail is None else tail.astype(x.dtype),
            segment_ids=ctx.segment_ids,
            implementation=self.implementation if self.implementation in ("reference", "xla") else "auto",
        )
        return y, tail.astype(self.state_dtype)
