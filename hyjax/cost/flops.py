"""Forward FLOPs per token, from what each mixer and FFN says of itself. A multiply-add is two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hyjax.models import HybridLM


def flops_per_token(model_config: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Forward FLOPs per token of a row of `context` tokens, the average over its positions.

    Returns:
      "context", as given; "model", what the architecture asks for and utilisation is measured by:
        "attention"    4·heads·head_dim for each key seen: context/2 of them on average, or as many as the window
                       lets a token see (W − W²/(2·context) where W < context)
        "recurrence"   4·H·K·V a layer: the update of the state and its read-out, whatever the context
        "projections"  the products with the mixers' parameters, short convolutions included
        "ffn", "head"  2 for each parameter of a matrix
        "total"        their sum; norms, activations, rotations and look-ups are left out
      "hardware", what the chosen implementation executes (masked pairs, products inside a chunk): None, because no
      operator says yet what it executes.

    Raises:
      ValueError: the config means nothing, by key; or `context` is no positive whole number.
    """
    check_positive("context", context)
    model = HybridLM(model_config)
    flops = dict.fromkeys(("attention", "recurrence", "projections", "ffn"), 0.0)
    for letter, count in Counter(model.letters).items():
        layer = model.layers[letter]
        if layer.mixer is not None:
            cost = layer.mixer.cost(context)
            flops[layer.mixer.kind] += count * cost.mixing
            flops["projections"] += count * cost.projections
        if layer.ffn is not None:
            flops["ffn"] += count * layer.ffn.flops()
    flops["head"] = 2.0 * model.config["width"] * model.config["vocab_size"]
    flops["total"] = sum(flops.values())
    return {
        "context": context,
        "model": {name: float(value) for name, value in flops.items()},
        "hardware": None,
    }


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
