"""What the keys of a config ask of each other: each is legal by itself, and the config is not.

Everything here is known from the config alone. What only the data or the parts of a model know (how many ids there
are, the fields of a mixer) is checked where these are built.
"""

import re
from collections.abc import Mapping
from typing import Any

from hyjax import layout as layout_language
from hyjax.config.errors import ConfigError, divisors_near, multiples_near, near, show

# The sources that may stand in a mixture, and whether a path follows.
MIXED_SOURCES = {"topics": False, "stdlib": False, "bible": False, "text": True, "corpus": True}
TOKENIZERS = ("auto", "bytes", "letters")  # and paths that end in .json
PATHS = ("data.path", "data.glob", "data.tokenizer", "train.init_from")
LONGEST_PATH = 4096  # bytes: Linux's limit

MOST_OF_A_STEP = 2**28  # tokens: far more than any run's, and a host makes a batch of them in 5 GB
MOST_OF_RECALL = 2**27  # tokens of a set, which is made in memory: some 5 GB


def check_model(model: Mapping[str, Any]) -> None:
    """The model section's keys against each other; raises ConfigError. Mixers and FFNs check their own fields."""
    key = "model.layout"
    try:
        letters = dict.fromkeys(layout_language.parse(model["layout"]))
        for letter in [*letters, *model["legend"]]:
            key = "model.layout" if letter in letters else f"model.legend.{letter}"
            layout_language.kind_of(letter, model["legend"])
    except ValueError as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from None
    if model["tied_embeddings"] and model["streams"]:
        raise ConfigError(
            f"model.tied_embeddings shares one table of ids with the head; model.streams={model['streams']} has a"
            " table a stream"
        )


def check_together(config: Mapping[str, Any]) -> None:
    """A whole config's keys against each other; raises ConfigError."""
    check_model(config["model"])
    for key in PATHS:
        section, _, name = key.partition(".")
        _check_path(key, config[section][name])
    _check_source(config["data"])
    _check_mixture(config["data"])
    _check_tokenizer(config["data"])
    _check_recall(config["data"])
    _check_steps(config["optimizer"], config["train"])
    _check_lengths(config)


def _check_path(key: str, path: str) -> None:
    """What no file system could take; whether there is such a file, only reading it tells."""
    if "\0" in path:
        raise ConfigError(f"{key} must be without NUL characters, not {show(path)}")
    if len(path.encode()) > LONGEST_PATH:
        raise ConfigError(f"{key} must be at most {LONGEST_PATH} bytes long, not {len(path.encode())}: {show(path)}")


# ------------------------------------------------------------------------------------------------ data


def _check_source(data: Mapping[str, Any]) -> None:
    """A source that reads files has its path, and no other source has one."""
    path, source, checksum = data["path"], data["source"], data["checksum"]
    if source == "text" and not path:
        raise ConfigError("data.path is empty: data.source='text' reads the file or folder that it names")
    if source == "corpus" and not path:
        raise ConfigError("data.path is empty: data.source='corpus' reads the folder that `hyjax data tokenize` made")
    if path and source not in ("text", "corpus"):
        raise ConfigError(f"data.path={show(path)} is read only by data.source='text' or 'corpus', not {source!r}")
    if checksum and source != "text":
        raise ConfigError("data.checksum is that of the file data.path, which data.source='text' reads")
    if not re.fullmatch(r"|[0-9a-f]{40}|[0-9a-f]{64}", checksum):
        raise ConfigError(f"data.checksum must be a sha256 or sha1 in lower-case hex, not {show(checksum)}")
    if not data["glob"]:
        raise ConfigError("data.glob is empty: '*' means every file")
    if any("**" in part and part != "**" for part in data["glob"].split("/")):
        raise ConfigError(f"data.glob={show(data['glob'])}: '**' must be the whole name of a folder, as in '**/*.txt'")


