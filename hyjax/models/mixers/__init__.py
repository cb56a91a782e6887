"""The registry of mixers: a config's name for one -> its module."""

from hyjax.models.mixers.attention import Attention, WindowAttention
from hyjax.models.mixers.base import Cost, Mixer
from hyjax.models.mixers.gated_linear_attention import GatedLinearAttention

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "window_attention": WindowAttention,
    "gated_linear_attention": GatedLinearAttention,
}

__all__ = ["MIXERS", "Cost", "Mixer"]
