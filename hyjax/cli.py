"""The `hyjax` command: one function a sub-command, which imports what it needs only when it runs.

A config is given as `--config=FILE.py[:arg]`, changed by any number of `--config.KEY=VALUE`. What a person did wrong
is one line on stderr and exit code 2; a run whose loss is not finite ends with 3; an error in the code keeps its
traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import hyjax
from hyjax.config import ConfigError
from hyjax.config.errors import near

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict

CONFIG_HELP = "a config file and, after a colon, its argument; --config.KEY=VALUE (any number) changes a key"
NOT_FINITE = 3  # exit code of a run whose loss or gradient was not finite
# Steps, from the first of this run, that a bare `--profile` traces: past compilation, enough to repeat.
PROFILED = "5:10"


class UserError(ValueError):
    """Something on the command line is wrong: one sentence."""


class _Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are `UserError` and name what an unknown word is near."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = near(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ""
        raise UserError(f"{message}{hint} (see {self.prog} --help)")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments. An unknown flag is reported before a missing one: it may be that one, misspelled."""
        flags = self._option_string_actions
        for word in argv:
            name = re.split(r"[=.]", word)[0]
            if name.startswith("-") and name not in flags and not re.fullmatch(r"-\d*", name):
                hint = near(name, flags)
                raise UserError(f"{self.prog} has no flag {name}{hint} (see {self.prog} --help)")
        return self.parse_args(argv)


# ------------------------------------------------------------------------------------------------ configs


def _split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what argparse reads, the `--config.KEY=VALUE` overrides), each in order; a value may be a word of its own."""
    rest: list[str] = []
    overrides: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not re.match(r"--?(no)?config\.", word):
            rest.append(word)
            continue
        overrides.append(word)
        if "=" not in word and words and not words[0].startswith("--"):
            overrides.append(words.pop(0))
    return rest, overrides


def _load(spec: str, overrides: Sequence[str]) -> FrozenConfigDict:
    """The config, of which the model's parts have been built: what only they know is wrong with it is said here."""
    from hyjax import config as configs

    config = configs.load(spec, overrides)
    from hyjax.models import HybridLM

    with _user_facing():
        HybridLM(config.model)  # does no array work, so a job may still choose its devices
    return config


@contextlib.contextmanager
def _user_facing() -> Iterator[None]:
    """What raises ValueError in here is a config that can't be served, not a fault of the code."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


# ------------------------------------------------------------------------------------------------ sub-commands


def train(argv: Sequence[str]) -> int:
    """Train a model, or go on where the last run in the workdir stopped."""
    parser = _Parser(
        prog="hyjax train",
        description="Train a model. The same command again goes on where the last one stopped.",
        epilog="example:\n  hyjax train --config=configs/quickstart.py --workdir=runs/quickstart",
    )
    parser.add_argument("--config", required=True, metavar="FILE[:arg]", help=CONFIG_HELP)
    parser.add_argument("--workdir", required=True, metavar="DIR", help="where checkpoints, logs and plots go")
    parser.add_argument(
        "--profile", nargs="?", const=PROFILED, type=_steps, metavar="START:STOP",
        help=f"write a trace of these steps, counted from the first of this run ({PROFILED} where not given)",
    )  # fmt: skip
    rest, overrides = _split_overrides(argv)
    args = parser.read(rest)
    config = _load(args.config, overrides)
    from hyjax.train import loop

    try:
        loop.train(config, args.workdir, profile=args.profile)
    except loop.NonFiniteError as error:
        print(f"hyjax: stopped: {error}", file=sys.stderr)
        return NOT_FINITE
    print(_next_commands(args.config, overrides, config.model.layout, args.workdir))
    return 0


def _next_commands(spec: str, overrides: Sequence[str], layout: str, workdir: str) -> str:
    """What one may want to do after a run: see what it costs, and what its attention layers are worth."""
    from hyjax.layout import parse

    letters = "".join(parse(layout))
    twin = re.sub("[AWL]", "G", letters)  # the same stack without attention
    config = [f"--config={spec}", *overrides]
    commands = [["plan", *config, "--context=32768"]]
    if twin != letters:
        other = f"{workdir.rstrip('/')}_recurrent"
        commands.append(["train", *config, f"--config.model.layout={twin}", f"--workdir={other}"])
    commands.append(["train", "--config=configs/recall.py", "--workdir=runs/recall"])
    return "\n".join(["next, for instance:", *(f"  hyjax {shlex.join(words)}" for words in commands)])


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"must be START:STOP with START < STOP, such as {PROFILED}, not {text!r}")
    return int(match[1]), int(match[2])


def plan(argv: Sequence[str]) -> int:
    """Print what a model costs: parameters, FLOPs, decode state."""
    parser = _Parser(
        prog="hyjax plan",
        description="Print what a model costs, from its config alone: parameters, FLOPs per token, decode state.",
        epilog="example:\n  hyjax plan --config=configs/quickstart.py --config.model.layout='(GGGA)*12' --context=8192",
    )
    parser.add_argument("--config", required=True, metavar="FILE[:arg]", help=CONFIG_HELP)
    parser.add_argument("--context", type=_positive, metavar="N", help="tokens a row (the config's training length)")
    parser.add_argument("--batch", type=_positive, default=1, metavar="N", help="rows that decode at once (1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    rest, overrides = _split_overrides(argv)
    args = parser.read(rest)
    import jax

    jax.config.update("jax_platforms", "cpu")  # shapes need no accelerator, and must not take one from a running job
    config = _load(args.config, overrides)
    from hyjax.cost import plan as plans

    with _user_facing():
        result = plans.plan(config.model, args.context or config.data.seq_len, args.batch)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        plans.show(result, args.batch)
    return 0


def _positive(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 2**31 - 1, not {text!r}")
    return int(text)


def bench(argv: Sequence[str]) -> int:
    """Measure this machine: `step` compares a training step with plain baselines."""
    parser = _Parser(prog="hyjax bench", description="Measure ratios against baselines, in one run.")
    parser.add_argument("what", choices=("step",), help="step: a training step against plain forms of the same model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.read(argv)
    from hyjax.bench import step

    step.main(json=args.json)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"train": train, "plan": plan, "bench": bench}


# ------------------------------------------------------------------------------------------------ the command


def _help() -> str:
    first = lambda doc: (doc or "").splitlines()[0]
    lines = ["usage: hyjax SUBCOMMAND ...", "", first(hyjax.__doc__), "", "sub-commands:"]
    lines += [f"  {name:<8}{first(command.__doc__)}" for name, command in COMMANDS.items()]
    lines += ["", "`hyjax SUBCOMMAND --help` explains one; `hyjax --version` prints the version."]
    return "\n".join(lines)


def run(argv: Sequence[str]) -> int:
    """Run one sub-command. Raises ConfigError or UserError for what a person did wrong."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"hyjax {hyjax.__version__}")
        return 0
    if argv[0] not in COMMANDS:
        what = "flag" if argv[0].startswith("-") else "sub-command"
        raise UserError(f"{argv[0]!r} is no {what} of hyjax{near(argv[0], COMMANDS)} (see hyjax --help)")
    return COMMANDS[argv[0]](argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point: exit code 0, or 2 after one line on stderr."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except (ConfigError, UserError) as error:
        print(f"hyjax: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `hyjax plan | head`: whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
