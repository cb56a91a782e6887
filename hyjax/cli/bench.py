"""`hyjax bench`: ratios against baselines, measured in one run."""

from __future__ import annotations

from collections.abc import Sequence

from hyjax.cli.parser import Parser


def bench(argv: Sequence[str]) -> int:
    """Measure this machine: `step` compares a training step with plain baselines."""
    parser = Parser(prog="hyjax bench", description="Measure ratios against baselines, in one run.")
    parser.add_argument("what", choices=("step",), help="step: a training step against plain forms of the same model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.read(argv)
    from hyjax.bench import step

    step.main(json=args.json)
    return 0
