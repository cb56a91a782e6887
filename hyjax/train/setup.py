"""What a run does before its first step: data that fits the model, devices, and whether a checkpoint is of this run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from hyjax import config as configs
from hyjax.config import ConfigError
from hyjax.cost import count_params
from hyjax.data import Data, build, fingerprint_diff
from hyjax.data.tokenizers import FileTokenizer
from hyjax.generate import prompt_ids
from hyjax.models import HybridLM
from hyjax.train import optimizer as optimizers
from hyjax.train.checkpoint import Restored
from hyjax.train.export import TOKENIZER

# Keys of the model that change how it is computed, not what: a run may go on with others.
SAME_FUNCTION = ("model.remat", "model.scan", "model.implementation", "model.loss_chunk", "model.state_dtype")


@contextlib.contextmanager
def as_config_errors() -> Iterator[None]:
    """What is refused in here is the config, the data or the workdir, not a fault of the code."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def build_data(config: Mapping[str, Any], model: HybridLM) -> Data:
    """The data, once it is clear that the model can be trained on it."""
    given = config["model"]
    with as_config_errors():
        data = build(config["data"], batch_size=config["train"]["batch_size"], seed=config["seed"])
        if tuple(given["streams"]) != data.streams:
            raise ValueError(f"model.streams is {tuple(given['streams'])}; the data has streams {data.streams}")
        if data.tokenizer and config["eval"]["sample_tokens"]:
            longest = len(prompt_ids(data.tokenizer, config["eval"]["prompt"])) + config["eval"]["sample_tokens"]
            if given["position"] == "learned" and longest > given["max_positions"]:
                raise ValueError(
                    f"eval.sample_tokens and the prompt need {longest} positions; model.max_positions is"
                    f" {given['max_positions']}"
                )
        if given["vocab_size"] != data.vocab_size:
            raise ValueError(f"model.vocab_size is {given['vocab_size']}; the data has {data.vocab_size} ids")
        batch = data.train.batch(0)
        variables = jax.eval_shape(model.init, jax.random.key(0), batch["tokens"])
        jax.eval_shape(model.loss, variables, batch)  # what an operator refuses is said before any device works
        if not data.heldout.num_targets:
            raise ValueError("data.heldout leaves no token to predict: hold out more, or longer documents")
    return data


def keep_config(config: Mapping[str, Any], data: Data, workdir: Path) -> None:
    """The config in the workdir, and a copy of the tokenizer's file, if it is one: the run can be read where the
    original is gone. A kill leaves the old files or the new ones whole."""
    files = {"config.json": configs.to_json(config).encode()}
    if isinstance(data.tokenizer, FileTokenizer):
        files[TOKENIZER] = data.tokenizer.content
    for name, content in files.items():
        partial = workdir / f"{name}.partial"
        partial.write_bytes(content)
        partial.replace(workdir / name)


def data_mesh(batch_size: int, microbatches: int) -> jax.sharding.Mesh | None:
    """All devices along `data`, each with its share of every microbatch; None where there is one device."""
    devices = len(jax.devices())
    if devices == 1:
        return None
    share = devices * microbatches
    if batch_size % share:
        below, above = batch_size // share * share, -(-batch_size // share) * share
        near = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"train.batch_size is {batch_size}; {devices} devices with {microbatches} microbatches need {near}"
        )
    return jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def check_same_run(found: Restored, config: Mapping[str, Any], data: Data, accept_data_change: bool) -> list[str]:
    """Refuses to go on with another model, or with other data, whose order is part of the run.

    Returns the changes of the data that were accepted, a sentence each.
    """
    here = json.loads(configs.to_json(config))
    for key, old, new in configs.diff(found.extra["config"], here):
        if key.startswith("model.") and key not in SAME_FUNCTION:
            raise ConfigError(f"the workdir holds a run with {key}={old!r}, not {new!r}: choose another --workdir")
    if found.step > config["train"]["steps"]:
        raise ConfigError(f"train.steps is {config['train']['steps']}, but the workdir's run is at step {found.step}")
    changed = fingerprint_diff(found.extra["data"], data.fingerprint)
    if changed and not accept_data_change:
        raise ConfigError(
            f"the workdir holds a run on other data: {' '.join(changed)} Choose another --workdir, or go on with the"
            " new data with --accept_data_change."
        )
    return changed


def describe(
    config: Mapping[str, Any], model: HybridLM, data: Data, params: Any, found: Restored | None, accepted: list[str]
) -> Iterable[str]:
    """The lines that a run starts with."""
    count = count_params(config["model"])
    yield f"model    {config['model']['layout']} · width {config['model']['width']} · {count['total']:,} parameters"
    yield f"data     {data.description}"
    if config["optimizer"]["weight_decay"]:
        decayed, kept = optimizers.decay_list(params, config["optimizer"]["decay"])
        yield f"decayed  {', '.join(decayed)}"
        yield f"not      {', '.join(kept)}"
    else:
        yield "decayed  nothing (optimizer.weight_decay is 0)"
    if found is None:
        init = config["train"]["init_from"]
        yield "start    from step 0: the workdir holds no checkpoint"
        if init:
            yield f"params   from {init}"
        return
    for skip in found.skipped:
        yield f"skipped  the checkpoint of step {skip.step}: {skip.reason}"
    yield f"resume   from step {found.step}"
    for key, old, new in configs.diff(found.extra["config"], json.loads(configs.to_json(config))):
        yield f"changed  {key} was {old!r} and is {new!r}"
    for sentence in accepted:
        yield f"accepted {sentence}"
