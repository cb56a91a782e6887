"""`hyjax bench`: ratios against baselines, measured in one run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from hyjax.cli.parser import Parser, UserError, positive, user_facing

EPILOG = """\
step     a training step against plain forms of the same model
decode   time per token after a long prompt, at several contexts, of several layouts in turns

Flags other than --json are of decode. Its model is as wide as a small real one, so that the weights that a token reads
and the keys and values that it reads stand in a real proportion. About a minute a layout on two cores.

example:
  hyjax bench decode --contexts=256,16384 --layouts=GGAG,AAAA"""


def bench(argv: Sequence[str]) -> int:
    """Measure this machine: `step` a training step, `decode` the time per token."""
    parser = Parser(prog="hyjax bench", description="Measure ratios against baselines, in one run.", epilog=EPILOG)
    parser.add_argument("what", choices=("step", "decode"), help="see below")
    add = parser.add_argument
    add("--contexts", type=_lengths, metavar="N,...", help="tokens that stand before (256,1024,4096,16384)")
    add("--layouts", type=_words, metavar="LAYOUT,...", help="what takes turns (GGAG,AAAA,GGGG)")
    add("--width", type=positive, metavar="N", help="of the residual stream (768)")
    add("--heads", type=positive, metavar="N", help="heads a layer (12)")
    add("--kv_heads", type=positive, metavar="N", help="of attention, for keys and values (3)")
    add("--vocab_size", type=positive, metavar="N", help="outputs of the head (16384)")
    add("--batch", type=positive, metavar="N", help="rows that decode at once (1)")
    add("--tokens", type=positive, metavar="N", help="tokens a turn (16)")
    add("--rounds", type=positive, metavar="N", help="turns that each layout has at each context (7)")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.read(argv)
    given = {name: value for name, value in vars(args).items() if name not in ("what", "json") and value is not None}
    if args.what == "step":
        if given:
            raise UserError(f"--{next(iter(given))} is a flag of bench decode, not of bench step")
        from hyjax.bench import step

        step.main(json=args.json)
        return 0
    from hyjax.bench import decode

    with user_facing():
        settings = decode.Settings(**given)
        for layout in settings.layouts:
            settings.model(layout)
    decode.main(settings, json=args.json)
    return 0


def _lengths(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between, such as 256,4096, not {text!r}")
    return tuple(map(int, text.split(",")))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
