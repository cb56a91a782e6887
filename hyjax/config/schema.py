"""Configs: the defaults, how a file and overrides change them, and the check that comes before any use.

    config = load("configs/quickstart.py:tiny", ["--config.model.layout=GGAG"])

A config is sections of scalars, strings and tuples; `model.legend` goes one deeper: `legend.LETTER.FIELD`.
Nothing may be None but `mixer` and `ffn` of a legend entry. What is wrong is a `ConfigError`: a sentence that
names the dotted key. Only functions that make or take a ConfigDict import ml_collections.
"""

import ast
import difflib
import hashlib
import inspect
import json
import math
import re
import reprlib
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyjax import layout as layout_language

if TYPE_CHECKING:
    from ml_collections import ConfigDict, FrozenConfigDict

DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "model": {
        "layout": "(GGAG)*2",
        "legend": {},  # letter -> {mixer, ffn, any field of that mixer's or FFN's module}
        "vocab_size": 257,  # outputs of the head, and tokens in where there is one stream
        "streams": (),  # vocabulary of each stream where tokens are [B, T, streams]; embeddings are summed
        "width": 128,
        "heads": 4,
        "kv_heads": 0,  # 0: as many as heads
        "head_dim": 0,  # 0: width // heads
        "window": 128,  # tokens that a W layer sees, the query's own included
        "position": "rope",
        "max_positions": 2048,  # rows of the learned table
        "rope_theta": 10000.0,
        "rope_fraction": 1.0,
        "qk_norm": False,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "ffn": "swiglu",
        "ffn_width": 0,  # 0: 4 * width; swiglu: 8/3 * width, rounded up to a multiple of 8
        "tied_embeddings": False,
        "head_bias": False,
        "dtype": "float32",  # of activations; parameters are always float32
        "state_dtype": "float32",
        "remat": "none",
        "scan": True,
        "implementation": "auto",
        "loss_chunk": 1024,  # tokens whose logits exist at once
        "z_loss": 0.0,
    },
    "data": {
        "source": "topics",
        "path": "",  # source="text": a file or a folder
        "checksum": "",  # of that file: sha256 or sha1, in hex
        "glob": "*",  # which files of that folder
        "tokenizer": "bytes",
        "seq_len": 256,
        "packing": "windows",
        "heldout": 0.1,  # fraction of documents, chosen by hash
        "workers": 0,  # prefetching threads; no value depends on it
        "num_pairs": 16,  # this and the rest: source="recall"
        "num_keys": 64,
        "num_values": 32,
        "train_sequences": 8192,
        "heldout_sequences": 2048,
    },
    "optimizer": {
        "learning_rate": 3e-3,
        "schedule": "cosine",
        "warmup_steps": 0,  # optimizer steps
        "decay_steps": 0,  # wsd: the last steps, in which the rate falls
        "final_fraction": 0.1,  # of the learning rate, at the end
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decay": ("kernel",),  # names of the leaves that are decayed
        "clip_norm": 1.0,  # 0: off
    },
    "train": {
        "steps": 1000,
        "batch_size": 16,
        "microbatches": 1,
        "log_every": 10,
        "checkpoint_every": 200,
        "keep": 2,
    },
    "eval": {
        "every": 200,  # 0: never during training
        "batches": 8,  # of each periodic evaluation
        "final": True,  # the whole held-out set at the end
        "prompt": "",
        "sample_tokens": 200,
        "temperature": 0.8,
    },
}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.position": ("rope", "learned", "none"),
    "model.norm": ("rmsnorm", "layernorm"),
    "model.ffn": ("swiglu", "gelu", "relu2"),
    "model.dtype": ("float32", "bfloat16"),
    "model.state_dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "full", "dots"),
    "model.implementation": ("auto", "reference", "xla", "pallas"),
    "data.source": ("topics", "stdlib", "text", "recall"),
    "data.tokenizer": ("bytes", "letters"),
    "data.packing": ("windows", "best_fit"),
    "optimizer.schedule": ("cosine", "wsd", "constant"),
}


Range = tuple[str, Callable[[float], bool]]
_ONE_UP: Range = ("at least 1", lambda x: x >= 1)
_ABOVE_ZERO: Range = ("above 0", lambda x: x > 0)
_ZERO_UP: Range = ("at least 0", lambda x: x >= 0)
_BELOW_ONE: Range = ("at least 0 and below 1", lambda x: 0 <= x < 1)

