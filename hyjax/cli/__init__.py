"""The `hyjax` command: a file a sub-command, each of which imports what it needs only when it runs.

A config is given as `--config=FILE.py[:arg]`, changed by any number of `--config.KEY=VALUE`. What a person did wrong
is one line on stderr and exit code 2; what the other codes mean is in hyjax/exit_codes.py; an error in the code keeps
its traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import hyjax
from hyjax import exit_codes
from hyjax.cli.parser import UserError
from hyjax.config import ConfigError
from hyjax.config.errors import near

# name -> what `hyjax --help` says of it; the function is `hyjax.cli.<name>.<name>(argv) -> exit code`
COMMANDS: dict[str, str] = {
    "train": "Train a model, or go on where the last run in the workdir stopped.",
    "generate": "Continue prompts with a trained model.",
    "convert": "Write a trained model in another form.",
    "plan": "Print what a model costs: parameters, FLOPs, decode state.",
    "data": "Make a tokenised corpus, train a tokenizer, look at the data.",
    "bench": "Measure this machine: kernels, a training step or decoding, against baselines.",
    "plot": "Draw the losses of several runs in one picture.",
}


def _help() -> str:
    lines = ["usage: hyjax SUBCOMMAND ...", "", (hyjax.__doc__ or "").splitlines()[0], "", "sub-commands:"]
    lines += [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    lines += ["", "`hyjax SUBCOMMAND --help` explains one; `hyjax --version` prints the version."]
    return "\n".join(lines)


def run(argv: Sequence[str]) -> int:
    """Run one sub-command. Raises ConfigError or UserError for what a person did wrong."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return exit_codes.OK if argv else exit_codes.USAGE
    if argv[0] == "--version":
        print(f"hyjax {hyjax.__version__}")
        return exit_codes.OK
    if argv[0] not in COMMANDS:
        what = "flag" if argv[0].startswith("-") else "sub-command"
        raise UserError(f"{argv[0]!r} is no {what} of hyjax{near(argv[0], COMMANDS)} (see hyjax --help)")
    module = importlib.import_module(f"hyjax.cli.{argv[0]}")
    return getattr(module, argv[0])(argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point: an exit code of hyjax/exit_codes.py, after one line on stderr where it is not 0."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except (ConfigError, UserError) as error:
        print(f"hyjax: error: {error}", file=sys.stderr)
        return exit_codes.USAGE
    except KeyboardInterrupt:  # a run that trains has saved before
        print("hyjax: interrupted", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except BrokenPipeError:  # `hyjax plan | head`: whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.ERROR
