"""Overrides: what each may change, what is refused and with which words. test_fuzz.py tries random ones."""

import pytest

from hyjax.config import DEFAULTS, ConfigError, check, load
from hyjax.config.schema import KEYS, flatten


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["--config.model.layout=GGAG"], "model.layout", "GGAG"),
        (["-config.model.layout=GA"], "model.layout", "GA"),
        (["--config.model.layout", "GA"], "model.layout", "GA"),
        (["--config.train.steps=10_000"], "train.steps", 10_000),
        (["--config.train.steps=5", "--config.train.steps=7"], "train.steps", 7),
        (["--config.optimizer.learning_rate=1"], "optimizer.learning_rate", 1.0),
        (["--config.model.rope_theta=10000000000"], "model.rope_theta", 1e10),
        (["--config.eval.prompt=a=b --c"], "eval.prompt", "a=b --c"),
        (["--config.eval.prompt="], "eval.prompt", ""),
        (["--config.eval.prompt=--flagfile=x"], "eval.prompt", "--flagfile=x"),
        (["--config.eval.prompt", "def f(x):\n"], "eval.prompt", "def f(x):\n"),
        (["--config.model.qk_norm"], "model.qk_norm", True),
        (["--config.model.qk_norm=true"], "model.qk_norm", True),
        (["--noconfig.model.scan"], "model.scan", False),
        (["--config.model.scan=False"], "model.scan", False),
        (["--config.model.streams=(64,33)"], "model.streams", (64, 33)),
        (["--config.model.streams=[64, 33]"], "model.streams", (64, 33)),
        (["--config.model.streams=64", "--config.model.streams=33"], "model.streams", (33,)),
        (["--config.model.streams=64"], "model.streams", (64,)),
        (["--config.optimizer.decay=()"], "optimizer.decay", ()),
        (["--config.optimizer.decay=embedding"], "optimizer.decay", ("embedding",)),
        (["--config.model.legend.A.kv_heads=4"], "model.legend.A.kv_heads", 4),
        (["--config.model.legend.W.kv_heads=2"], "model.legend.W.kv_heads", 2),
        (["--config.model.legend.W.kv_heads", "2"], "model.legend.W.kv_heads", 2),
        (["--config.model.legend.G.gated"], "model.legend.G.gated", True),
        (["--config.model.legend.G.gated=false"], "model.legend.G.gated", False),
        (["--noconfig.model.legend.G.gated"], "model.legend.G.gated", False),
        (["--config.model.legend.G.eps=1e-5"], "model.legend.G.eps", 1e-5),
        (["--config.model.legend.G.rope_fraction=1"], "model.legend.G.rope_fraction", 1.0),
        (["--config.model.legend.A.ffn=gelu"], "model.legend.A.ffn", "gelu"),
        (["--config.model.legend.-.ffn=gelu"], "model.legend.-.ffn", "gelu"),
        (["--config.model.legend.G.ffn=none"], "model.legend.G.ffn", None),
        (["--config.model.legend.G.ffn=None"], "model.legend.G.ffn", None),
        (
            ["--config.model.legend.H.mixer=('attention','mamba2')"],
            "model.legend.H.mixer",
            ("attention", "mamba2"),
        ),
        (["--config.model.layout=HG", "--config.model.legend.H.mixer=attention"], "model.layout", "HG"),
    ],
)
def test_overrides(path, overrides, key, value):
    got = flatten(check(load(path, overrides)))[key]
    assert got == value and type(got) is type(value)


def test_every_key_can_be_overridden(path):
    """The text of each default is read back as that default, so no key's type is out of the flags' reach."""
    overrides = [f"--config.{key}={value}" for key, value in KEYS.items() if key != "model.legend"]
    config = check(load(path, overrides))
    assert {**config, "model": {**config["model"], "legend": {}}} == DEFAULTS