# Numbers that are not listed: whole numbers are at least 1, others above 0.
RANGES: dict[str, Range] = {
    **dict.fromkeys(["seed", "model.kv_heads", "model.head_dim", "model.ffn_width"], _ZERO_UP),
    **dict.fromkeys(["data.workers", "optimizer.warmup_steps", "optimizer.decay_steps"], _ZERO_UP),
    **dict.fromkeys(["model.z_loss", "optimizer.weight_decay", "optimizer.clip_norm"], _ZERO_UP),
    **dict.fromkeys(["eval.every", "eval.sample_tokens", "eval.temperature"], _ZERO_UP),
    **dict.fromkeys(["data.heldout", "optimizer.b1", "optimizer.b2"], _BELOW_ONE),
    "optimizer.final_fraction": ("at least 0 and at most 1", lambda x: 0 <= x <= 1),
    "model.rope_fraction": ("above 0 and at most 1", lambda x: 0 < x <= 1),
}

# What a tuple holds, and so what an empty one would.
ELEMENTS: dict[str, type] = {"model.streams": int, "optimizer.decay": str}

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", tuple: "a tuple"}


class ConfigError(ValueError):
    """Something in a config, an override or a config's argument is wrong: one sentence that names the key."""


def _flatten(config: Mapping, prefix: str = "") -> dict[str, Any]:
    """`{"model.width": 128, ...}`; an empty mapping (a legend) stays as a value."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _plain(value: Any) -> Any:
    """A mapping of any kind (ConfigDict, FrozenDict) as nested dicts, lists as tuples: JSON has no tuple."""
    if hasattr(value, "items"):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


_FLAT = _flatten(DEFAULTS)


_show = reprlib.Repr(maxstring=80, maxother=80).repr  # a value for a message, on one line and not too long


def _near(word: str, words: Iterable[str]) -> str:
    """`"; did you mean ...?"` where one of `words` is close to `word`, else the empty string."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _unknown(key: str) -> ConfigError:
    """The error for a dotted key that DEFAULTS doesn't have, with the nearest one that it has."""
    section, _, last = key.rpartition(".")
    moved = [name for name in _FLAT if name.rpartition(".")[2] == last]  # the right name in the wrong section
    hint = f"; did you mean {moved[0]}?" if moved else ""
    if not hint and isinstance(DEFAULTS.get(section), dict):
        close = _near(last, DEFAULTS[section]).replace("mean ", f"mean {section}.")
        hint = close or f"; {section} has {', '.join(DEFAULTS[section])}"
    hint = hint or _near(key, [*DEFAULTS, *_FLAT]) or f"; a config has {', '.join(DEFAULTS)}"
    return ConfigError(f"{_clip(key)} is not a key of the config{hint}")


def _clip(key: str) -> str:
    """A key for a message: anything that can't be a key is quoted."""
    return key if re.fullmatch(r"[\w.-]{1,80}", key) else _show(key)


def _wrong_type(key: str, value: object, kind: type) -> ConfigError:
    """The error for a value of another type than `kind`, with what to write instead where that is plain."""
    wanted = f"{key} must be {_TYPES[kind]} ({kind.__name__})"
    if value is None:
        return ConfigError(f"{wanted}; None stands for nothing in a config")
    hint = f"; write {int(value)}" if kind is int and isinstance(value, float) and value.is_integer() else ""
    return ConfigError(f"{wanted}, not {_show(value)} ({type(value).__name__}){hint}")


def _typed(key: str, value: Any, kind: Any) -> Any:
    """`value` if it is of type `kind` (a whole number does for float) and can be stored; else ConfigError."""
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if isinstance(value, int) and abs(value) >= 2**32:
        raise ConfigError(f"{key} must be less than 2**32 in size")
    if type(value) is not kind:
        raise _wrong_type(key, value, kind)
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{key} must be a finite number, not {value}")
    if kind is str and any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(f"{key} must be text that UTF-8 can hold, not {_show(value)}")
    return value


def _check_type(key: str, value: Any, alike: str) -> Any:
    """`value`, of the type that the key `alike` has in DEFAULTS (a whole number becomes a float there)."""
    value = _typed(key, value, type(_FLAT[alike]))
    if isinstance(value, tuple):
        return tuple(_typed(f"{key}[{i}]", element, ELEMENTS[alike]) for i, element in enumerate(value))
    return value


