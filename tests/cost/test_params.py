"""Parameter counts: the reference study's, by hand, and those of a tree that was really made."""

import jax
import jax.numpy as jnp
import pytest

from hyjax.cost import count_params
from hyjax.cost.params import KINDS, ledger
from hyjax.models import HybridLM
from tests.cost.common import LARGE, MIXED, RECALL


@pytest.mark.parametrize(("layout", "total"), [("GGGG", 58_544), ("AAAA", 57_984), ("GGAG", 58_404)])
def test_reference_study_totals(layout, total):
    assert count_params(RECALL | {"layout": layout})["total"] == total


def test_kinds_by_hand():
    width, norms = 32, 4 * 2 + 1
    gated = 4 * width**2 + (width * 4 + 4) + 8  # query, key, value, out; the gate; the read-out's scale
    expected = dict.fromkeys(KINDS, 0) | dict(
        embedding=(64 + 33) * width,
        position=128 * width,
        lm_head=width * 32 + 32,
        attention=4 * width**2,
        recurrence=3 * gated,
        mlp=4 * 2 * width * 4 * width,
        norm=norms * 2 * width,
    )
    counts = count_params(RECALL | {"layout": "GGAG"})
    assert counts["by_kind"] == expected
    left = 58_404 - expected["embedding"] - expected["position"] - expected["lm_head"]
    assert counts["non_embedding"] == counts["active_non_embedding"] == left
    assert counts["active"] == counts["total"] == sum(expected.values())


def test_equals_the_tree_that_init_makes():
    config = MIXED | dict(tied_embeddings=True, head_bias=True, norm="layernorm")
    model = HybridLM(config)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    made = {part: sum(leaf.size for leaf in jax.tree.leaves(tree)) for part, tree in params.items()}
    by_kind, layer_size = ledger(model)
    assert count_params(config)["total"] == sum(by_kind.values()) == sum(made.values())
    assert by_kind["embedding"] == made["embed"] == 97 * 24
    assert by_kind["lm_head"] == made["head"] == 97  # its matrix is the embedding, counted once
    assert sum(layer_size[letter] for letter in model.letters) == made["layers"]


def test_large_model_in_closed_form():
    width, hidden = 8192, 28672
    attention = width * (2 * width + 2 * 8 * 128)
    gated = 4 * width**2 + 64 * width + 64 + 128
    expected = 2 * 152_000 * width + 16 * attention + 48 * gated + 64 * 3 * width * hidden + 129 * width
    assert count_params(LARGE)["total"] == expected  # 62.9 billion: past int32, and nothing may be allocated


def test_bad_config_names_the_key():
    with pytest.raises(ValueError, match=r"model\.widht .* model\.width"):
        count_params({"widht": 64})
    with pytest.raises(ValueError, match=r"model\.legend\.A\.kv_head"):
        count_params({"layout": "A", "legend": {"A": {"kv_head": 2}}})
