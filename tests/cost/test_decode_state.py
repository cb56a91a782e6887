"""Decode state: planned bytes against caches that were really allocated, and worked examples."""

import jax
import pytest

from hyjax.cost import crossover_tokens, decode_state_bytes
from hyjax.models import HybridLM
from tests.cost.common import LARGE, MIXED, RECALL


def allocated(config, max_len, batch=1) -> int:
    """Bytes of the arrays that the layers' state really takes."""
    return sum(array.nbytes for array in jax.tree.leaves(HybridLM(config).init_state(batch, max_len).layers))


def test_recurrences_are_flat():
    config = RECALL | {"layout": "GGGG"}
    assert [allocated(config, n) for n in (16, 128, 1024)] == [4096] * 3
    state = decode_state_bytes(config, 128)
    assert state["at"] == dict.fromkeys(("4096", "32768", "131072", "128"), 4096)
    assert (state["kv_per_token"], state["window"], state["recurrent"], state["conv"]) == (0, 0, 4096, 0)


def test_one_attention_layer_in_four_grows_at_a_quarter():
    slopes = {}
    for layout in ("GGAG", "AAAA"):
        config = RECALL | {"layout": layout}
        slopes[layout] = (allocated(config, 1024) - allocated(config, 128)) / (1024 - 128)
        assert decode_state_bytes(config, 128)["kv_per_token"] == slopes[layout]
    assert slopes["AAAA"] == 4 * slopes["GGAG"] == 4 * 2 * 32 * 4


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_is_what_is_allocated(dtype, batch):
    config = MIXED | {"state_dtype": dtype}
    for context in (1, 49, 50, 51, 333):  # below, at and past the window of 50
        assert decode_state_bytes(config, context, batch)["at"][str(context)] == allocated(config, context, batch)
    state, size = decode_state_bytes(config, 333, batch), 4 if dtype == "float32" else 2
    assert state["kv_per_token"] == batch * 2 * 2 * 10 * size
    assert state["window"] == 50 * state["kv_per_token"]
    assert state["recurrent"] == batch * 2 * 4 * 10 * 6 * size
    assert state["conv"] == batch * 2 * 3 * 4 * (10 + 10 + 6) * size
    fixed = state["window"] + state["recurrent"] + state["conv"]
    assert state["at"]["4096"] == fixed + 4096 * state["kv_per_token"]
    assert crossover_tokens(state) == fixed / state["kv_per_token"]


def test_worked_example():
    """24 layers, 1:7, width 2048, 4 KV heads of 128, an inner width of 4096 with a state of 128, 16 bit."""
    config = dict(
        layout="(GGGGGGGA)*3", width=2048, heads=16, kv_heads=4, head_dim=128, state_dtype="bfloat16",
        legend=dict(G=dict(heads=32, head_dim=128)),
    )  # fmt: skip
    state = decode_state_bytes(config, 32_768)
    assert state["kv_per_token"] == 3 * 2_048
    assert state["recurrent"] == 21 * 1_048_576
    assert state["at"]["32768"] == 201_326_592 + 22_020_096
    assert crossover_tokens(state) == 3_584
    pure = decode_state_bytes(config | {"layout": "A*24"}, 32_768)
    assert pure["at"]["32768"] == 1_610_612_736


def test_no_crossover_without_both_parts():
    for layout in ("GGGG", "AAAA", "W", "GW", "-"):
        assert crossover_tokens(decode_state_bytes({"layout": layout}, 64)) is None
    assert crossover_tokens(decode_state_bytes({"layout": "WA", "window": 128}, 64)) == 128


def test_large_model_allocates_nothing():
    state = decode_state_bytes(LARGE, 1_000_000, batch=64)
    assert state["kv_per_token"] == 64 * 16 * 2 * 8 * 128 * 4
    assert state["at"]["1000000"] == 1_000_000 * state["kv_per_token"] + 64 * 48 * 64 * 128 * 128 * 4


@pytest.mark.parametrize(("context", "batch", "name"), [(0, 1, "context"), (8, 0, "batch"), (8, 1.5, "batch")])
def test_bad_sizes(context, batch, name):
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        decode_state_bytes({}, context, batch)