def _check_range(key: str, value: Any, alike: str) -> None:
    """ConfigError for a number out of the range of the key `alike`, or a string that isn't a choice of it."""
    if isinstance(value, tuple):
        for i, element in enumerate(value):
            _check_range(f"{key}[{i}]", element, alike)
    elif isinstance(value, str):
        if value not in (choices := CHOICES.get(alike, (value,))):
            near = _near(value, choices)
            raise ConfigError(f"{key} must be one of {', '.join(choices)}, not {_show(value)}{near}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        words, holds = RANGES.get(alike, _ONE_UP if isinstance(value, int) else _ABOVE_ZERO)
        if not holds(value):
            raise ConfigError(f"{key} must be {words}, not {value}")


def _merge(defaults: Mapping, given: Any, prefix: str = "") -> dict[str, Any]:
    """`defaults` with the values of `given` (plain) in their place, names and types checked."""
    if not isinstance(given, dict):
        name, example = prefix.rstrip(".") or "a config", f"{prefix}{next(iter(defaults))}"
        raise ConfigError(f"{name} holds keys such as {example}, it can't be {_show(given)}")
    merged = {key: dict(value) if isinstance(value, dict) else value for key, value in defaults.items()}
    for key, value in given.items():
        name = f"{prefix}{key}"
        if key not in defaults:
            raise _unknown(name)
        if name == "model.legend":
            merged[key] = _check_legend(value)
        elif isinstance(defaults[key], dict):
            merged[key] = _merge(defaults[key], value, f"{name}.")
        else:
            merged[key] = _check_type(name, value, name)
    return merged


def _check_legend(legend: Any) -> dict[str, dict[str, Any]]:
    """The legend (plain) with its letters and fields checked; the models know which fields a mixer has."""
    if not isinstance(legend, dict):
        raise ConfigError(f"model.legend must be a dict such as dict(A=dict(heads=2)), not {_show(legend)}")
    checked: dict[str, dict[str, Any]] = {}
    for letter, entry in legend.items():
        key = f"model.legend.{_clip(str(letter))}"
        if not (isinstance(letter, str) and layout_language.is_letter(letter)):
            raise ConfigError(f"{key} is not a layer's letter: use one ASCII letter or '-'")
        if not isinstance(entry, dict):
            raise ConfigError(f"{key} must be a dict of fields such as dict(kv_heads=2), not {_show(entry)}")
        checked[letter] = {name: _check_field(f"{key}.{name}", name, value) for name, value in entry.items()}
    return checked


def _check_field(key: str, name: Any, value: Any) -> Any:
    """One field of a legend entry: one that the model section has too is checked as there."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", str(name)) or name in ("layout", "legend"):
        raise ConfigError(f"{key}: {_show(name)} can't be the name of a field")
    if name in ("mixer", "ffn"):
        names = value if type(value) is tuple and value and name == "mixer" else (value,)
        if value is not None and not all(type(part) is str and part for part in names):
            wanted = "a name, a tuple of names" if name == "mixer" else "a name"
            raise ConfigError(f"{key} must be {wanted} or None, not {_show(value)}")
        return value
    if (alike := f"model.{name}") in _FLAT:
        value = _check_type(key, value, alike)
        _check_range(key, value, alike)
        return value
    for part in value if type(value) is tuple else (value,):
        if type(part) not in (bool, int, float, str):
            raise ConfigError(f"{key} must be numbers, strings, true or false, not {_show(value)}")
        _typed(key, part, type(part))
    return value


def _multiples_near(value: int, unit: int) -> str:
    """`"128 or 132"`: the multiples of `unit` on both sides of `value`."""
    low = value - value % unit
    return f"{low} or {low + unit}" if low else f"{unit}"


def _divisors_near(value: int, wanted: int) -> str:
    """`"2 or 4"`: the divisors of `value` on both sides of `wanted`."""
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    divisors = small + [value // d for d in small]
    below, above = max(d for d in divisors if d < wanted), [d for d in divisors if d > wanted]
    return f"{below} or {min(above)}" if above else f"{below}"


def _check_model(model: Mapping) -> None:
    """The model section's values, one by one and against each other."""
    for name, value in model.items():
        _check_range(f"model.{name}", value, f"model.{name}")
    try:
        for letter in dict.fromkeys(layout_language.parse(model["layout"])):
            layout_language.kind_of(letter, model["legend"])
    except ValueError as error:
        raise ConfigError(f"model.layout: {str(error).splitlines()[0]}") from None
    width, heads, kv_heads = model["width"], model["heads"], model["kv_heads"]
    if not model["head_dim"] and width % heads:
        raise ConfigError(
            f"model.width={width} is not a multiple of model.heads={heads}: use a width of "
            f"{_multiples_near(width, heads)}, or set model.head_dim"
        )
    if kv_heads and heads % kv_heads:
        near = _divisors_near(heads, kv_heads)
        raise ConfigError(f"model.kv_heads={kv_heads} doesn't divide model.heads={heads}: nearest are {near}")


def validate_model(model: Mapping) -> dict[str, Any]:
    """A whole model section as a plain dict: `model` (any mapping, any part) over the defaults, checked.

    Raises ConfigError. Needs no ml_collections. Lists become tuples.
    """
    checked = _merge(DEFAULTS["model"], _plain(model), "model.")
    _check_model(checked)
    return checked


def _check_data(data: Mapping) -> None:
    """The data section's keys against each other."""
    path, source, checksum = data["path"], data["source"], data["checksum"]
    if source == "text" and not path:
        raise ConfigError("data.path is empty: data.source='text' reads the file or folder that it names")
    if path and source != "text":
        raise ConfigError(f"data.path={_show(path)} is read only by data.source='text', not {source!r}")
    if checksum and not path:
        raise ConfigError("data.checksum is that of the file data.path, which is empty")
    if not re.fullmatch(r"|[0-9a-f]{40}|[0-9a-f]{64}", checksum):
        raise ConfigError(f"data.checksum must be a sha256 or sha1 in lower-case hex, not {_show(checksum)}")
    if not data["glob"]:
        raise ConfigError("data.glob is empty: '*' means every file")


def _check_together(config: Mapping) -> None:
    """What one section asks of another."""
    model, data, optimizer, train = config["model"], config["data"], config["optimizer"], config["train"]
    batch, parts, steps = train["batch_size"], train["microbatches"], train["steps"]
    if batch % parts:
        raise ConfigError(
            f"train.batch_size={batch} can't be split into train.microbatches={parts}: use a batch size of "
            f"{_multiples_near(batch, parts)}, or {_divisors_near(batch, parts)} microbatches"
        )
    warmup, decay = optimizer["warmup_steps"], optimizer["decay_steps"]
    if warmup > steps:
        raise ConfigError(f"optimizer.warmup_steps={warmup} is more than train.steps={steps}")
    if optimizer["schedule"] == "wsd" and warmup + decay > steps:
        most = f"more than train.steps={steps} allows after the warm-up: {steps - warmup}"
        raise ConfigError(f"optimizer.decay_steps={decay} is {most}")
    for name in optimizer["decay"]:
        if not name.isidentifier():
            raise ConfigError(f"optimizer.decay: {_show(name)} is no leaf's name; write ('kernel', 'weight')")
    recall, rows = data["source"] == "recall", model["max_positions"]
    key, length = ("data.num_pairs", 2 * data["num_pairs"]) if recall else ("data.seq_len", data["seq_len"])
    if model["position"] == "learned" and length > rows:
        raise ConfigError(f"model.max_positions={rows} is less than the {length} tokens that {key} makes")
    if not recall and data["heldout"] == 0 and (config["eval"]["every"] or config["eval"]["final"]):
        raise ConfigError("data.heldout=0 leaves nothing to evaluate: set eval.every=0, eval.final=false too")


def check(config: Mapping) -> dict[str, Any]:
    """A whole config as a plain dict: `config` (any mapping, any part) over the defaults, every check made.

    Raises ConfigError. Needs no ml_collections.
    """
    checked = _merge(DEFAULTS, _plain(config))
    _check_model(checked["model"])
    for key in _FLAT:
        section, _, name = key.rpartition(".")
        _check_range(key, checked[section][name] if section else checked[name], key)
    _check_data(checked["data"])
    _check_together(checked)
    if _plain(json.loads(json.dumps(checked, allow_nan=False))) != checked:
        raise ConfigError("this config changes on its way through JSON; use only scalars, strings and tuples")
    return checked


def _locked(plain: Mapping) -> "ConfigDict":
    """A plain config as a ConfigDict that takes no new keys."""
    from ml_collections import ConfigDict

    return ConfigDict(plain).lock()


def _frozen(config: Mapping) -> "FrozenConfigDict":
    """Any config, checked, as a FrozenConfigDict."""
    from ml_collections import FrozenConfigDict

    return FrozenConfigDict(_locked(check(config)))


def base(**sections: Any) -> "ConfigDict":
    """The defaults with some keys changed, locked: what a config file's `get_config` returns.

        base(seed=1, model=dict(layout="GGAG", legend=dict(A=dict(kv_heads=2))))

    Names and types are checked here; values are when it is loaded, after the overrides.
    """
    return _locked(_merge(DEFAULTS, _plain(sections)))


def _literal(text: str) -> Any:
    """The Python literal that `text` spells (true, false, none too), lists as tuples; else `text` itself."""
    word = text.strip()
    try:
        return _plain(ast.literal_eval(word.capitalize() if word in ("true", "false", "none") else word))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _from_text(key: str, text: str, kind: type) -> Any:
    """`text` as a value of type `kind`; else ConfigError."""
    return _typed(key, text if kind is str else _literal(text), kind)


def parse_arg(arg: str, **defaults: bool | int | float | str) -> types.SimpleNamespace:
    """The argument of a config file, `"tiny,width=64"`, as attributes: each of its default's type.

        arg = parse_arg(arg, tiny=False, width=128)      # arg.tiny, arg.width

    A name alone sets a boolean. Raises ConfigError for an unknown name, one given twice, or a wrong type.
    """
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in arg.split(","))):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        key = f"config argument {_clip(name)}"
        if name not in defaults:
            raise ConfigError(f"{key} is not one of {', '.join(defaults) or 'none'}{_near(name, defaults)}")
        if name in values:
            raise ConfigError(f"{key} is given twice")
        kind = type(defaults[name])
        if not equals and kind is not bool:
            raise ConfigError(f"{key} needs a value, as in {name}={defaults[name]}")
        values[name] = _from_text(key, text if equals else "true", kind)
    return types.SimpleNamespace(**{**defaults, **values})


