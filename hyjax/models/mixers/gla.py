"""Gated linear attention (Yang et al. 2024): S ← diag(e^g) S + k vᵀ, one gate a key channel and token."""

from __future__ import annotations

import flax.linen as nn
import jax

from hyjax.models.layers import Dense
from hyjax.models.mixers.base import Key, check_least
from hyjax.models.mixers.recurrence import MatrixRecurrence
from hyjax.parallel.sharded import linear_scan

DIVISOR = 16  # of the log gate: the release's, so that a gate in the middle of its range still retains


class GLA(MatrixRecurrence):
    """Linear attention with a gate a channel, g = logsigmoid(W₂ W₁ x + b) / 16.

    Attributes:
      gate_rank: R, the width between W₁ [D,R] and W₂ [R,Hk·K].
      gate_bias: b at its start. 1.75 gives e^g = 0.990, a half-life of 69 tokens. (The release starts at 0: 0.958, 16.)
      gated: on, as in the release: SiLU.
    """

    gated: bool = True  # type: ignore[misc]
    gate_rank: int = 16
    gate_bias: float = 1.75

    @nn.nowrap
    def check(self, key: Key) -> None:
        super().check(key)
        check_least(self, key, gate_rank=1)

    def mix(self, x, q, k, v, state, segment_ids):
        heads, _, key_dim, _ = self.dims
        narrow = Dense(self.gate_rank, self.dtype, name="gate_in")(x)
        gates_f32 = self.gate("gate", narrow, heads * key_dim, self.gate_bias)
        log_decay_f32 = jax.nn.log_sigmoid(gates_f32).reshape(*x.shape[:2], heads, key_dim) / DIVISOR
        return linear_scan(
            q, k, v, log_decay_f32, initial_state=state, segment_ids=segment_ids, **self.operator_options
        )

    @nn.nowrap
    def gate_axes(self) -> dict[str, tuple]:
        return {"gate_in/kernel": ("embed", None), "gate/kernel": (None, "heads"), "gate/bias": ("heads",)}

    @nn.nowrap
    def gate_flops(self) -> int:
        heads, _, key_dim, _ = self.dims
        return 2 * self.gate_rank * (self.width + heads * key_dim)
