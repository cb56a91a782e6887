"""Configs from files: get_config, its argument, what can be wrong with either."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.config import DEFAULTS, ConfigError, base, check, load, parse_arg


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


@settings(max_examples=200, deadline=None)
@given(arg=st.text(alphabet="tinywdhrae=,. 0123456789-", max_size=20))
def test_any_argument_gives_values_or_a_config_error(arg):
    defaults = {"tiny": False, "width": 128, "rate": 1e-3}
    try:
        values = vars(parse_arg(arg, **defaults))
    except ConfigError:
        return
    assert {key: type(value) for key, value in values.items()} == {"tiny": bool, "width": int, "rate": float}
