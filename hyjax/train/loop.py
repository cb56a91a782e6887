"""Training, from a config and a folder to a trained model: one function, read from top to bottom.

    workdir/config.json           the resolved config
    workdir/metrics.jsonl         every number that was logged; TensorBoard's events beside it
    workdir/checkpoints/STEP      everything that the next step depends on
    workdir/compilation_cache     so that a restart compiles nothing anew
    workdir/loss.png, result.json  at the end
    workdir/lock, attempts/N      which process is at work here, and the numbers that attempts took
    workdir/stall-ATTEMPT.txt     every thread's stack, where an attempt hung

Running it again goes on where it stopped: the batch of a step is a function of the seed and the step, and the rest is
in the checkpoint. What a signal does is told in signals.py, what a hang does in watchdog.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from hyjax import config as configs
from hyjax.cost import flops_per_token
from hyjax.data import Data, Loader
from hyjax.evals.baselines import baselines
from hyjax.generate import make_sampler, prompt_ids
from hyjax.models import HybridLM
from hyjax.train import optimizer as optimizers
from hyjax.train import setup
from hyjax.train.checkpoint import Checkpointer, CheckpointError
from hyjax.train.export import load_params
from hyjax.train.lock import locked
from hyjax.train.metrics import Logger, Throughput, describe_metrics, next_attempt
from hyjax.train.plots import loss_plot
from hyjax.train.profile import StepTrace
from hyjax.train.saves import Saves
from hyjax.train.signals import Signals, Stopped
from hyjax.train.step import TrainState, create_state, diagnose, make_eval_step, make_train_step, replicate
from hyjax.train.watchdog import Watchdog


class NonFiniteError(RuntimeError):
    """A loss or a gradient was not finite: the message names the step and the first tensor that is not."""


def train(
    config: Mapping[str, Any],
    workdir: str | Path,
    *,
    profile: tuple[int, int] | None = None,
    accept_data_change: bool = False,
) -> dict[str, Any]:
    """Trains as `config` (complete and checked, from `hyjax.config.load`) says, and returns the last evaluation.

    Args:
      workdir: where everything goes; if it holds a checkpoint of this run, training goes on from it.
      profile: (start, stop), steps counted from the first of this attempt that a trace is written of.
      accept_data_change: go on with other data than the checkpoint's; what changed is recorded.

    Raises:
      ConfigError: the parts of the config do not fit each other or the data, or the workdir holds another run, or
        another process is at work in it.
      NonFiniteError: a loss or gradient was not finite; the parameters on disk are those before that step.
      Stopped: SIGTERM or Ctrl-C came, and the last finished step is saved. (The process may be ended as well: see
        hyjax.train.signals and hyjax.train.watchdog.)
    """
    workdir = Path(workdir)
    settings, steps = config["train"], config["train"]["steps"]
    with contextlib.ExitStack() as stack:
        checkpointer = Checkpointer(
            workdir / "checkpoints",
            settings["keep"],
            keep_every=settings["keep_every"],
            keep_best=settings["keep_best"],
            verify=settings["verify"],
        )
        with setup.as_config_errors():
            workdir.mkdir(parents=True, exist_ok=True)
            checkpointer.check_writable()
            lock_notice = stack.enter_context(locked(workdir))
        stop = stack.enter_context(Signals(settings["grace_seconds"]))
        watchdog = stack.enter_context(Watchdog(settings["stall_seconds"], settings["start_seconds"]))
        watchdog.path = workdir / f"stall-{next_attempt(workdir)}.txt"
        compilation_cache.reset_cache()  # a run before this one in the same process left its own folder open
        compilation_cache.set_cache_dir(str(workdir.absolute() / "compilation_cache"))

        # -------------------------------------------------------------------------------- model, data, optimizer
        model = HybridLM(config["model"])
        data = setup.build_data(config, model)
        mesh = setup.data_mesh(settings["batch_size"], settings["microbatches"])

        init_key, run_key = jax.random.split(jax.random.key(config["seed"]))
        params = jax.jit(model.init)(init_key, data.train.batch(0)["tokens"][:1])["params"]
        with setup.as_config_errors():
            schedule = optimizers.schedule(config["optimizer"], steps)
            optimizer = optimizers.build(config["optimizer"], steps, params)
        state = create_state(params, optimizer, run_key)
        state = state if mesh is None else replicate(state, mesh)
        train_step = make_train_step(model, optimizer, schedule, settings["microbatches"], mesh)

        # -------------------------------------------------------------------------------- resume
        with setup.as_config_errors():
            found = checkpointer.restore_latest(state, must=settings["resume"] == "must")
        accepted = setup.check_same_run(found, config, data, accept_data_change) if found else []
        if found is not None:
            state = found.state
        elif settings["init_from"]:
            with setup.as_config_errors():
                state = state.replace(params=load_params(settings["init_from"], state.params))
        start = int(state.step)
        if start < steps:
            checkpointer.check_space(state)
        changes = [*(found.extra.get("data_changes", []) if found else [])]
        changes += [{"step": start, "changes": accepted}] if accepted else []
        with setup.as_config_errors():
            logger = Logger(workdir, steps, start)
            stack.callback(logger.close)
            setup.keep_config(config, data, workdir)
        stack.enter_context(_in_order(logger, checkpointer, stop, watchdog))
        notices = [f"note     {text}" for text in (lock_notice, stop.unhandled) if text]
        logger.print("\n".join([*notices, *setup.describe(config, model, data, params, found, accepted)]))
        if accepted:
            logger.log(start, {"accepted": accepted}, split="data_change")
        extra = {"config": json.loads(configs.to_json(config)), "data": data.fingerprint, "data_changes": changes}
        saves = Saves(checkpointer, extra, start, found.extra.get("evaluated", start) if found else start)

        # -------------------------------------------------------------------------------- train
        devices = jax.devices()
        flops = flops_per_token(config["model"], config["data"]["seq_len"])["model"]["total"]
        throughput = Throughput(flops, devices[0].device_kind, 1 if mesh is None else len(devices))
        trace = StepTrace(workdir, start + profile[0], profile[1] - profile[0]) if profile else None
        if trace:
            stack.callback(trace.close)
        evaluate = _make_evaluate(make_eval_step(model, mesh), data, stop, watchdog)
        sample = _make_sample(config, model, data, logger, watchdog)
        tokens_a_step = settings["batch_size"] * config["data"]["seq_len"]
        batches, metrics = data.train.batches(start), None
        check = functools.partial(_stop_if_not_finite, model, data, settings["microbatches"])
        try:
            for done in range(start, steps + 1):
                # What is due between two steps. Nothing here donates the state: a signal's thread may save it.
                last, every = done == steps, config["eval"]["every"]
                to_save = saves.newest != done and (last or done % settings["checkpoint_every"] == 0)
                due = (every and done % every == 0 and not last) or (to_save and settings["keep_best"])
                to_evaluate = due and saves.evaluated != done
                if to_save or to_evaluate:
                    check(state)
                    with throughput.paused():
                        if to_evaluate:
                            with stop.rescuable(functools.partial(saves.finish, done, state)):
                                heldout = evaluate(state.params, config["eval"]["batches"], done)
                                if not last:  # after the last step comes the final one
                                    logger.log(done, heldout, split="heldout")
                                    sample(state.params, done)
                            saves.evaluated, saves.loss = done, heldout["loss"]
                        if to_save:
                            watchdog.begins("save", done)
                            saves.save(done, state)
                checkpointer.poll()
                stop.check(done)
                if last:
                    break

                watchdog.begins("training step", done)
                batch = next(batches)
                if trace:
                    trace.before(done)
                before, (state, metrics) = metrics, train_step(state, batch)
                stop.working()
                # At most one step in flight: the watchdog hears of steps that are complete.
                jax.block_until_ready(before)
                if trace:
                    trace.after(done, metrics)
                throughput.add(tokens_a_step)
                if (done + 1) % settings["log_every"] == 0 or done + 1 == steps or done == start:
                    values = jax.device_get(metrics)
                    check(state)
                    if done == start:  # its time went into compiling
                        throughput.start()
                    logger.log(done + 1, values | throughput.read() | {"batch_crc32": _crc32(batch["tokens"])})
            watchdog.begins("save", steps)
            checkpointer.close()

            # ---------------------------------------------------------------------------- what came out
            with stop.rescuable():
                final = None if config["eval"]["final"] else config["eval"]["batches"]
                result = evaluate(state.params, final, steps)
                logger.log(steps, result, split="heldout")
                by_source = {}
                for name, heldout_rows in data.heldout_by_source.items():
                    by_source[name] = evaluate(state.params, final, steps, heldout_rows)
                    logger.log(steps, by_source[name], split=f"heldout {name}")
                sample(state.params, steps)
                watchdog.begins("report", steps)
                summary = _report(workdir, config, data, result, by_source, logger)
                stop.check(steps)
                return summary
        except Stopped:
            watchdog.begins("save", done)
            check(state)
            saves.finish(done, state)
            raise


@contextlib.contextmanager
def _in_order(logger: Logger, checkpointer: Checkpointer, stop: Signals, watchdog: Watchdog) -> Iterator[None]:
    """However the run ends: a save under way is finished, and the last record says why it ended."""

    def record(reason: str) -> None:
        logger.log(watchdog.phase.step, {"reason": reason}, split="end")

    stop.record = watchdog.record = record
    try:
        yield
    except BaseException as error:
        names = {NonFiniteError: "not finite", CheckpointError: "checkpoint", KeyboardInterrupt: "interrupted"}
        reason = error.reason if isinstance(error, Stopped) else names.get(type(error), type(error).__name__)
        with contextlib.suppress(CheckpointError, OSError):  # such as of a full disk: `error` came first, and is told
            record(reason)
            if not isinstance(error, KeyboardInterrupt):  # a second Ctrl-C waits for nothing
                checkpointer.close()
        raise
    record("done")


def _make_evaluate(
    eval_step: Callable, data: Data, stop: Signals, watchdog: Watchdog
) -> Callable[..., dict[str, float]]:
    """`evaluate(params, batches, step)`: over that many held-out batches, evenly spread (None: all of them); over
    another loader's where one is given.

    Raises Stopped between two batches after a signal.
    """

    def evaluate(params: Any, batches: int | None, step: int, loader: Loader = data.heldout) -> dict[str, float]:
        count = loader.num_batches
        wanted = count if batches is None else min(batches, count)
        chosen = np.unique(np.linspace(0, count - 1, wanted).round().astype(int))
        sums: dict[str, float] = {}
        for index in chosen:
            stop.check(step)
            watchdog.begins("evaluation", step)
            for name, value in jax.device_get(eval_step(params, loader.batch(int(index)))).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        tokens = sums["weight"] or math.nan  # a few batches may hold none that counts
        result = {"loss": sums["loss"] / tokens, "accuracy": sums["correct"] / tokens}
        if loader.num_bytes:
            per_byte = loader.num_targets / loader.num_bytes
            result["bits_per_byte"] = result["loss"] * per_byte / math.log(2)
        return result

    return evaluate


def _make_sample(
    config: Mapping[str, Any], model: HybridLM, data: Data, logger: Logger, watchdog: Watchdog
) -> Callable[[Any, int], None]:
    """`sample(params, step)` logs a text; it does nothing where the data is no text or no sample is asked for."""
    settings, tokenizer = config["eval"], data.tokenizer
    if tokenizer is None or not settings["sample_tokens"]:
        return lambda params, step: None
    prompt = np.array([prompt_ids(tokenizer, settings["prompt"])], np.int32)
    sampler = make_sampler(model, settings["sample_tokens"], settings["temperature"])
    key = jax.random.key(config["seed"])

    def sample(params: Any, step: int) -> None:
        watchdog.begins("sample", step)
        tokens = sampler(params, prompt, jax.random.fold_in(key, step))
        logger.log_text(step, "sample", settings["prompt"] + tokenizer.decode(np.asarray(tokens[0])))

    return sample


def _crc32(tokens: Any) -> str:
    """Eight hex digits by which the batches of two runs are compared."""
    return f"{zlib.crc32(np.ascontiguousarray(tokens)):08x}"


def _stop_if_not_finite(model: HybridLM, data: Data, microbatches: int, state: TrainState) -> None:
    """Raises where a step was refused; the state is still the one that met the fault."""
    if int(state.skipped):
        step = int(state.step)
        bad = diagnose(model, state.params, data.train.batch(step), microbatches)
        raise NonFiniteError(f"step {step + 1} is not finite; the first bad tensor is {bad}; nothing of it was kept")


def _report(
    workdir: Path,
    config: Mapping[str, Any],
    data: Data,
    result: Mapping[str, float],
    by_source: Mapping[str, Mapping[str, float]],
    logger: Logger,
) -> dict[str, Any]:
    """Draws the loss, sets the baselines beside the model, and writes both down."""
    others = baselines(data)
    part = "the whole set" if config["eval"]["final"] else f"{config['eval']['batches']} batches"
    logger.print(f"held-out, {part}: {describe_metrics(result)}")
    for name, bits in others.items():
        logger.print(f"  {name:<12} {bits:.4f} bits/byte on the same text")
    summary = {"step": config["train"]["steps"], "heldout": dict(result), "baselines": others}
    summary |= {"heldout_by_source": dict(by_source)} if by_source else {}
    (workdir / "result.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = f"{config['model']['layout']} on {config['data']['source']}"
    plot = loss_plot([workdir], others, workdir / "loss.png", title)
    logger.print(f"loss curve: {plot}")
    return summary
