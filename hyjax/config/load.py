"""From a file, its argument and overrides on the command line to a checked config."""

import ast
import contextlib
import inspect
import re
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyjax import layout as layout_language
from hyjax.config.defaults import DEFAULTS
from hyjax.config.errors import ConfigError, clip, near, show
from hyjax.config.schema import KEYS, check, check_field, check_field_name, check_value, merge, plain, typed, unknown

if TYPE_CHECKING:
    from ml_collections import ConfigDict, FrozenConfigDict


def base(**sections: Any) -> "ConfigDict":
    """The defaults with some keys changed, locked: what a config file's `get_config` returns.

        base(seed=1, model=dict(layout="GGAG", legend=dict(A=dict(kv_heads=2))))

    Each key is checked here; what goes together is when it is loaded, after the overrides.
    """
    from ml_collections import ConfigDict

    return ConfigDict(merge(DEFAULTS, plain(sections))).lock()


def frozen(config: Mapping) -> "FrozenConfigDict":
    """Any config, checked, as a FrozenConfigDict."""
    from ml_collections import FrozenConfigDict

    return FrozenConfigDict(check(config))


def load(spec: str, overrides: Sequence[str] = ()) -> "FrozenConfigDict":
    """The config of `FILE.py[:arg]` after `--config.KEY=VALUE` overrides, checked and frozen.

    `--config.KEY VALUE`, `--config.KEY` and `--noconfig.KEY` (booleans) work too; the last of several counts.
    `--config.model.legend.LETTER.FIELD=VALUE` may name what the file lacks. Raises ConfigError.
    """
    match = re.fullmatch(r"(.*?\.py)(?::(.*))?", spec, re.DOTALL)
    if not match:
        raise ConfigError(f"config {show(spec)} must be a Python file, written FILE.py or FILE.py:arg")
    config = _run_file(*match.groups())
    for key, text in _read_overrides(overrides):
        _override(config, key, text)
    return frozen(config)


# ------------------------------------------------------------------------------------------------ the file


def _run_file(path: str, argument: str | None) -> dict[str, Any]:
    """What `get_config(argument)` of the Python file at `path` returns, names and values checked."""
    try:
        code = compile(Path(path).read_bytes(), path, "exec")
    except OSError as error:
        hint = near(path, map(str, Path(path).parent.glob("*.py")))
        raise ConfigError(f"config file {path} can't be read ({error.strerror}){hint}") from None
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(f"config file {show(path)} can't be read ({error})") from None
    module = types.ModuleType("config_file")
    module.__file__ = path
    try:
        exec(code, module.__dict__)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise ConfigError("there is no function get_config(arg='') that returns hyjax.config.base(...)")
        if argument is not None and not inspect.signature(get_config).parameters:
            raise ConfigError(f"get_config() takes no argument: leave out {show(':' + argument)}")
        result = get_config() if argument is None else get_config(argument)
        if not hasattr(result, "items"):
            raise ConfigError(f"get_config must return hyjax.config.base(...), not {show(result)}")
        return merge(DEFAULTS, plain(result))
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = [1, *(frame.lineno for frame in frames if frame.filename == path)][-1]
        text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}:{line}: {' '.join(text.split())}") from error


def parse_arg(arg: str, **defaults: bool | int | float | str) -> types.SimpleNamespace:
    """The argument of a config file, `"tiny,width=64"`, as attributes: each of its default's type.

        arg = parse_arg(arg, tiny=False, width=128)      # arg.tiny, arg.width

    A name alone sets a boolean. Raises ConfigError for an unknown name, one given twice, or a wrong type.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in arg.split(","))):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        key = f"config argument {clip(name)}"
        if name not in defaults:
            raise ConfigError(f"{key} is not one of {', '.join(defaults) or 'none'}{near(name, defaults)}")
        if name in values:
            raise ConfigError(f"{key} is given twice")
        kind = type(defaults[name])
        if not equals and kind is not bool:
            raise ConfigError(f"{key} needs a value, as in {name}={defaults[name]}")
        values[name] = typed(key, _from_text(text if equals else "true", kind), kind)
    return types.SimpleNamespace(**{**defaults, **values})


# ------------------------------------------------------------------------------------------------ overrides


def _read_overrides(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """`["--config.seed=9", "--noconfig.model.scan"]` -> `[("seed", "9"), ("model.scan", "false")]`"""
    pairs: list[tuple[str, str]] = []
    queue = list(overrides)
    while queue:
        argument = queue.pop(0)
        match = re.fullmatch(r"--?(no)?config\.([^=]+)(?:=(.*))?", argument, re.DOTALL)
        if not match:
            last = pairs[-1][0] if pairs else ""
            switch = argument.lower() in ("true", "false") and isinstance(KEYS.get(last), bool)
            hint = f"--config.{last}={argument}" if switch else "--config.train.steps=100"
            raise ConfigError(f"{show(argument)} is not an override such as {hint}")
        negated, key, text = match.groups()
        if negated and text is not None:
            raise ConfigError(f"{clip(key)}: --noconfig.{clip(key)} takes no value")
        if text is None and (negated or isinstance(KEYS.get(key), bool)):
            text = "false" if negated else "true"
        elif text is None and queue and not re.match(r"--?(no)?config\.", queue[0]):
            text = queue.pop(0)
        elif text is None and key.startswith("model.legend."):
            text = "true"
        elif text is None:
            raise ConfigError(f"{clip(key)} needs a value: write --config.{clip(key)}=VALUE")
        pairs.append((key, text))
    return pairs


def _override(config: dict[str, Any], key: str, text: str) -> None:
    """Set a key of the plain, whole `config` from text."""
    section, _, name = key.rpartition(".")
    if re.match(r"model\.legend(\.|$)", key):
        _override_legend(config["model"]["legend"], key, text)
    elif isinstance(DEFAULTS.get(key), dict):
        raise ConfigError(f"{key} is a section: set a key of it, such as {key}.{next(iter(DEFAULTS[key]))}")
    elif key not in KEYS:
        raise unknown(key)
    else:
        place = config[section] if section else config
        place[name] = check_value(key, _from_text(text, type(KEYS[key])), key)


def _override_legend(legend: dict[str, dict[str, Any]], key: str, text: str) -> None:
    """Set `model.legend.<letter>.<field>` from text: of the type that it has, else the literal it spells."""
    letter, _, name = key.removeprefix("model.legend").removeprefix(".").partition(".")
    if not (name and layout_language.is_letter(letter)):
        raise ConfigError(f"{clip(key)} can't be set: write model.legend.LETTER.FIELD=VALUE")
    check_field_name(key, name)
    entry = legend.setdefault(letter, {})
    known = None if name in ("mixer", "ffn") else entry.get(name, DEFAULTS["model"].get(name))
    value = _literal(text) if known is None else typed(key, _from_text(text, type(known)), type(known))
    entry[name] = check_field(key, name, value)


def _from_text(text: str, kind: type) -> Any:
    """The value of type `kind` that `text` spells; where it spells none, whatever it does spell."""
    if kind is str:
        return text
    value = _literal(text)
    if kind is float and isinstance(value, str):
        with contextlib.suppress(ValueError):  # nan and inf: the check has a better word for them than "a string"
            return float(value)
    return (value,) if kind is tuple and isinstance(value, bool | int | float | str | None) else value


def _literal(text: str) -> Any:
    """The Python literal that `text` spells (true, false, none too), lists as tuples; else `text` itself."""
    word = text.strip()
    try:
        return plain(ast.literal_eval(word.capitalize() if word in ("true", "false", "none") else word))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
