"""Configs: files, arguments, overrides, the schema check, and the text that they are stored as."""

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyjax import config as config_module
from hyjax.config import (
    CHOICES,
    DEFAULTS,
    ConfigError,
    base,
    check,
    diff,
    fingerprint,
    from_json,
    load,
    parse_arg,
    resolved_text,
    to_json,
    validate_model,
)

FILE = '''"""A config."""
from hyjax.config import base, parse_arg


def get_config(arg=""):
    arg = parse_arg(arg, tiny=False, width=128, rate=3e-3, layout="GGAG")
    width = 32 if arg.tiny else arg.width
    model = dict(layout=arg.layout, width=width, legend=dict(A=dict(kv_heads=2, ffn=None)))
    return base(seed=3, model=model, optimizer=dict(learning_rate=arg.rate))
'''


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("configs") / "example.py"
    file.write_text(FILE)
    return str(file)


def flat(tree, prefix=""):
    """Dotted keys and values of nested dicts, empty dicts kept."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {k: v for key, sub in tree.items() for k, v in flat(sub, f"{prefix}.{key}".lstrip(".")).items()}


KEYS = flat(DEFAULTS)


def test_defaults_pass_their_own_check():
    assert check({}) == DEFAULTS
    assert check(base()) == DEFAULTS
    assert all(
        type(value) in (bool, int, float, str, tuple) for key, value in KEYS.items() if key != "model.legend"
    )
    assert set(CHOICES) <= set(KEYS) and set(config_module.RANGES) <= set(KEYS)
    assert all(KEYS[key] in choices for key, choices in CHOICES.items())


def test_base_is_locked_and_typed():
    config = base(seed=1, model={"width": 64, "legend": {"A": {"kv_heads": 2}}})
    assert config.model.width == 64 and config.model.heads == 4 and config.model.legend.A.kv_heads == 2
    with pytest.raises(AttributeError):
        config.model.widht = 3
    with pytest.raises(AttributeError):
        config.model.legend.W = 3
    assert DEFAULTS["model"]["legend"] == {} and DEFAULTS["seed"] == 0


def test_load(path):
    config = load(path)
    assert (config.seed, config.model.width, config.model.layout) == (3, 128, "GGAG")
    config = load(f"{path}:tiny,rate=1e-2,layout=(GA)*2")
    assert (config.model.width, config.optimizer.learning_rate, config.model.layout) == (32, 0.01, "(GA)*2")
    with pytest.raises(AttributeError):
        config.seed = 4


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
        (["--config.model.streams=64", "--config.model.streams=33"], "model.streams", (64, 33)),
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
    got = config_module._flatten(check(load(path, overrides)))[key]
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
    ("--noconfig.train.steps", "train.steps"),
    ("--noconfig.model.scan=true", "--noconfig.model.scan takes no value"),
    ("--config.model.scan=maybe", "model.scan must be true or false (bool), not 'maybe' (str)"),
    ("--config.model.rope_theta=nan", "model.rope_theta must be a finite number"),
    ("--config.model.rope_theta=-inf", "model.rope_theta must be a finite number"),
    ("--config.model.rope_theta=None", "model.rope_theta must be a number (float); None"),
    ("--config.optimizer.learning_rate=0", "optimizer.learning_rate must be above 0, not 0.0"),
    ("--config.optimizer.b1=1", "optimizer.b1 must be at least 0 and below 1, not 1.0"),
    ("--config.model.streams=(3.5,4)", "model.streams[0] must be a whole number (int), not 3.5 (float)"),
    ("--config.model.streams=(4,True)", "model.streams[1] must be a whole number (int), not True (bool)"),
    ("--config.model.streams=a", "model.streams[0] must be a whole number (int), not 'a' (str)"),
    ("--config.model.streams=None", "model.streams[0] must be a whole number (int); None"),
    ("--config.model.streams=(0,4)", "model.streams[0] must be at least 1"),
    ("--config.model.streams={3,4}", "model.streams must be a tuple (tuple)"),
    ("--config.model.streams=(3,", "model.streams must be a tuple (tuple), not '(3,' (str)"),
    ("--config.optimizer.decay=(1,)", "optimizer.decay[0] must be a string (str), not 1 (int)"),
    ("--config.optimizer.decay=kernel,embedding", "optimizer.decay: 'kernel,embedding' is no leaf's name"),
    (
        "--config.model.norm=rmsnom",
        "model.norm must be one of rmsnorm, layernorm, not 'rmsnom'; did you mean rmsnorm?",
    ),
    ("--config.data.source=wikipedia", "data.source must be one of topics, stdlib, text, recall"),
    ("--config.model.layout=GG(A", "model.layout: layout 'GG(A': this bracket is never closed (character 3)"),
    ("--config.model.layout=", "model.layout: layout '' is empty"),
    ("--config.model.layout=GGxG", "model.layout: letter 'x' has no default: give legend.x a mixer"),
    (
        "--config.model.width=130",
        "model.width=130 is not a multiple of model.heads=4: use a width of 128 or 132",
    ),
    ("--config.model.width=3", "use a width of 4, or set model.head_dim"),
    ("--config.model.kv_heads=3", "model.kv_heads=3 doesn't divide model.heads=4: nearest are 2 or 4"),
    ("--config.train.microbatches=3", "batch size of 15 or 18, or 2 or 4 microbatches"),
    ("--config.optimizer.warmup_steps=1001", "optimizer.warmup_steps=1001 is more than train.steps=1000"),
    ("--config.data.path=a.txt", "data.path='a.txt' is read only by data.source='text'"),
    ("--config.data.source=text", "data.path is empty"),
    ("--config.data.checksum=" + "a" * 64, "data.checksum is that of the file data.path"),
    ("--config.data.glob=", "data.glob is empty"),
    ("--config.data.heldout=0", "data.heldout=0 leaves nothing to evaluate"),
    ("--config.eval.prompt=\udc80", "eval.prompt must be text that UTF-8 can hold"),
    ("--config", "'--config' is not an override"),
    ("--config=other.py", "is not an override"),
    ("--confg.seed=1", "is not an override"),
    ("seed=1", "is not an override"),
    ("", "is not an override"),
]


@pytest.mark.parametrize(
    ("override", "fragment"), BAD_OVERRIDES, ids=[text[:40] for text, _ in BAD_OVERRIDES]
)
def test_bad_overrides(path, override, fragment, capsys):
    with pytest.raises(ConfigError) as caught:
        load(path, [override])
    message = str(caught.value)
    assert fragment in message
    assert "\n" not in message and len(message) < 600
    assert capsys.readouterr() == ("", "")


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
            "model.max_positions=128 is less than the 256 tokens",
        ),
        (
            {
                "model": {"position": "learned", "max_positions": 64},
                "data": {"source": "recall", "num_pairs": 33},
            },
            "66 tokens that data.num_pairs makes",
        ),
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


@pytest.mark.parametrize(
    ("text", "line", "fragment"),
    [
        ("x = 3\ndef get_config(:\n", 2, "invalid syntax"),
        ("x = 1\ny = x / 0\n", 2, "ZeroDivisionError"),
        ("import no_such_module\n", 1, "No module named"),
        ("x = 1\n", 1, "no function get_config"),
        ("get_config = 3\n", 1, "no function get_config"),
        ("def get_config(arg=''):\n    pass\n", 1, "not None"),
        ("def get_config(arg=''):\n    return 3\n", 1, "not 3"),
        ("def get_config(arg=''):\n    x = {}\n    return x['a']\n", 3, "KeyError: 'a'"),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
        (
            "def get_config(arg=''):\n    from hyjax.config import base\n    return base(seed=1.5)\n",
            3,
            "seed must be",
        ),
        ("def get_config(arg=''):\n    return dict(model=dict(widht=3))\n", 1, "did you mean model.width?"),
        ("def get_config(arg=''):\n    raise ValueError('two\\nlines')\n", 2, "ValueError: two lines"),
        ("\0", 1, ""),
    ],
)
def test_bad_files(tmp_path, text, line, fragment):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(file))
    message = str(caught.value)
    assert f"{file}:{line}: " in message or text == "\0"
    assert str(file) in message and fragment in message and "\n" not in message


def test_missing_files(path, tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean .*/example\.py\?"):
        load(path.replace("example", "exampel"))
    with pytest.raises(ConfigError, match="No such file"):
        load(str(tmp_path / "nowhere" / "x.py"))
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match="can't be read"):
        load(str(tmp_path / "folder.py"))
    for spec in ("", "config", "x.txt", "x.pyc", ":tiny"):
        with pytest.raises(ConfigError, match="must be a Python file"):
            load(spec)


def test_argument_of_a_file_without_one(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("from hyjax.config import base\ndef get_config():\n    return base()\n")
    assert check(load(str(file))) == DEFAULTS
    with pytest.raises(ConfigError, match="takes no argument"):
        load(f"{file}:tiny")


def test_parse_arg():
    defaults = {"tiny": False, "width": 128, "rate": 1e-3, "name": "x"}
    assert vars(parse_arg("", **defaults)) == defaults
    got = parse_arg(" tiny, width=64 ,rate=1,name=a=b", **defaults)
    assert vars(got) == {"tiny": True, "width": 64, "rate": 1.0, "name": "a=b"}
    assert type(got.rate) is float
    assert parse_arg("tiny=false", **defaults).tiny is False


@pytest.mark.parametrize(
    ("arg", "fragment"),
    [
        ("widht=3", "config argument widht is not one of tiny, width; did you mean width?"),
        ("width", "config argument width needs a value, as in width=128"),
        ("width=1e3", "config argument width must be a whole number (int), not 1000.0 (float); write 1000"),
        ("width=", "config argument width must be a whole number"),
        ("tiny=3", "config argument tiny must be true or false"),
        ("tiny,tiny", "config argument tiny is given twice"),
        ("=3", "is not one of"),
    ],
)
def test_parse_arg_refuses(arg, fragment):
    with pytest.raises(ConfigError) as caught:
        parse_arg(arg, tiny=False, width=128)
    assert fragment in str(caught.value)


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


def test_only_jax_is_needed_for_a_model_section():
    """ml_collections, absl's flags, flax and grain stay out until a file is loaded."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['ml_collections', 'flax', 'grain', 'tensorboardX']))\n"
        "from hyjax.config import check, validate_model, to_json, fingerprint\n"
        "validate_model({'width': 64}), check({}), to_json({}), fingerprint({})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


