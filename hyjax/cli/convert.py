"""`hyjax convert`: a model from one form to another."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hyjax import exit_codes
from hyjax.cli.parser import Parser, positive, user_facing


def convert(argv: Sequence[str]) -> int:
    """Write a trained model in another form: `params` takes its parameters out of a run."""
    parser = Parser(
        prog="hyjax convert",
        description="Write a trained model in another form. params: its parameters, config and tokenizer alone.",
        epilog="example:\n  hyjax convert params --workdir=runs/quickstart --out=models/quickstart",
    )
    parser.add_argument("what", choices=("params",), help="params: without optimizer and logs, to load or start from")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="the run (or an export of one)")
    parser.add_argument("--step", type=positive, metavar="N", help="the checkpoint of that step (the newest)")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write; it must not be there yet")
    args = parser.read(argv)
    from hyjax.train.checkpoint import CheckpointError
    from hyjax.train.export import export_params
    from hyjax.train.tree_io import num_bytes

    try:
        with user_facing():
            run = export_params(args.workdir, args.out, args.step)
    except CheckpointError as error:
        print(f"hyjax: error: {error}", file=sys.stderr)
        return exit_codes.CHECKPOINT
    size = num_bytes(run.params)
    print(f"{args.out}: the parameters of step {run.step}, {size // 4:,} of float32 ({size / 1e6:,.1f} MB)")
    return exit_codes.OK