def _run_file(path: str, argument: str | None) -> dict[str, Any]:
    """What `get_config(argument)` of the Python file at `path` returns, names and types checked."""
    try:
        code = compile(Path(path).read_bytes(), path, "exec")
    except OSError as error:
        near = _near(path, map(str, Path(path).parent.glob("*.py")))
        raise ConfigError(f"config file {path} can't be read ({error.strerror}){near}") from None
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(f"config file {_show(path)} can't be read ({error})") from None
    module = types.ModuleType("config_file")
    module.__file__ = path
    try:
        exec(code, module.__dict__)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise ConfigError("there is no function get_config(arg='') that returns hyjax.config.base(...)")
        if argument is not None and not inspect.signature(get_config).parameters:
            raise ConfigError(f"get_config() takes no argument: leave out {_show(':' + argument)}")
        result = get_config() if argument is None else get_config(argument)
        if not hasattr(result, "items"):
            raise ConfigError(f"get_config must return hyjax.config.base(...), not {_show(result)}")
        return _merge(DEFAULTS, _plain(result))
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = [1, *(frame.lineno for frame in frames if frame.filename == path)][-1]
        text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}:{line}: {' '.join(text.split())}") from error


def _read_overrides(overrides: Sequence[str]) -> dict[str, list[str]]:
    """`["--config.seed=9", "--noconfig.model.scan"]` -> `{"seed": ["9"], "model.scan": ["false"]}`"""
    texts: dict[str, list[str]] = {}
    queue = list(overrides)
    while queue:
        argument = queue.pop(0)
        match = re.fullmatch(r"--?(no)?config\.([^=]+)(?:=(.*))?", argument, re.DOTALL)
        if not match:
            raise ConfigError(f"{_show(argument)} is not an override such as --config.train.steps=100")
        negated, key, text = match.groups()
        if negated and text is not None:
            raise ConfigError(f"{_clip(key)}: --noconfig.{_clip(key)} takes no value")
        if text is None and (negated or isinstance(_FLAT.get(key), bool)):
            text = "false" if negated else "true"
        elif text is None and queue and not re.match(r"--?(no)?config\.", queue[0]):
            text = queue.pop(0)
        elif text is None and key.startswith("model.legend."):
            text = "true"
        elif text is None:
            raise ConfigError(f"{_clip(key)} needs a value: write --config.{_clip(key)}=VALUE")
        texts.setdefault(key, []).append(text)
    return texts