SCALARS = st.one_of(st.booleans(), st.integers(1, 64), st.floats(0.01, 0.5), st.text(max_size=8))
FIELDS = st.dictionaries(
    st.sampled_from(["alpha", "beta_2", "gamma"]), SCALARS | st.tuples(SCALARS, SCALARS), max_size=3
)
SECTIONS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32 - 1),
        "model": st.fixed_dictionaries(
            {
                "legend": st.dictionaries(st.sampled_from("AGWx-"), FIELDS, max_size=3),
                "streams": st.lists(st.integers(1, 1000), max_size=3).map(tuple),
                "norm_eps": st.floats(1e-12, 1e-2),
                "qk_norm": st.booleans(),
                "width": st.integers(1, 256).map(lambda w: 4 * w),
            }
        ),
        "optimizer": st.fixed_dictionaries(
            {"decay": st.lists(st.sampled_from(["kernel", "bias"])).map(tuple)}
        ),
        "eval": st.fixed_dictionaries({"prompt": st.text()}),
    }
)


@settings(max_examples=100, deadline=None)
@given(SECTIONS)
def test_json_round_trip(sections):
    try:
        whole = check(sections)
    except ConfigError as error:  # a surrogate in a legend's text
        assert "UTF-8" in str(error)
        return
    config = from_json(to_json(whole))
    assert check(config) == whole and resolved_text(config) == resolved_text(whole)  # values, and types
    assert fingerprint(config) == fingerprint(whole)
    assert diff(config, whole) == []


