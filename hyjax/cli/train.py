"""`hyjax train`: a config and a folder in, a trained model out."""

from __future__ import annotations

import argparse
import errno
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hyjax import exit_codes
from hyjax.cli.parser import CONFIG_HELP, Parser, load_config, split_overrides
from hyjax.train.signals import Stopped, ended_at_once, leave

# Steps, from the first of this run, that a bare `--profile` traces: past compilation, enough to repeat.
PROFILED = "5:10"

# What a disk says that is full or broken: logs and plots meet it as checkpoints do.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

EPILOG = """\
SIGTERM and Ctrl-C end the run once the last finished step is saved, at the latest after train.grace_seconds; a second
Ctrl-C at once.

exit code    0 done    1 a fault in the code    2 a mistake in what was given    3 a loss that is not finite
             4 a checkpoint could not be written or read    75 SIGTERM, saved: start again    76 stalled: start again
             130 Ctrl-C, saved

example:
  hyjax train --config=configs/quickstart.py --workdir=runs/quickstart"""


def train(argv: Sequence[str]) -> int:
    """Train a model, or go on where the last run in the workdir stopped."""
    parser = Parser(
        prog="hyjax train",
        description="Train a model. The same command again goes on where the last one stopped.",
        epilog=EPILOG,
    )
    parser.add_argument("--config", required=True, metavar="FILE[:arg]", help=CONFIG_HELP)
    parser.add_argument("--workdir", required=True, metavar="DIR", help="where checkpoints, logs and plots go")
    parser.add_argument(
        "--profile", nargs="?", const=PROFILED, type=_steps, metavar="START:STOP",
        help=f"write a trace of these steps, counted from the first of this run ({PROFILED} where not given)",
    )  # fmt: skip
    parser.add_argument(
        "--accept_data_change", action="store_true",
        help="go on from the workdir's checkpoint although the data is not what it was; what changed is recorded",
    )  # fmt: skip
    rest, overrides = split_overrides(argv)
    args = parser.read(rest)
    try:
        with ended_at_once():
            config = load_config(args.config, overrides)
            import hyjax.train.loop  # noqa: F401  (takes seconds)
    except KeyboardInterrupt:
        print("hyjax: interrupted", file=sys.stderr)
        return exit_codes.INTERRUPTED
    code = _run(config, args)
    if code == exit_codes.OK:
        print(_next_commands(args.config, overrides, config.model.layout, args.workdir))
    return code


def _run(config: Mapping[str, Any], args: argparse.Namespace) -> int:
    """Trains; the exit code, after a line on stderr that says why where it is not OK."""
    from hyjax.train import loop
    from hyjax.train.checkpoint import CheckpointError

    try:
        loop.train(config, args.workdir, profile=args.profile, accept_data_change=args.accept_data_change)
    except loop.NonFiniteError as error:
        print(f"hyjax: stopped: {error}", file=sys.stderr)
        return exit_codes.NOT_FINITE
    except CheckpointError as error:
        print(f"hyjax: error: {error}", file=sys.stderr)
        return exit_codes.CHECKPOINT
    except OSError as error:
        if error.errno not in DISK:
            raise
        print(f"hyjax: error: {error}", file=sys.stderr)
        return exit_codes.CHECKPOINT
    except Stopped as stopped:
        print(f"hyjax: stopped: {stopped}; the same command goes on from there", file=sys.stderr)
        return stopped.code
    except KeyboardInterrupt:  # the second time: not even for a save under way in the background
        leave(exit_codes.INTERRUPTED, lambda: print("hyjax: stopped at once", file=sys.stderr))
    return exit_codes.OK


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
