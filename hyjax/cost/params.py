"""Parameters by kind, counted on the very tree that `HybridLM.init` makes (its shapes; nothing is drawn)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hyjax.models import HybridLM
from hyjax.models.block import Layer

# "position": a learned table. "norm": the blocks' norms and the final one; a norm inside a mixer counts with the mixer.
KINDS = (
    "embedding", "position", "lm_head", "attention", "recurrence", "mlp", "expert", "shared_expert", "router", "norm",
)  # fmt: skip
# What reads or writes the vocabulary, or looks up a position: left out of "non_embedding".
EMBEDDINGS = ("embedding", "position", "lm_head")

_TOP_LEVEL = {"embed": "embedding", "positions": "position", "head": "lm_head", "final_norm": "norm"}


def count_params(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a model, as integers.

    Returns:
      "total"; "active", those that one token uses; "non_embedding" and "active_non_embedding", without the kinds in
      `EMBEDDINGS` (Kaplan et al. 2020); "by_kind", every one of `KINDS`, which add up to the total. A tied embedding
      counts once, as "embedding"; "lm_head" is then the head's bias, if it has one.

    Raises:
      ValueError: the config means nothing, by key.
    """
    by_kind, _ = ledger(HybridLM(model_config))
    total = sum(by_kind.values())
    non_embedding = total - sum(by_kind[kind] for kind in EMBEDDINGS)
    return {
        "total": total,
        "active": total,  # no layer picks among its parameters
        "non_embedding": non_embedding,
        "active_non_embedding": non_embedding,
        "by_kind": by_kind,
    }


def ledger(model: HybridLM) -> tuple[dict[str, int], dict[str, int]]:
    """Parameters of the whole model by kind, and of one layer by letter."""
    tree = param_shapes(model)
    total: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    total.update({kind: _size(tree[part]) for part, kind in _TOP_LEVEL.items() if part in tree})
    layer_size = {}
    for letter, count in Counter(model.letters).items():
        by_kind = _count_layers(model.layers[letter], tree["layers"][letter])
        layer_size[letter] = sum(by_kind.values()) // count
        total.update(by_kind)
    return dict(total), layer_size


def param_shapes(model: HybridLM) -> dict[str, Any]:
    """The parameter tree with a `jax.ShapeDtypeStruct` in the place of each array."""
    streams = len(model.config["streams"])
    shape = (1, 1, streams) if streams else (1, 1)
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(shape, jnp.int32)))["params"]


def _count_layers(layer: Layer, stack: Mapping[str, Any]) -> dict[str, int]:
    """Parameters by kind of all the layers in a stack."""
    kinds = {"mixer_norm": "norm", "ffn_norm": "norm"}
    kinds |= {name: part.kind for name, part in (("mixer", layer.mixer), ("ffn", layer.ffn)) if part is not None}
    sizes: Counter[str] = Counter()
    for part, tree in stack.items():
        sizes[kinds[part]] += _size(tree)
    return dict(sizes)


def _size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
