"""Which checkpoints stay: the last ones, every k-th, and the best."""

import math
from collections.abc import Mapping


def kept(losses: Mapping[int, float | None], last: int, every: int = 0, best: int = 0) -> set[int]:
    """Of the steps in `losses`: the `last` newest, the multiples of `every` (0: none), and the `best` with the least
    loss, of equal ones the newer. A step whose loss is None or not finite is not among the best."""
    steps = sorted(losses)
    measured = [(loss, -step) for step, loss in losses.items() if loss is not None and math.isfinite(loss)]
    multiples = {step for step in steps if every and step % every == 0}
    return {*steps[-last:], *multiples, *(-negative for _, negative in sorted(measured)[:best])}
