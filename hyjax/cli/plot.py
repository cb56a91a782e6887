"""`hyjax plot`: the losses of several runs in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hyjax.cli.parser import Parser, UserError, user_facing


def plot(argv: Sequence[str]) -> int:
    """Draw the losses of several runs in one picture."""
    parser = Parser(
        prog="hyjax plot",
        description="Draw training and held-out loss of one run or several, from their metrics.jsonl.",
        epilog="example:\n  hyjax plot --workdir=runs/hybrid --workdir=runs/recurrent --out=both.png",
    )
    parser.add_argument("--workdir", action="append", required=True, metavar="DIR", help="a run; may be given again")
    parser.add_argument("--out", metavar="FILE", help="the PNG to write (losses.png; alone, DIR/loss.png)")
    parser.add_argument("--title", default="", metavar="TEXT", help="what stands above the picture")
    args = parser.read(argv)
    from hyjax.train.metrics import FILE, read_records
    from hyjax.train.plots import loss_plot

    for workdir in args.workdir:
        if not (Path(workdir) / FILE).is_file():
            raise UserError(f"--workdir={workdir} holds no run: there is no {FILE} in it")
        if not read_records(workdir, "train") and not read_records(workdir, "heldout"):
            raise UserError(f"the run in --workdir={workdir} has logged no loss yet")
    if len(args.workdir) != len({Path(workdir).resolve() for workdir in args.workdir}):
        raise UserError("--workdir names the same run twice")
    out = Path(args.out or (Path(args.workdir[0]) / "loss.png" if len(args.workdir) == 1 else "losses.png"))
    if out.suffix.lower() != ".png":
        raise UserError(f"--out={out} must end in .png")
    with user_facing():
        try:
            print(loss_plot(args.workdir, {}, out, args.title))
        except OSError as error:
            raise UserError(f"--out={out} can't be written ({error.strerror})") from error
    return 0
