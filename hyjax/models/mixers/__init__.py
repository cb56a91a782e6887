"""The registry of mixers: a config's name for one -> its module."""

from hyjax.models.mixers.attention import Attention, WindowAttention
from hyjax.models.mixers.base import Cost, Mixer
from hyjax.models.mixers.deltanet import DeltaNet
from hyjax.models.mixers.gated_deltanet import GatedDeltaNet
from hyjax.models.mixers.gated_linear_attention import GatedLinearAttention
from hyjax.models.mixers.gla import GLA
from hyjax.models.mixers.kimi_delta_attention import KimiDeltaAttention
from hyjax.models.mixers.mamba1 import Mamba1
from hyjax.models.mixers.mamba2 import Mamba2
from hyjax.models.mixers.rg_lru import RGLRU

MIXERS: dict[str, type[Mixer]] = {
    "attention": Attention,
    "window_attention": WindowAttention,
    "gated_linear_attention": GatedLinearAttention,
    "gla": GLA,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "kimi_delta_attention": KimiDeltaAttention,
    "mamba1": Mamba1,
    "mamba2": Mamba2,
    "rg_lru": RGLRU,
}

__all__ = ["MIXERS", "Cost", "Mixer"]