def test_from_json_refuses():
    for text, fragment in [
        ("{", "not JSON"),
        ("[1]", "it can't be"),
        ('{"seed": 1.5}', "seed must be"),
        ('{"model": {"width": null}}', "model.width must be"),
        ('{"seed": NaN}', "seed must be"),
    ]:
        with pytest.raises(ConfigError) as caught:
            from_json(text)
        assert fragment in str(caught.value)


def changed(key, value):
    """A config that differs from the defaults in `key`, legal by itself."""
    special = {
        "model.layout": "GA",
        "model.legend": {"A": {"ffn": None}},
        "model.streams": (5,),
        "data.source": "stdlib",
        "data.glob": "*.py",
        "eval.prompt": "x",
        "optimizer.decay": ("scale",),
        "train.microbatches": 2,
    }
    section, _, name = key.rpartition(".")
    if key in special:
        new = special[key]
    elif key in CHOICES:
        new = CHOICES[key][-1]
    elif isinstance(value, bool):
        new = not value
    else:
        new = value / 2 if isinstance(value, float) and value else value * 2 or 1
    return {section: {name: new}} if section else {name: new}


def test_fingerprint_and_diff_see_every_key():
    keys = {
        key: value for key, value in KEYS.items() if key not in ("data.path", "data.checksum")
    }  # need source
    seen = {fingerprint({})}
    for key, value in keys.items():
        got = [entry[0] for entry in diff({}, changed(key, value))]
        assert got == ([key] if key != "model.legend" else ["model.legend", "model.legend.A.ffn"])
        seen.add(fingerprint(changed(key, value)))
    assert len(seen) == len(keys) + 1
    assert diff(
        {"model": {"legend": {"A": {"x": 1}}}}, {"model": {"legend": {"A": {"x": 1.0}}}}
    )  # types count


