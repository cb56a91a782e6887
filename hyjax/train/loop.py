"""Training, from a config and a folder to a trained model: one function, read from top to bottom.

    workdir/config.json           the resolved config
    workdir/metrics.jsonl         every number that was logged; TensorBoard's events beside it
    workdir/checkpoints/STEP      everything that the next step depends on
    workdir/compilation_cache     so that a restart compiles nothing anew
    workdir/loss.png, result.json  at the end

Running it again goes on where it stopped: the batch of a step is a function of the seed and the step, and the rest is
in the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from hyjax import config as configs
from hyjax.config import ConfigError
from hyjax.cost import count_params, flops_per_token
from hyjax.data import Data, build, fingerprint_diff
from hyjax.evals.baselines import baselines
from hyjax.generate import make_sampler
from hyjax.models import HybridLM
from hyjax.train import optimizer as optimizers
from hyjax.train.checkpoint import Checkpointer, Restored
from hyjax.train.metrics import Logger, Throughput, describe_metrics
from hyjax.train.plots import loss_plot
from hyjax.train.profile import StepTrace
from hyjax.train.step import TrainState, create_state, diagnose, make_eval_step, make_train_step, replicate

# Keys of the model that change how it is computed, not what: a run may go on with others.
SAME_FUNCTION = ("model.remat", "model.scan", "model.implementation", "model.loss_chunk", "model.state_dtype")


class NonFiniteError(RuntimeError):
    """A loss or a gradient was not finite: the message names the step and the first tensor that is not."""


def train(config: Mapping[str, Any], workdir: str | Path, *, profile: tuple[int, int] | None = None) -> dict[str, Any]:
    """Trains as `config` (complete and checked, from `hyjax.config.load`) says, and returns the last evaluation.

    Args:
      workdir: where everything goes; if it holds a checkpoint of this run, training goes on from it.
      profile: (start, stop), steps counted from the first of this attempt that a trace is written of.

    Raises:
      ConfigError: the parts of the config do not fit each other or the data, or the workdir holds another run.
      NonFiniteError: a loss or gradient was not finite; the parameters on disk are those before that step.
    """
    workdir = Path(workdir)
    with _as_config_errors():
        (workdir / "checkpoints").mkdir(parents=True, exist_ok=True)
    compilation_cache.reset_cache()  # a run before this one in the same process left its own folder open
    compilation_cache.set_cache_dir(str(workdir.absolute() / "compilation_cache"))
    settings, steps = config["train"], config["train"]["steps"]

    # ------------------------------------------------------------------------------------ model, data, optimizer
    model = HybridLM(config["model"])
    data = _build_data(config, model)
    mesh = _data_mesh(settings["batch_size"], settings["microbatches"])

    init_key, run_key = jax.random.split(jax.random.key(config["seed"]))
    params = jax.jit(model.init)(init_key, data.train.batch(0)["tokens"][:1])["params"]
    with _as_config_errors():
        schedule = optimizers.schedule(config["optimizer"], steps)
        optimizer = optimizers.build(config["optimizer"], steps, params)
    state = create_state(params, optimizer, run_key)
    state = state if mesh is None else replicate(state, mesh)
    train_step = make_train_step(model, optimizer, schedule, settings["microbatches"], mesh)
    evaluate = _make_evaluate(make_eval_step(model, mesh), data)

    # ------------------------------------------------------------------------------------ resume
    checkpointer = Checkpointer(workdir / "checkpoints", settings["keep"])
    with _as_config_errors():
        found = checkpointer.restore_latest(state)
    if found is not None:
        _check_same_run(found, config, data)
        state = found.state
    start = int(state.step)
    with _as_config_errors():
        logger = Logger(workdir, steps)
        (workdir / "config.json").write_text(configs.to_json(config))
    logger.print("\n".join(_describe(config, model, data, params, found)))
    extra = {"config": json.loads(configs.to_json(config)), "data": data.fingerprint}

    # ------------------------------------------------------------------------------------ train
    devices = jax.devices()
    flops = flops_per_token(config["model"], config["data"]["seq_len"])["model"]["total"]
    throughput = Throughput(flops, devices[0].device_kind, 1 if mesh is None else len(devices))
    trace = StepTrace(workdir, start + profile[0], profile[1] - profile[0]) if profile else None
    sampler = _make_sampler(config, model, data)
    tokens_a_step = settings["batch_size"] * config["data"]["seq_len"]
    try:
        for step, batch in zip(range(start, steps), data.train.batches(start), strict=False):
            if trace:
                trace.before(step)
            state, metrics = train_step(state, batch)
            if trace:
                trace.after(step, metrics)
            throughput.add(tokens_a_step)
            done = step + 1
            last = done == steps

            if done % settings["log_every"] == 0 or last or step == start:
                metrics = jax.device_get(metrics)
                _stop_if_not_finite(model, state, data, settings["microbatches"])
                if step == start:  # its time went into compiling
                    throughput.start()
                logger.log(done, metrics | throughput.read())
            with throughput.paused():
                every = config["eval"]["every"]
                if every and done % every == 0 and not last:
                    logger.log(done, evaluate(state.params, config["eval"]["batches"]), split="heldout")
                    if sampler:
                        logger.log_text(done, "sample", sampler(state.params, step))
                if done % settings["checkpoint_every"] == 0 or last:
                    _stop_if_not_finite(model, state, data, settings["microbatches"])
                    checkpointer.save(done, state, extra)
        checkpointer.close()

        # -------------------------------------------------------------------------------- what came out
        result = evaluate(state.params, None if config["eval"]["final"] else config["eval"]["batches"])
        logger.log(steps, result, split="heldout")
        if sampler:
            logger.log_text(steps, "sample", sampler(state.params, steps))
        return _report(workdir, config, data, result, logger)
    finally:
        if trace:
            trace.close()
        logger.close()


def _build_data(config: Mapping[str, Any], model: HybridLM) -> Data:
    """The data, once it is clear that the model can be trained on it."""
    given = config["model"]
    with _as_config_errors():
        data = build(config["data"], batch_size=config["train"]["batch_size"], seed=config["seed"])
        if tuple(given["streams"]) != data.streams:
            raise ValueError(f"model.streams is {tuple(given['streams'])}; the data has streams {data.streams}")
        if given["position"] == "learned" and data.tokenizer and config["eval"]["sample_tokens"]:
            longest = len(_prompt(config, data)) + config["eval"]["sample_tokens"]
            if longest > given["max_positions"]:
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


@contextlib.contextmanager
def _as_config_errors() -> Iterator[None]:
    """What is refused in here is the config, the data or the workdir, not a fault of the code."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(str(error)) from error