BAD_OVERRIDES = [
    ("--config.model.widht=3", "model.widht is not a key of the config; did you mean model.width?"),
    ("--config.model.kv_head=3", "did you mean model.kv_heads?"),
    ("--config.layout=G", "layout is not a key of the config; did you mean model.layout?"),
    ("--config.train.learning_rate=1", "did you mean optimizer.learning_rate?"),
    ("--config.modle.width=1", "did you mean model.width?"),
    ("--config.data.qqqq=1", "data has source, path"),
    ("--config.zzzz=1", "a config has seed, model, data"),
    ("--config.model.width.x=1", "model.width.x is not a key"),
    ("--config.model=GGAG", "model is a section"),
    ("--config.model.legend=3", "write model.legend.LETTER.FIELD=VALUE"),
    ("--config.model.legend.A=3", "write model.legend.LETTER.FIELD=VALUE"),
    ("--config.model.legend.AB.ffn=gelu", "write model.legend.LETTER.FIELD=VALUE"),
    ("--config.model.legend.*.ffn=gelu", "write model.legend.LETTER.FIELD=VALUE"),
    ("--config.model.legend.A.ffn.x=1", "model.legend.A.ffn.x: 'ffn.x' can't be the name of a field"),
    ("--config.model.legend.A.__class__=1", "can't be the name of a field"),
    ("--config.model.legend.A.legend=1", "model.legend.A.legend: 'legend' can't be the name of a field"),
    ("--config.model.legend.x.kv_heads=1", "model.legend.x: letter 'x' has no default: give legend.x a mixer"),
    ("--config.model.legend.A.kv_heads=1e3", "model.legend.A.kv_heads must be a whole number (int)"),
    ("--config.model.legend.A.kv_heads=two", "model.legend.A.kv_heads must be a whole number (int)"),
    ("--config.model.legend.A.kv_heads=-2", "model.legend.A.kv_heads must be at least 0"),
    (
        "--config.model.legend.A.mixer=3",
        "model.legend.A.mixer must be a name, a tuple of names or None, not 3",
    ),
    ("--config.model.legend.A.ffn=('gelu','moe')", "model.legend.A.ffn must be a name or None"),
    ("--config.model.legend.A.extra={'a': 1}", "model.legend.A.extra must be numbers, strings"),
    ("--config.model.legend.A.extra=((1,2),3)", "model.legend.A.extra must be numbers, strings"),
    ("--config.model.legend.A.extra=1e999", "model.legend.A.extra must be a finite number"),
    ("--config.train.steps=1e3", "train.steps must be a whole number (int), not 1000.0 (float); write 1000"),
    ("--config.train.steps=100.0", "train.steps must be a whole number (int), not 100.0 (float); write 100"),
    ("--config.train.steps=2.5", "train.steps must be a whole number (int), not 2.5 (float)"),
    ("--config.train.steps=many", "train.steps must be a whole number (int), not 'many' (str)"),
    ("--config.train.steps=True", "train.steps must be a whole number (int), not True (bool)"),
    ("--config.train.steps=None", "train.steps must be a whole number (int); None stands for nothing"),
    ("--config.train.steps=", "train.steps must be a whole number (int), not ''"),
    ("--config.train.steps", "train.steps needs a value"),
    ("--config.train.steps=0", "train.steps must be at least 1, not 0"),
    ("--config.train.steps=" + "9" * 5000, "train.steps"),
    ("--config.seed=-1", "seed must be at least 0"),
    ("--config.seed=4294967296", "seed must be less than 2**32"),
    ("--config.train.steps=2147483648", "train.steps must be less than 2**31 in size"),
    ("--config.model.legend.G.chunk_size=2147483648", "model.legend.G.chunk_size must be less than 2**31 in size"),
    ("--noconfig.train.steps", "train.steps"),
    ("--noconfig.model.scan=true", "--noconfig.model.scan takes no value"),
    ("--config.model.scan=maybe", "model.scan must be true or false (bool), not 'maybe' (str)"),
    ("--config.model.rope_theta=nan", "model.rope_theta must be a finite number"),
    ("--config.model.rope_theta=-inf", "model.rope_theta must be a finite number"),
    ("--config.model.rope_theta=None", "model.rope_theta must be a number (float); None"),
    ("--config.optimizer.learning_rate=0", "optimizer.learning_rate must be above 0, not 0.0"),
    ("--config.optimizer.learning_rate=1e-46", "optimizer.learning_rate must be 0 or from 1.2e-38 to 3.4e38 in size"),
    ("--config.model.norm_eps=1e39", "model.norm_eps must be 0 or from 1.2e-38 to 3.4e38 in size"),
    ("--config.model.norm_eps=" + "9" * 20, "model.norm_eps must be less than 2**53 in size"),
    ("--config.model.rope_theta=0.5", "model.rope_theta must be at least 1, not 0.5"),
    ("--config.optimizer.b1=1", "optimizer.b1 must be at least 0 and below 1 in float32, not 1.0"),
    ("--config.optimizer.b1=0.99999999", "optimizer.b1 must be at least 0 and below 1 in float32, not 0.99999999"),
    ("--config.model.streams=(3.5,4)", "model.streams[0] must be a whole number (int), not 3.5 (float)"),
    ("--config.model.streams=(4,True)", "model.streams[1] must be a whole number (int), not True (bool)"),
    ("--config.model.streams=a", "model.streams[0] must be a whole number (int), not 'a' (str)"),
    ("--config.model.streams=None", "model.streams[0] must be a whole number (int); None"),
    ("--config.model.streams=(0,4)", "model.streams[0] must be at least 1"),
    ("--config.model.streams={3,4}", "model.streams must be a tuple (tuple)"),
    ("--config.model.streams=(3,", "model.streams[0] must be a whole number (int), not '(3,' (str)"),
    ("--config.optimizer.decay=(1,)", "optimizer.decay[0] must be a string (str), not 1 (int)"),
    ("--config.optimizer.decay=kernel,embedding", "optimizer.decay: 'kernel,embedding' is no leaf's name"),
    (
        "--config.model.norm=rmsnom",
        "model.norm must be one of rmsnorm, layernorm, not 'rmsnom'; did you mean rmsnorm?",
    ),
    (
        "--config.data.source=wikipedia",
        "data.source must be one of topics, stdlib, bible, text, corpus, mixture, recall",
    ),
    ("--config.model.layout=GG(A", "model.layout: layout 'GG(A': this bracket is never closed (character 3)"),
    ("--config.model.layout=", "model.layout: layout '' is empty"),
    ("--config.model.layout=GGxG", "model.layout: letter 'x' has no default: give legend.x a mixer"),
    ("--config.train.microbatches=3", "batch size of 15 or 18, or 2 or 4 microbatches"),
    ("--config.optimizer.warmup_steps=1001", "optimizer.warmup_steps=1001 is more than train.steps=1000"),
    ("--config.data.path=a.txt", "data.path='a.txt' is read only by data.source='text'"),
    ("--config.data.source=text", "data.path is empty"),
    ("--config.data.checksum=" + "a" * 64, "data.checksum is that of the file data.path"),
    ("--config.data.glob=", "data.glob is empty"),
    ("--config.data.heldout=0", "data.heldout must be above 0 and below 1, not 0.0"),
    ("--config.eval.prompt=\udc80", "eval.prompt must be text that UTF-8 can hold"),
    ("--config", "'--config' is not an override"),
    ("--config=other.py", "is not an override"),
    ("--confg.seed=1", "is not an override"),
    ("seed=1", "is not an override"),
    ("", "is not an override"),
]


@pytest.mark.parametrize(("override", "fragment"), BAD_OVERRIDES, ids=[text[:40] for text, _ in BAD_OVERRIDES])
def test_bad_overrides(path, override, fragment, capsys):
    with pytest.raises(ConfigError) as caught:
        load(path, [override])
    message = str(caught.value)
    assert fragment in message
    assert "\n" not in message and len(message) < 600
    assert capsys.readouterr() == ("", "")
