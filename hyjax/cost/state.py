"""Bytes that generation keeps between tokens, from the shapes of the caches that `HybridLM.init_state` allocates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from hyjax.cost.flops import check_positive
from hyjax.models import HybridLM

CONTEXTS = (4096, 32768, 131072)

# Room for more tokens than any window can span: a ring made for it is full, a cache of all tokens is as long as this.
_ENDLESS = 2**31 - 1


def decode_state_bytes(model_config: Mapping[str, Any], context: int, batch: int = 1) -> dict[str, Any]:
    """What the layers keep for `batch` rows, in bytes.

    Returns:
      "kv_per_token": what one more token a row adds, all layers and rows together;
      "window": the rings of all window layers, once they are full;
      "recurrent": the matrices of all recurrences; "conv": the tails of their short convolutions;
      "at": {str(context): bytes of the whole state with room for that many tokens}, for `CONTEXTS` and `context`. A
      ring is no longer than the context. The row's clock (four integers) is left out.

    Raises:
      ValueError: the config means nothing, by key; or `context` or `batch` is no positive whole number.
    """
    check_positive("context", context)
    check_positive("batch", batch)
    model = HybridLM(model_config)
    full, one_less = (state_sizes(model, length, batch) for length in (_ENDLESS, _ENDLESS - 1))
    return {
        "kv_per_token": full["kv"] - one_less["kv"],
        "window": full["window"],
        "recurrent": full["recurrent"],
        "conv": full["conv"],
        "at": {str(n): state_sizes(model, n, batch).total() for n in dict.fromkeys((*CONTEXTS, context))},
    }


def state_sizes(model: HybridLM, max_len: int, batch: int) -> Counter[str]:
    """Bytes of `init_state(batch, max_len)` by what they are for: "kv", "window", "recurrent", "conv"."""
    layers = jax.eval_shape(lambda: model.init_state(batch, max_len)).layers
    sizes: Counter[str] = Counter()
    for state in layers.values():
        if state is not None:
            sizes.update(state.sizes())
    return sizes


def crossover_tokens(state: Mapping[str, Any]) -> float | None:
    """The context at which the growing part of `decode_state_bytes(...)` is as large as the fixed part.

    Fixed is what does not grow for ever: recurrences, convolution tails and full windows. None where there is no
    growing part, or no fixed one: such a model has no crossover.
    """
    fixed = state["recurrent"] + state["conv"] + state["window"]
    growing = state["kv_per_token"]
    return fixed / growing if fixed and growing else None
