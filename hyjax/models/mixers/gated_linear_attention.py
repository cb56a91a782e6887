"""Scalar-gated linear attention: S ← e^g S + k vᵀ, o = K^(−1/2) Sᵀ q, one gate g ≤ 0 a head and token.

The recurrence is simple GLA (Yang et al. 2024 with a scalar gate; Dao & Gu 2024 without its discretisation):
a state of fixed size, whatever the length of the document.
"""

from __future__ import annotations

import flax.linen as nn

from hyjax.models.mixers.recurrence import MatrixRecurrence
from hyjax.parallel.sharded import linear_scan


class GatedLinearAttention(MatrixRecurrence):
    """Linear attention with a learned forget gate, g = −softplus(W x + b).

    Attributes:
      gate_bias: b at its start. −4.5 gives e^g = 0.989, a half-life of 63 tokens.
    """

    gate_bias: float = -4.5

    def mix(self, x, q, k, v, state, segment_ids):
        log_decay_f32 = -nn.softplus(self.gate("gate", x, self.heads, self.gate_bias))
        return self.scan(q, k, v, log_decay_f32, state, segment_ids)

    def scan(self, q, k, v, log_decay, state, segment_ids):
        """(o [B,T,H,V], the matrix after the last token [B,H,K,V])."""
        return linear_scan(q, k, v, log_decay, initial_state=state, segment_ids=segment_ids, **self.operator_options)

    @nn.nowrap
    def gate_axes(self) -> dict[str, tuple]:
        return {"gate/kernel": ("embed", "heads"), "gate/bias": ("heads",)}

    @nn.nowrap
    def gate_flops(self) -> int:
        return 2 * self.width * self.heads