def _check_mixture(data: Mapping[str, Any]) -> None:
    """A mixture has sources that exist, each once and with its weight."""
    source, mixture, weights = data["source"], data["mixture"], data["weights"]
    if source != "mixture":
        if mixture or weights:
            raise ConfigError(f"data.mixture and data.weights are read only by data.source='mixture', not {source!r}")
        return
    if len(mixture) < 2:
        raise ConfigError("data.mixture must name two sources or more, such as ('topics', 'text:PATH', 'corpus:PATH')")
    if len(weights) != len(mixture):
        raise ConfigError(f"data.weights has {len(weights)} entries for the {len(mixture)} sources of data.mixture")
    if len(set(mixture)) < len(mixture):
        raise ConfigError("data.mixture names a source twice; give it one weight")
    for entry in mixture:
        name, _, path = entry.partition(":")
        if name not in MIXED_SOURCES:
            hint = near(name, MIXED_SOURCES)
            raise ConfigError(f"data.mixture: {show(entry)} is not one of {', '.join(MIXED_SOURCES)}{hint}")
        if MIXED_SOURCES[name] != bool(path):
            form = f"'{name}:PATH'" if MIXED_SOURCES[name] else repr(name)
            raise ConfigError(f"data.mixture: write {form}, not {show(entry)}")
        _check_path("data.mixture", path)


def _check_tokenizer(data: Mapping[str, Any]) -> None:
    """A tokenizer's name or a path to its file, and an end mark only where a file may have one."""
    name, eos = data["tokenizer"], data["eos"]
    if name not in TOKENIZERS and not name.endswith(".json"):
        known = ", ".join(TOKENIZERS)
        raise ConfigError(
            f"data.tokenizer must be {known} or a path to a .json file, not {show(name)}{near(name, TOKENIZERS)}"
        )
    if eos and not name.endswith(".json"):
        raise ConfigError(f"data.eos={show(eos)} is a token of the JSON file data.tokenizer, which is {name!r}")


def _check_recall(data: Mapping[str, Any]) -> None:
    """Recall's rows are made from their sizes."""
    if data["source"] != "recall":
        return
    length, pairs, keys = data["seq_len"], data["num_pairs"], data["num_keys"]
    if length != 2 * pairs:
        raise ConfigError(
            f"data.seq_len={length} must be {2 * pairs}: recall shows each of data.num_pairs={pairs} twice"
        )
    if pairs > keys:
        raise ConfigError(f"data.num_pairs={pairs} must be at most data.num_keys={keys}: a sequence's keys differ")
    for side in ("train_sequences", "heldout_sequences"):
        _check_tokens(f"data.{side}", data[side], length, MOST_OF_RECALL)


# ------------------------------------------------------------------------------------------------ training


def _check_steps(optimizer: Mapping[str, Any], train: Mapping[str, Any]) -> None:
    """The schedule fits into the run, and the batch into its parts."""
    batch, parts, steps = train["batch_size"], train["microbatches"], train["steps"]
    if batch % parts:
        raise ConfigError(
            f"train.batch_size={batch} can't be split into train.microbatches={parts}: use a batch size of "
            f"{multiples_near(batch, parts)}, or {divisors_near(batch, parts)} microbatches"
        )
    warmup, decay = optimizer["warmup_steps"], optimizer["decay_steps"]
    if warmup > steps:
        raise ConfigError(f"optimizer.warmup_steps={warmup} is more than train.steps={steps}")
    fall = decay or -(-steps // 5)
    if optimizer["schedule"] == "wsd" and warmup + fall > steps:
        given = "" if decay else f" (a fifth of the steps, {fall})"
        most = f"more than train.steps={steps} allows after optimizer.warmup_steps={warmup}: {steps - warmup}"
        raise ConfigError(f"optimizer.decay_steps={decay}{given} is {most}")
    for name in optimizer["decay"]:
        if not all(part.isidentifier() for part in name.split("/")):
            raise ConfigError(f"optimizer.decay: {show(name)} is no leaf's name; write ('kernel', 'weight')")


def _check_lengths(config: Mapping[str, Any]) -> None:
    """A row fits the table of positions, and a step's tokens can be counted."""
    rows, length = config["model"]["max_positions"], config["data"]["seq_len"]
    if config["model"]["position"] == "learned" and length > rows:
        raise ConfigError(f"model.max_positions={rows} is less than data.seq_len={length}")
    _check_tokens("train.batch_size", config["train"]["batch_size"], length, MOST_OF_A_STEP)


def _check_tokens(key: str, rows: int, length: int, limit: int) -> None:
    if rows * length >= limit:
        fewer = (limit - 1) // length
        instead = f"use at most {fewer}" if fewer else "use shorter rows"
        raise ConfigError(f"{key}={rows} rows of data.seq_len={length} are too many tokens: {instead}")
