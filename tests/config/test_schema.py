"""The check of a config: names, types, ranges and what goes together."""

import json

import pytest

from hyjax.config import CHOICES, DEFAULTS, RANGES, ConfigError, base, check, validate_model
from hyjax.config.schema import KEYS


def test_defaults_pass_their_own_check():
    assert check({}) == DEFAULTS
    assert check(base()) == DEFAULTS
    assert all(type(value) in (bool, int, float, str, tuple) for key, value in KEYS.items() if key != "model.legend")
    assert set(CHOICES) <= set(KEYS) and set(RANGES) <= set(KEYS)
    assert all(KEYS[key] in choices for key, choices in CHOICES.items())


@pytest.mark.parametrize(
    ("sections", "fragment"),
    [
        (
            {"optimizer": {"schedule": "wsd", "warmup_steps": 600, "decay_steps": 500}},
            "optimizer.decay_steps=500 is more",
        ),
        ({"data": {"source": "text", "path": "x", "checksum": "abc"}}, "data.checksum must be a sha256"),
        (
            {"model": {"position": "learned", "max_positions": 128}},
            "model.max_positions=128 is less than data.seq_len=256",
        ),
        ({"data": {"source": "recall", "seq_len": 32, "num_pairs": 33}}, "data.seq_len=32 must be 66"),
        (
            {"data": {"source": "recall", "seq_len": 66, "num_pairs": 33, "num_keys": 32}},
            "data.num_pairs=33 must be at most data.num_keys=32",
        ),
        (
            {"data": {"source": "recall", "seq_len": 32, "train_sequences": 2**26}},
            "data.train_sequences=67108864 rows of data.seq_len=32 are too many tokens: use at most 4194303",
        ),
        ({"train": {"batch_size": 2**23}}, "of data.seq_len=256 are too many tokens: use at most 1048575"),
        (
            {"optimizer": {"schedule": "wsd", "warmup_steps": 900}},
            "optimizer.decay_steps=0 (a fifth of the steps, 200) is more than train.steps=1000 allows after",
        ),
        (
            {"model": {"tied_embeddings": True, "streams": (3, 4)}},
            "model.tied_embeddings shares one table of ids with the head; model.streams=(3, 4) has a table a stream",
        ),
        ({"data": {"source": "text", "path": "a\0b"}}, "data.path must be without NUL characters"),
        ({"train": {"init_from": "x" * 5000}}, "train.init_from must be at most 4096 bytes long, not 5000: 'xxx"),
        ({"data": {"glob": "a**.txt"}}, "data.glob='a**.txt': '**' must be the whole name of a folder"),
        ({"data": {"workers": 257}}, "data.workers must be at least 0 and at most 256, not 257"),
        ({"eval": {"sample_tokens": 2**20 + 1}}, "eval.sample_tokens must be at least 0 and at most 2**20"),
        ({"data": {"source": "mixture"}}, "data.mixture must name two sources or more"),
        ({"data": {"mixture": ("topics", "stdlib")}}, "are read only by data.source='mixture', not 'topics'"),
        (
            {"data": {"source": "mixture", "mixture": ("topics", "tpics"), "weights": (1, 2)}},
            "data.mixture: 'tpics' is not one of topics, stdlib, bible, text, corpus; did you mean topics?",
        ),
        (
            {"data": {"source": "mixture", "mixture": ("topics", "text"), "weights": (1, 2)}},
            "data.mixture: write 'text:PATH', not 'text'",
        ),
        (
            {"data": {"source": "mixture", "mixture": ("topics:x", "stdlib"), "weights": (1, 2)}},
            "data.mixture: write 'topics', not 'topics:x'",
        ),
        (
            {"data": {"source": "mixture", "mixture": ("topics", "topics"), "weights": (1, 2)}},
            "data.mixture names a source twice; give it one weight",
        ),
        (
            {"data": {"source": "mixture", "mixture": ("topics", "stdlib"), "weights": (1.0,)}},
            "data.weights has 1 entries for the 2 sources of data.mixture",
        ),
        (
            {"data": {"source": "mixture", "mixture": ("topics", "stdlib"), "weights": (1.0, 0.0)}},
            "data.weights[1] must be above 0, not 0.0",
        ),
        ({"data": {"source": "corpus"}}, "data.path is empty: data.source='corpus' reads the folder"),
        ({"data": {"tokenizer": "byte"}}, "or a path to a .json file, not 'byte'; did you mean bytes?"),
        ({"data": {"eos": "</s>"}}, "data.eos='</s>' is a token of the JSON file data.tokenizer, which is 'auto'"),
        ({"train": {"resume": "most"}}, "train.resume must be one of auto, must, not 'most'; did you mean must?"),
        ({"train": {"keep_best": -1}}, "train.keep_best must be at least 0, not -1"),
        ({"train": {"grace_seconds": 0}}, "train.grace_seconds must be at least 1, not 0"),
        ({"train": {"steps": True}}, "train.steps must be a whole number (int), not True (bool)"),
        ({"train": {"steps": None}}, "train.steps must be a whole number (int); None"),
        ({"train": 3}, "train holds keys such as train.steps, it can't be 3"),
        ({"model": {"legend": 3}}, "model.legend must be a dict"),
        ({"model": {"legend": {"A": 3}}}, "model.legend.A must be a dict of fields"),
        ({"model": {"legend": {"AB": {}}}}, "model.legend.AB is not a layer's letter"),
        ({"model": {"legend": {3: {}}}}, "model.legend.3 is not a layer's letter"),
        ({"model": {"legend": {"A": {"layout": "G"}}}}, "can't be the name of a field"),
        ({"model": {"legend": {"A": {"mixer": ()}}}}, "model.legend.A.mixer must be"),
        ({"model": {"legend": {"A": {"x": float("nan")}}}}, "model.legend.A.x must be a finite number"),
        ({"model": {"legend": {"A": {"x": None}}}}, "model.legend.A.x must be numbers"),
        ({"sed": 1}, "sed is not a key of the config; did you mean seed?"),
    ],
)
def test_check_refuses(sections, fragment):
    with pytest.raises(ConfigError) as caught:
        check(sections)
    assert fragment in str(caught.value) and "\n" not in str(caught.value)


def test_base_refuses_names_and_types():
    with pytest.raises(ConfigError, match=r"model\.widht .* model\.width"):
        base(model={"widht": 3})
    with pytest.raises(ConfigError, match=r"model\.width .*write 64"):
        base(model={"width": 64.0})
    with pytest.raises(ConfigError, match=r"model\.legend\.A\.__init__"):
        base(model={"legend": {"A": {"__init__": 3}}})


def test_validate_model_takes_any_mapping():
    from flax.core import FrozenDict
    from ml_collections import ConfigDict, FrozenConfigDict

    part = {"width": 32, "streams": (64, 33), "legend": {"A": {"kv_heads": 2}}}
    whole = {**DEFAULTS["model"], **part}
    for mapping in (
        part,
        FrozenDict(part),
        ConfigDict(part),
        FrozenConfigDict(part),
        json.loads(json.dumps(part)),
    ):
        assert validate_model(mapping) == whole
    assert validate_model(whole) == whole and type(validate_model(ConfigDict(part))["legend"]["A"]) is dict
    with pytest.raises(ConfigError, match=r"model\.width"):
        validate_model({"width": "wide"})
