"""`hyjax plot`: the losses of several runs in one picture."""

from __future__ import annotations

import json
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
    parser.add_argument("--title", metavar="TEXT", help="what stands above it (alone, the layout and the data)")
    args = parser.read(argv)
    workdirs = [Path(workdir) for workdir in args.workdir]
    if len(workdirs) != len({workdir.resolve() for workdir in workdirs}):
        raise UserError("--workdir names the same run twice")
    for workdir in workdirs:
        _check_run(workdir)
    alone = len(workdirs) == 1
    out = Path(args.out or (workdirs[0] / "loss.png" if alone else "losses.png"))
    if out.suffix.lower() != ".png":
        raise UserError(f"--out={out} must end in .png")
    title = args.title if args.title is not None else _title(workdirs[0]) if alone else ""
    from hyjax.train.plots import loss_plot

    with user_facing():
        try:
            print(loss_plot(workdirs, _baselines(workdirs), out, title))
        except OSError as error:
            raise UserError(f"--out={out} can't be written ({error.strerror})") from error
    return 0


def _check_run(workdir: Path) -> None:
    from hyjax.train.metrics import FILE, read_records

    if not (workdir / FILE).is_file():
        raise UserError(f"--workdir={workdir} holds no run: there is no {FILE} in it")
    try:
        splits = {record["split"] for record in read_records(workdir)}
    except OSError as error:
        raise UserError(f"--workdir={workdir} can't be read ({error.strerror})") from error
    if not splits & {"train", "heldout"}:
        raise UserError(f"the run in --workdir={workdir} has logged no loss yet")


def _baselines(workdirs: Sequence[Path]) -> dict[str, float]:
    """What finished runs were compared with, in bits per byte, where it is the same for all of them."""
    found = [_read(workdir / "result.json").get("baselines", {}) for workdir in workdirs]
    return found[0] if all(other == found[0] for other in found) else {}


def _title(workdir: Path) -> str:
    """As the run itself calls its picture: "(GGAG)*2 on topics"."""
    config = _read(workdir / "config.json")
    return f"{config['model']['layout']} on {config['data']['source']}" if config else ""


def _read(path: Path) -> dict:
    """The JSON object of a file; empty where there is none yet, or a run is writing it just now."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
