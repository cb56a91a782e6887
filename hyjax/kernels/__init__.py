"""The operators of hyjax: each a folder with api, reference, xla (and Pallas kernels where they exist).

Tensors are ``[batch, time, heads, dim]``; decays are natural logarithms, at most 0. This package needs jax alone
and imports nothing else of hyjax.
"""

from hyjax.kernels.attention.api import attention
from hyjax.kernels.delta_scan.api import delta_scan
from hyjax.kernels.diagonal_scan.api import diagonal_scan
from hyjax.kernels.linear_scan.api import linear_scan
from hyjax.kernels.selective_scan.api import selective_scan
from hyjax.kernels.short_conv.api import short_conv

# `checkpoint_name`s of what the operators save for their backward passes, for rematerialisation policies.
RESIDUAL_NAMES = (
    "attention_out",
    "attention_lse",
    "delta_scan_out",
    "delta_scan_states",
    "diagonal_scan_out",
    "linear_scan_out",
    "linear_scan_states",
    "selective_scan_out",
    "selective_scan_states",
)

__all__ = ["RESIDUAL_NAMES", "attention", "delta_scan", "diagonal_scan", "linear_scan", "selective_scan", "short_conv"]