def _override_legend(legend: dict[str, dict[str, Any]], key: str, text: str) -> None:
    """Set `model.legend.<letter>.<field>` from text: of the type that it has, else the literal it spells."""
    letter, _, name = key.removeprefix("model.legend").removeprefix(".").partition(".")
    if not (name and layout_language.is_letter(letter)):
        raise ConfigError(f"{_clip(key)} can't be set: write model.legend.LETTER.FIELD=VALUE")
    entry = legend.setdefault(letter, {})
    known = entry.get(name, DEFAULTS["model"].get(name))
    free = known is None or name in ("mixer", "ffn")
    value = _literal(text) if free else _from_text(key, text, type(known))
    entry[name] = _check_field(key, name, value)


def _override(config: "ConfigDict", key: str, texts: list[str]) -> None:
    """Set a key of the locked `config`, by ml_collections' flags (repeats: the last counts, or a tuple)."""
    from absl import flags
    from ml_collections import config_flags

    if key in DEFAULTS and isinstance(DEFAULTS[key], dict):
        raise ConfigError(f"{key} is a section: set a key of it, such as {key}.{next(iter(DEFAULTS[key]))}")
    if key not in _FLAT:
        raise _unknown(key)
    kind = type(_FLAT[key])
    for text in texts:
        if kind is tuple and isinstance(value := _literal(text), dict | set):  # a set has no order
            raise _wrong_type(key, value, kind)
    argv = ["hyjax", *(f"--config.{key}={text}" for text in texts)]
    flag_values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=flag_values, sys_argv=argv)
        flag_values(argv)
    except Exception as error:
        for text in texts:
            _from_text(key, text, kind)  # says what is wrong, and what to write
        raise ConfigError(f"{key}={_show(texts[-1])} can't be read: {_show(str(error))}") from error


