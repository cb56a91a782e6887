"""Pictures of runs, drawn from their metrics.jsonl. matplotlib is imported only when one is drawn."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyjax.train.metrics import read_records

# Okabe and Ito's palette: told apart by every common form of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#555555"


class Run(NamedTuple):
    name: str
    steps: list[int]
    losses: list[float]  # training, nats a token
    heldout_steps: list[int]
    heldout_losses: list[float]  # nats a token
    bits_per_nat: float | None  # bits per byte of one nat per token of this run's held-out text


def loss_plot(
    runs: Sequence[str | Path] | Mapping[str, Sequence[Mapping[str, Any]]],
    baselines: Mapping[str, float],
    path: str | Path,
    title: str = "",
) -> Path:
    """Draw training and held-out loss against the optimizer step; returns the PNG's path.

    `runs` is workdirs, or records (lines of metrics.jsonl) by name. The axis is in bits per byte if every run's
    held-out records hold "bits_per_byte" (with nats per token on the right, if all runs share one tokenisation), and
    in nats per token otherwise; `baselines` are horizontal lines in that unit.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = _load(runs)
    in_bits = all(run.bits_per_nat for run in found)
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    for run, colour in zip(found, _cycle(len(found)), strict=True):
        _draw_run(axes, run, colour, (run.bits_per_nat or 1.0) if in_bits else 1.0, alone=len(found) == 1)
    last = max((step for run in found for step in (*run.steps, *run.heldout_steps)), default=1)
    axes.set_xlim(0, last)
    axes.set_ylim(*_limits(found, baselines, in_bits))
    _draw_baselines(axes, baselines)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (bits per byte)" if in_bits else "loss (nats per token)")
    scales = {round(run.bits_per_nat or 1.0, 3) for run in found}
    if in_bits and len(scales) == 1:
        scale = scales.pop()
        right = axes.secondary_yaxis(
            "right", functions=(lambda y: np.divide(y, scale), lambda y: np.multiply(y, scale))
        )
        right.set_ylabel("nats per token", color=GREY)
        right.tick_params(colors=GREY)
        right.spines["right"].set_color("#bbbbbb")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    note = None if len(found) == 1 else "line: training; rings: held-out, its last value in the legend"
    figure.legend(loc="outside lower center", ncols=3, frameon=False, title=note, title_fontsize=9, fontsize=9)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def _load(runs: Sequence[str | Path] | Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Run]:
    named: dict[str, Sequence[Mapping[str, Any]]] = (
        dict(runs) if isinstance(runs, Mapping) else {str(Path(path)): read_records(path) for path in runs}
    )
    if not named:
        raise ValueError("there is no run to plot")
    return [_run(name, records) for name, records in _short_names(named).items()]


def _short_names(named: dict[str, Any]) -> dict[str, Any]:
    """Keyed by last path component where that tells the runs apart."""
    short = {Path(name).name: records for name, records in named.items()}
    return short if len(short) == len(named) else named


def _run(name: str, records: Sequence[Mapping[str, Any]]) -> Run:
    train = [r for r in records if r["split"] == "train" and _finite(r.get("loss"))]
    heldout = [r for r in records if r["split"] == "heldout" and _finite(r.get("loss"))]
    bits = [r["bits_per_byte"] / r["loss"] for r in heldout if _finite(r.get("bits_per_byte")) and r["loss"] > 0]
    return Run(
        name,
        [r["step"] for r in train],
        [r["loss"] for r in train],
        [r["step"] for r in heldout],
        [r["loss"] for r in heldout],
        bits[-1] if bits else None,
    )


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _draw_run(axes: Any, run: Run, colour: str, scale: float, alone: bool) -> None:
    """Each batch's loss faintly, its running mean on top, held-out points ringed. Several runs have a colour and a
    line of the legend each; a run alone has one colour for training and one for held-out text."""
    losses, points = [scale * loss for loss in run.losses], [scale * loss for loss in run.heldout_losses]
    last = f"held-out ({points[-1]:.3f} at the end)" if points else ""
    axes.plot(run.steps, losses, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(run.steps, smooth(losses), color=colour, linewidth=1.8, label="training" if alone else None)
    label = last if alone else f"{run.name}: {points[-1]:.3f}" if last else run.name
    ring = dict(marker="o", markersize=6, markerfacecolor="white", markeredgewidth=1.6)
    axes.plot(
        run.heldout_steps,
        points,
        color=COLOURS[1] if alone else colour,
        linewidth=1.2,
        linestyle=":",
        label=label or None,
        clip_on=False,
        zorder=4,
        **(ring if points else {}),
    )


def _draw_baselines(axes: Any, baselines: Mapping[str, float]) -> None:
    """Dashed lines, labelled at the right, where curves have long left the baselines' height.

    The label stands above its line; where lines are close, the lower ones' stand below theirs, side by side.
    """
    low, high = axes.get_ylim()
    above, crowd = math.inf, 0
    for name, value in sorted(baselines.items(), key=lambda item: -item[1]):
        crowd = crowd + 1 if above - value < 0.08 * (high - low) else 0
        above = value
        axes.axhline(value, color=GREY, linewidth=1.1, linestyle="--", zorder=1)
        axes.annotate(
            f"{name}  {value:.3g}",
            xy=(0.99 - 0.25 * max(0, crowd - 1), value),
            xycoords=("axes fraction", "data"),
            xytext=(0, -3 if crowd else 3),
            textcoords="offset points",
            ha="right",
            va="top" if crowd else "bottom",
            color=GREY,
            fontsize=8.5,
            zorder=3,
        )


def smooth(values: Sequence[float], share: float = 0.02) -> list[float]:
    """Centred running mean over about `share` of the points; the window shrinks towards both ends."""
    half = max(1, round(share * len(values) / 2))
    means = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        means.append(sum(window) / len(window))
    return means


def _limits(runs: Sequence[Run], baselines: Mapping[str, float], in_bits: bool) -> tuple[float, float]:
    """Everything but the first fall: the range of the losses past the first 8 % of the steps, and the baselines."""
    values = list(baselines.values())
    for run in runs:
        scale = (run.bits_per_nat or 1.0) if in_bits else 1.0
        start = 0.08 * max([*run.steps, *run.heldout_steps, 0])
        values += [scale * y for x, y in zip(run.steps, run.losses, strict=True) if x >= start]
        values += [scale * y for x, y in zip(run.heldout_steps, run.heldout_losses, strict=True) if x >= start]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.06 * (high - low) or 0.1
    return max(0.0, low - margin), high + margin
