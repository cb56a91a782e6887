"""`hyjax train`: a config and a folder in, a trained model out."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence

from hyjax import exit_codes
from hyjax.cli.parser import CONFIG_HELP, Parser, load_config, split_overrides

# Steps, from the first of this run, that a bare `--profile` traces: past compilation, enough to repeat.
PROFILED = "5:10"


def train(argv: Sequence[str]) -> int:
    """Train a model, or go on where the last run in the workdir stopped."""
    parser = Parser(
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
    rest, overrides = split_overrides(argv)
    args = parser.read(rest)
    config = load_config(args.config, overrides)
    from hyjax.train import loop

    try:
        loop.train(config, args.workdir, profile=args.profile)
    except loop.NonFiniteError as error:
        print(f"hyjax: stopped: {error}", file=sys.stderr)
        return exit_codes.NOT_FINITE
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
