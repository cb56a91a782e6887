"""What a model costs, from its config alone: nothing is allocated and no model runs.

    count_params(model_config)                     parameters, in all and by kind
    flops_per_token(model_config, context)         forward FLOPs
    decode_state_bytes(model_config, context)      what generation must keep

`model_config` is any mapping with keys of `hyjax.config.DEFAULTS["model"]`; what is left out has its default, and what
means nothing raises ValueError. `hyjax.cost.plan` joins the three.
"""

from hyjax.cost.flops import flops_per_token
from hyjax.cost.params import count_params
from hyjax.cost.state import crossover_tokens, decode_state_bytes

__all__ = ["count_params", "crossover_tokens", "decode_state_bytes", "flops_per_token"]
