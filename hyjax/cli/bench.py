"""`hyjax bench`: ratios against baselines, measured in one run."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from hyjax import exit_codes
from hyjax.cli.parser import Parser, UserError, positive, user_facing
from hyjax.config.errors import near

HELP = """usage: hyjax bench kernels|step|decode ...

  kernels  every implementation of an operator against the others, forward and backward, and the chip's bound
  step     a training step against plain forms of the same model
  decode   time per token after a long prompt, at several contexts, of several layouts in turns

`hyjax bench kernels --help` and so on explain each."""

KERNELS_EPILOG = """\
`reference` walks token by token; its time over another's is printed, and the chip's bound where the chip is known. An
implementation that can't serve a case here is listed with the reason.

examples:
  hyjax bench kernels --operators=linear_scan,delta_scan --implementations=reference,xla
  hyjax bench kernels --dtype=bfloat16 --length=8192 --key_dim=128 --value_dim=128"""

DECODE_EPILOG = """\
The model is as wide as a small real one, so that the weights that a token reads and the keys and values that it reads
stand in a real proportion. About a minute for the three layouts on two cores.

example:
  hyjax bench decode --contexts=256,16384 --layouts=GGAG,AAAA"""


def bench(argv: Sequence[str]) -> int:
    """Measure this machine: `kernels` the operators, `step` a training step, `decode` the time per token."""
    commands: dict[str, Callable[[Sequence[str]], None]] = {"kernels": _kernels, "step": _step, "decode": _decode}
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return exit_codes.OK if argv else exit_codes.USAGE
    if argv[0] not in commands:
        hint = near(argv[0], commands)
        raise UserError(f"{argv[0]!r} is nothing that hyjax bench measures{hint} (see hyjax bench --help)")
    commands[argv[0]](argv[1:])
    return exit_codes.OK


def _step(argv: Sequence[str]) -> None:
    parser = Parser(prog="hyjax bench step", description="A training step against plain forms of the same model.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.read(argv)
    from hyjax.bench import step

    step.main(json=args.json)


def _kernels(argv: Sequence[str]) -> None:
    parser = Parser(
        prog="hyjax bench kernels", description="Every implementation of an operator in turns.", epilog=KERNELS_EPILOG
    )
    from hyjax.bench import kernels

    _flags(
        parser,
        kernels.Settings,
        operators="NAME,...: what is measured",
        implementations="NAME,...: what takes turns",
        batch="rows",
        length="tokens a row",
        heads="of v in the scans, of q in attention",
        key_heads="of q and k in the scans, of k and v in attention",
        key_dim="of a head of q and k",
        value_dim="of a head of v; the other scans take heads * value_dim channels",
        state_dim="numbers a channel in selective_scan",
        dtype="float32 or bfloat16; gates are float32",
        rounds="turns of each",
    )
    args, given = _read(parser, argv)
    with user_facing():
        settings = kernels.Settings(**given)
    kernels.main(settings, json=args.json)


def _decode(argv: Sequence[str]) -> None:
    parser = Parser(prog="hyjax bench decode", description="Time per token, by context.", epilog=DECODE_EPILOG)
    from hyjax.bench import decode

    _flags(
        parser,
        decode.Settings,
        contexts="N,...: tokens that stand before",
        layouts="LAYOUT,...: what takes turns",
        width="of the residual stream",
        heads="heads a layer",
        kv_heads="of attention, for keys and values",
        vocab_size="outputs of the head",
        batch="rows that decode at once",
        tokens="tokens a turn",
        rounds="turns that each layout has at each context",
    )
    args, given = _read(parser, argv)
    with user_facing():
        settings = decode.Settings(**given)
        for layout in settings.layouts:
            settings.model(layout)
    decode.main(settings, json=args.json)


def _flags(parser: Parser, settings: type, **helps: str) -> None:
    """A flag for each field of a dataclass, read as its default is; "NAME,...: help" where it holds several."""
    for field in dataclasses.fields(settings):
        default, text = field.default, helps[field.name]
        metavar, text = text.split(": ", 1) if isinstance(default, tuple) else ("N", text)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        read: Callable[[str], Any] = positive if isinstance(default, int) else str
        if isinstance(default, tuple):
            read = _lengths if isinstance(default[0], int) else _words
        metavar = "NAME" if isinstance(default, str) else metavar
        parser.add_argument(f"--{field.name}", type=read, metavar=metavar, help=f"{text} ({shown})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _read(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The arguments, and those that were given but for --json."""
    args = parser.read(argv)
    return args, {name: value for name, value in vars(args).items() if name != "json" and value is not None}


def _lengths(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between, such as 256,4096, not {text!r}")
    return tuple(map(int, text.split(",")))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