def test_resolved_text():
    lines = resolved_text({"model": {"legend": {"A": {"kv_heads": 2}}}}).splitlines()
    assert lines == sorted(lines) and len(lines) == len(KEYS)
    assert "model.legend.A.kv_heads = 2" in lines and "optimizer.decay = ('kernel',)" in lines
    assert "model.legend = {}" in resolved_text({}).splitlines()


VALUES = st.one_of(
    st.sampled_from(
        [
            "",
            "0",
            "1",
            "-1",
            "1e3",
            "2.5",
            "nan",
            "inf",
            "None",
            "true",
            "False",
            "(1,2)",
            "('a',)",
            "[",
            "{}",
        ]
    ),
    st.sampled_from(
        ["GGAG", "(GA)*3", "GG(", "A*0", "rmsnorm", "wsd", "text", "recall", "128", "16", "kernel"]
    ),
    st.sampled_from(
        [
            "A" * 50,
            "(" * 300,
            "-" * 200 + "1",
            "9" * 400,
            "'",
            "\\",
            "\x00",
            "a b",
            "=",
            "[[[[1]]]]",
            "{1: 2}",
        ]
    ),
    st.integers(-5, 3000).map(str),
    st.floats().map(str),
    st.text(max_size=12),
)
NAMES = st.one_of(
    st.sampled_from(sorted(KEYS)),
    st.builds(
        "model.legend.{}.{}".format,
        st.sampled_from("AGx-*é"),
        st.sampled_from(["kv_heads", "ffn", "mixer", "x"]),
    ),
    st.text(alphabet="abcdemolrwidth._-[]'0", max_size=12),
    st.text(max_size=10),
)
RIGHT_TYPES = {
    bool: ["true", "0"],
    int: ["2", "64"],
    float: ["0.5", "1e-3"],
    str: ["x", "none"],
    tuple: ["()", "(3,4)"],
}
TYPED = st.sampled_from([key for key in sorted(KEYS) if key != "model.legend"]).flatmap(
    lambda key: st.sampled_from([*RIGHT_TYPES[type(KEYS[key])], *CHOICES.get(key, ())]).map(
        lambda text: f"--config.{key}={text}"
    )
)
OVERRIDES = st.one_of(
    TYPED,
    TYPED,
    st.builds("--config.{}={}".format, NAMES, VALUES),
    st.builds("--config.{}={}".format, NAMES, VALUES),
    st.builds("--config.{}".format, NAMES),
    st.builds("--noconfig.{}".format, NAMES),
    VALUES,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(overrides=st.lists(OVERRIDES, max_size=3) | st.lists(TYPED, max_size=3))
def test_any_overrides_give_a_config_or_a_config_error(path, overrides):
    try:
        config = load(path, overrides)
    except ConfigError as error:
        assert str(error) and "\n" not in str(error)
        return
    assert check(from_json(to_json(config))) == check(config)


@settings(max_examples=200, deadline=None)
@given(arg=st.text(alphabet="tinywdhrae=,. 0123456789-", max_size=20))
def test_any_argument_gives_values_or_a_config_error(arg):
    defaults = {"tiny": False, "width": 128, "rate": 1e-3}
    try:
        values = vars(parse_arg(arg, **defaults))
    except ConfigError:
        return
    assert {key: type(value) for key, value in values.items()} == {"tiny": bool, "width": int, "rate": float}