def _data_mesh(batch_size: int, microbatches: int) -> jax.sharding.Mesh | None:
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


def _check_same_run(found: Restored, config: Mapping[str, Any], data: Data) -> None:
    """Refuses to go on with another model, or with other data, whose order is part of the run."""
    here = json.loads(configs.to_json(config))
    for key, old, new in configs.diff(found.extra["config"], here):
        if key.startswith("model.") and key not in SAME_FUNCTION:
            raise ConfigError(f"the workdir holds a run with {key}={old!r}, not {new!r}: choose another --workdir")
    changed = fingerprint_diff(found.extra["data"], data.fingerprint)
    if changed:
        raise ConfigError(f"the workdir holds a run on other data: {' '.join(changed)} Choose another --workdir.")
    if found.step > config["train"]["steps"]:
        raise ConfigError(f"train.steps is {config['train']['steps']}, but the workdir's run is at step {found.step}")


def _describe(
    config: Mapping[str, Any], model: HybridLM, data: Data, params: Any, found: Restored | None
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
        yield "start    from step 0: the workdir holds no checkpoint"
        return
    for skip in found.skipped:
        yield f"skipped  the checkpoint of step {skip.step}: {skip.reason}"
    yield f"resume   from step {found.step}"
    for key, old, new in configs.diff(found.extra["config"], json.loads(configs.to_json(config))):
        yield f"changed  {key} was {old!r} and is {new!r}"


def _make_evaluate(eval_step: Callable, data: Data) -> Callable[[Any, int | None], dict[str, float]]:
    """`evaluate(params, batches)`: over that many held-out batches, evenly spread (None: all of them)."""

    def evaluate(params: Any, batches: int | None) -> dict[str, float]:
        count = data.heldout.num_batches
        chosen = range(count) if batches is None else np.unique(np.linspace(0, count - 1, batches).round().astype(int))
        sums: dict[str, float] = {}
        for index in chosen:
            for name, value in jax.device_get(eval_step(params, data.heldout.batch(int(index)))).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        tokens = sums["weight"] or math.nan  # a few batches may hold none that counts
        result = {"loss": sums["loss"] / tokens, "accuracy": sums["correct"] / tokens}
        if data.heldout.num_bytes:
            per_byte = data.heldout.num_targets / data.heldout.num_bytes
            result["bits_per_byte"] = result["loss"] * per_byte / math.log(2)
        return result

    return evaluate


def _prompt(config: Mapping[str, Any], data: Data) -> np.ndarray:
    """Ids of eval.prompt; where it is empty, what stands before a document: the end of another, or a space."""
    text, tokenizer = config["eval"]["prompt"], data.tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text) if text else np.array([tokenizer.eos or 0], np.int32)


def _make_sampler(config: Mapping[str, Any], model: HybridLM, data: Data) -> Callable[[Any, int], str] | None:
    """`sample(params, step)` -> text; None where the data is no text or no sample is asked for."""
    settings, tokenizer = config["eval"], data.tokenizer
    if tokenizer is None or not settings["sample_tokens"]:
        return None
    prompt = _prompt(config, data)
    sampler = make_sampler(model, settings["sample_tokens"], settings["temperature"])
    key = jax.random.key(config["seed"])

    def sample(params: Any, step: int) -> str:
        tokens = sampler(params, prompt[None], jax.random.fold_in(key, step))
        return settings["prompt"] + tokenizer.decode(np.asarray(tokens[0]))

    return sample


def _stop_if_not_finite(model: HybridLM, state: TrainState, data: Data, microbatches: int) -> None:
    """Raises where a step was refused; the state is still the one that met the fault."""
    if int(state.skipped):
        step = int(state.step)
        bad = diagnose(model, state.params, data.train.batch(step), microbatches)
        raise NonFiniteError(f"step {step + 1} is not finite; the first bad tensor is {bad}; nothing of it was kept")


def _report(
    workdir: Path, config: Mapping[str, Any], data: Data, result: Mapping[str, float], logger: Logger
) -> dict[str, Any]:
    """Draws the loss, sets the baselines beside the model, and writes both down."""
    others = baselines(data)
    part = "the whole set" if config["eval"]["final"] else f"{config['eval']['batches']} batches"
    logger.print(f"held-out, {part}: {describe_metrics(result)}")
    for name, bits in others.items():
        logger.print(f"  {name:<12} {bits:.4f} bits/byte on the same text")
    summary = {"step": config["train"]["steps"], "heldout": dict(result), "baselines": others}
    (workdir / "result.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = f"{config['model']['layout']} on {config['data']['source']}"
    plot = loss_plot([workdir], others, workdir / "loss.png", title)
    logger.print(f"loss curve: {plot}")
    return summary