def load(spec: str, overrides: Sequence[str] = ()) -> "FrozenConfigDict":
    """The config of `FILE.py[:arg]` after `--config.KEY=VALUE` overrides, checked and frozen.

    `--config.KEY VALUE`, `--config.KEY` and `--noconfig.KEY` (booleans) work too; the last of several counts.
    `--config.model.legend.LETTER.FIELD=VALUE` may name what the file lacks. Raises ConfigError.
    """
    match = re.fullmatch(r"(.*?\.py)(?::(.*))?", spec, re.DOTALL)
    if not match:
        raise ConfigError(f"config {_show(spec)} must be a Python file, written FILE.py or FILE.py:arg")
    plain = _run_file(*match.groups())
    texts = _read_overrides(overrides)
    for key in [key for key in texts if re.match(r"model\.legend(\.|$)", key)]:
        _override_legend(plain["model"]["legend"], key, texts.pop(key)[-1])
    config = _locked(plain)
    for key, values in texts.items():
        _override(config, key, values)
    return _frozen(config)


def to_json(config: Mapping) -> str:
    """The whole config as one JSON object with sorted keys; `from_json` reads it."""
    return json.dumps(check(config), sort_keys=True, indent=1, allow_nan=False)


def from_json(text: str) -> "FrozenConfigDict":
    """The config that `to_json` wrote, checked; a key it lacks takes its default. Raises ConfigError."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the stored config is not JSON: {error}") from None
    return _frozen(config)


def resolved_text(config: Mapping) -> str:
    """One line a key, sorted: `model.width = 128`. What the workdir and the golden files hold."""
    return "".join(f"{key} = {value!r}\n" for key, value in sorted(_flatten(check(config)).items()))


def fingerprint(config: Mapping) -> str:
    """16 hex digits that differ where any value of two configs differs."""
    return hashlib.sha256(to_json(config).encode()).hexdigest()[:16]


def diff(a: Mapping, b: Mapping) -> list[tuple[str, Any, Any]]:
    """(key, value in a, value in b) where two configs differ; "(absent)" for a legend field one lacks."""
    left, right = _flatten(check(a)), _flatten(check(b))
    keys = sorted(left.keys() | right.keys())
    pairs = [(key, left.get(key, "(absent)"), right.get(key, "(absent)")) for key in keys]
    return [(key, x, y) for key, x, y in pairs if repr(x) != repr(y)]
