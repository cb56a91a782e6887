"""DeltaNet (Yang et al. 2024, "Parallelizing linear transformers with the delta rule"): S ← S + k β (v − Sᵀ k)ᵀ.

A token corrects what the state holds for its key and leaves the rest: nothing is forgotten but by being overwritten.
"""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.models.mixers.recurrence import MatrixRecurrence
from hyjax.parallel.sharded import delta_scan

EPSILON = 1e-6  # inside the root of a key's and a query's length


def unit(x: jax.Array) -> jax.Array:
    """x [..., K] to length 1, its length taken in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), -1, keepdims=True) + EPSILON)).astype(x.dtype)


class DeltaNet(MatrixRecurrence):
    """The delta rule without a decay; keys and queries are SiLU (the convolution's, where there is one), then length 1.

    Attributes:
      conv_width: 4, as in the release.
      negative_eigenvalues: β reaches 2 and not 1, so that a write may flip what it finds (Grazzi et al. 2024).
    """

    mixing_flops: ClassVar[int] = 8

    conv_width: int = 4  # type: ignore[misc]
    negative_eigenvalues: bool = False

    def mix(self, x, q, k, v, state, segment_ids):
        if not self.conv_width:
            q, k, v = (nn.silu(a) for a in (q, k, v))
        beta_f32 = jax.nn.sigmoid(self.gate("beta", x, self.heads)) * (2 if self.negative_eigenvalues else 1)
        return delta_scan(
            unit(q), unit(k), v, beta_f32, self.log_decay(x),
            initial_state=state, segment_ids=segment_ids, **self.operator_options,
        )  # fmt: skip

    def log_decay(self, x: jax.Array) -> jax.Array | None:
        """g [B,T,H] or [B,T,H,K], or None."""
        return None

    @nn.nowrap
    def gate_axes(self) -> dict[str, tuple]:
        return {"beta/kernel": ("embed", "heads")}

    @nn.nowrap
    def gate_flops(self) -> int:
        return 2 * self.width * self.heads
