"""`hyjax plan`'s object and tables."""

import io
import json
import time

import pytest
from rich.console import Console

from hyjax.cost import count_params, decode_state_bytes, flops_per_token
from hyjax.cost.plan import _ranges, plan, show
from tests.cost.common import LARGE, MIXED, RECALL

# spelled out: other programs read these names
KINDS = (
    "embedding", "position", "lm_head", "attention", "recurrence", "mlp", "expert", "shared_expert", "router", "norm",
)  # fmt: skip
# every key of the object, with the types of what is below it
SCHEMA = {
    "layout": str,
    "num_layers": int,
    "attention_layers": [int],
    "params": {
        "total": int,
        "active": int,
        "non_embedding": int,
        "active_non_embedding": int,
        "by_kind": dict.fromkeys(KINDS, int),
    },
    "layers": [{"index": int, "kind": str, "mixer": str | None, "ffn": str | None, "params": int}],
    "flops_per_token": {
        "context": int,
        "model": dict.fromkeys(("attention", "recurrence", "projections", "ffn", "head", "total"), float),
        "hardware": float | None,
    },
    "decode_state_bytes": {
        "kv_per_token": int,
        "window": int,
        "recurrent": int,
        "conv": int,
        "at": dict.fromkeys(("4096", "32768", "131072", "777"), int),
    },
    "crossover_tokens": float | None,
    "pipeline": None,
}  # fmt: skip


def check(value, schema, path="plan"):
    if isinstance(schema, dict):
        assert value.keys() == schema.keys(), path
        for key in schema:
            check(value[key], schema[key], f"{path}.{key}")
    elif isinstance(schema, list):
        for i, item in enumerate(value):
            check(item, schema[0], f"{path}[{i}]")
    elif schema is None:
        assert value is None, path
    else:
        assert isinstance(value, schema) and not isinstance(value, bool), path


@pytest.mark.parametrize("config", [MIXED, RECALL | {"layout": "GGGG"}, {"layout": "A"}], ids=["mixed", "G", "A"])
def test_schema(config):
    result = plan(config, 777)
    check(result, SCHEMA)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_parts_agree_with_each_other():
    result = plan(MIXED, 777, batch=2)
    assert result["attention_layers"] == [2, 3]  # a window layer attends too
    assert [layer["index"] for layer in result["layers"]] == [1, 2, 3, 4, 5]
    assert [(layer["kind"], layer["mixer"], layer["ffn"]) for layer in result["layers"]] == [
        ("G", "gated_linear_attention", "swiglu"),
        ("W", "window_attention", "relu2"),
        ("A", "attention", None),
        ("-", None, "swiglu"),
        ("G", "gated_linear_attention", "swiglu"),
    ]
    by_kind = result["params"]["by_kind"]
    outside = by_kind["embedding"] + by_kind["lm_head"] + 24  # the final norm
    assert sum(layer["params"] for layer in result["layers"]) + outside == result["params"]["total"]
    assert result["params"] == count_params(MIXED)
    assert result["flops_per_token"] == flops_per_token(MIXED, 777)
    assert result["decode_state_bytes"] == decode_state_bytes(MIXED, 777, 2)


def test_large_model_is_planned_at_once():
    start = time.perf_counter()
    result = plan(LARGE, 8192)
    assert time.perf_counter() - start < 5
    assert result["num_layers"] == 64 and result["attention_layers"] == list(range(4, 65, 4))


def printed(config, context, **options) -> str:
    file = io.StringIO()
    show(plan(config, context), console=Console(file=file, **options))
    return file.getvalue()


def test_piped_tables_lose_nothing():
    text = printed(LARGE, 8192)
    assert "…" not in text and "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    for number in ("62,914,577,408", "131,072", "201,326,592", "at 4, 8, 12, ... 64 (every 4)", "1,536 tokens"):
        assert number in text


def test_narrow_terminal_folds():
    text = printed(LARGE, 8192, force_terminal=True, color_system=None, width=40)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 40


def test_ranges():
    assert _ranges([1, 2, 3, 7]) == "1-3, 7"
    assert _ranges(list(range(4, 65, 4))) == "4, 8, 12, ... 64 (every 4)"
    assert _ranges([1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 19]) == "1-2, 4, 6, ... 18-19"
