"""Pictures of runs, drawn from their metrics.jsonl. matplotlib is imported only when one is drawn."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyjax.train.metrics import read_records

# Okabe and Ito's palette: told apart by every common form of colour vision. Past its end the dashes differ.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
GREY = "#555555"

LABEL_WIDTH = 40  # characters of a run's name in the legend
LEGEND_WIDTH = 105  # characters that stand side by side below the picture
MOST_RINGS = 24  # held-out points of a run that are marked
MOST_FAINT = 4  # runs whose single batches are drawn too, and held-out points connected


class Run(NamedTuple):
    name: str
    steps: list[int]
    losses: list[float]  # training, nats a token
    heldout_steps: list[int]
    heldout_losses: list[float]  # nats a token
    bits_per_nat: float | None  # bits per byte of one nat per token of this run's held-out text

    @property
    def length(self) -> int:
        return max([*self.steps, *self.heldout_steps, 0])

    def scaled(self, scale: float) -> "Run":
        """The losses in another unit."""
        return self._replace(
            losses=[scale * loss for loss in self.losses], heldout_losses=[scale * loss for loss in self.heldout_losses]
        )


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
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    found = _load(runs)
    scales = {round(run.bits_per_nat or 0.0, 3) for run in found}
    in_bits = 0.0 not in scales
    found = [run.scaled(run.bits_per_nat or 1.0) if in_bits else run for run in found]
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
    for number, run in enumerate(found):
        _draw_run(axes, run, number, len(found))
    last = max(1, *(run.length for run in found))
    axes.set_xlim(0, 1.012 * last)  # half of the last ring stands beyond the last step
    axes.set_ylim(*_limits(found, baselines))
    _draw_baselines(axes, baselines)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(_unit(in_bits, scales))
    if in_bits and len(scales) == 1:
        _draw_nats(axes, scales.pop())
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    _draw_legend(figure, axes, found)
    if title:
        axes.set_title(title, loc="left", fontsize=11, wrap=True)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


# ------------------------------------------------------------------------------------------------ what is drawn


def _load(runs: Sequence[str | Path] | Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Run]:
    if not runs:
        raise ValueError("there is no run to plot")
    if isinstance(runs, Mapping):
        return [_run(name, records) for name, records in runs.items()]
    return [_run(name, read_records(path)) for name, path in zip(short_names(runs), runs, strict=True)]


def short_names(workdirs: Sequence[str | Path]) -> list[str]:
    """The last components of each path, as many as tell all of them apart."""
    parts = [Path(path).resolve().parts for path in workdirs]
    for count in range(1, max(map(len, parts))):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in workdirs]


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


def smooth(values: Sequence[float], share: float = 0.04) -> list[float]:
    """Running mean over about `share` of the points, those in the middle weighing most (a Hann window).

    Before the first point the curve is taken to go on straight, since losses fall steeply there; after the last one
    there is nothing, so that the end is a mean too.
    """
    half = round(share * len(values) / 2)
    if half == 0:
        return list(values)
    known = np.asarray(values, float)
    padded = np.concatenate([2 * known[0] - known[half:0:-1], known])
    window = np.hanning(2 * half + 3)[1:-1]
    total, weight = (np.convolve(a, window, "same") for a in (padded, np.ones_like(padded)))
    return (total / weight)[half:].tolist()


def _limits(runs: Sequence[Run], baselines: Mapping[str, float]) -> tuple[float, float]:
    """Everything but the first fall and lone spikes.

    The first fall is the first 8 % of the longest run's steps, or three quarters of a shorter run's own.
    """
    longest = max(run.length for run in runs)
    values = list(baselines.values())
    for run in runs:
        start = min(0.08 * longest, 0.75 * run.length)
        losses = [loss for step, loss in zip(run.steps, run.losses, strict=True) if step >= start]
        values += np.percentile(losses, [0.5, 99.5]).tolist() if losses else []
        values += [loss for step, loss in zip(run.heldout_steps, run.heldout_losses, strict=True) if step >= start]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.06 * (high - low) or 0.1
    return max(0.0, low - margin), high + margin


# ------------------------------------------------------------------------------------------------ how it is drawn


def _draw_run(axes: Any, run: Run, number: int, count: int) -> None:
    """Each batch's loss faintly, its running mean on top, held-out points ringed. Several runs have a colour and a
    line of the legend each; a run alone has one colour for training and one for held-out text."""
    colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
    alone = count == 1
    mean = smooth(run.losses)
    if count <= MOST_FAINT:
        axes.plot(run.steps, run.losses, color=colour, alpha=0.22, linewidth=0.7)
    axes.plot(run.steps, mean, color=colour, linewidth=1.8, linestyle=dashes)
    every = max(1, -(-len(run.heldout_losses) // MOST_RINGS))
    ring = dict(marker="o", markersize=6, markerfacecolor="white", markeredgewidth=1.6)
    axes.plot(
        run.heldout_steps,
        run.heldout_losses,
        color=COLOURS[1] if alone else colour,
        linewidth=1.2,
        linestyle=":" if count <= MOST_FAINT else "none",
        markevery=slice((len(run.heldout_losses) - 1) % every, None, every),  # the last one among them
        zorder=4,
        **ring,
    )
    end = f"{run.heldout_losses[-1]:.3f}" if run.heldout_losses else ""
    last = f"training {mean[-1]:.3f}" if mean else "no finite loss"
    if alone:
        axes.plot([], [], color=colour, linewidth=1.8, label="training" if mean else "training: no finite loss")
        if end:
            axes.plot([], [], color=COLOURS[1], linestyle=":", label=f"held-out ({end} at the end)", **ring)
    else:
        label = f"{_clip(run.name)}: {end or last}"
        axes.plot([], [], color=colour, linewidth=1.8, linestyle=dashes, label=label, **(ring if end else {}))


def _clip(name: str) -> str:
    """A long name without its middle; its end tells runs apart."""
    keep = LABEL_WIDTH - 1
    return name if len(name) <= LABEL_WIDTH else f"{name[: keep // 3]}…{name[-(keep - keep // 3) :]}"


def _draw_legend(figure: Any, axes: Any, runs: Sequence[Run]) -> None:
    labels = axes.get_legend_handles_labels()[1]
    if not labels:
        return
    columns = max(1, min(3, LEGEND_WIDTH // (8 + max(map(len, labels)))))
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, rows - 2))  # the axes keep their height
    rings = len(runs) > 1 and any(run.heldout_losses for run in runs)
    note = "line: training; rings: held-out, its last value here" if rings else None
    small = dict(title_fontsize=9, fontsize=9, handlelength=3.5)  # room for a dash on both sides of a ring
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, title=note, **small)


def _unit(in_bits: bool, scales: set[float]) -> str:
    if in_bits:
        return "loss (bits per byte)"
    mixed = len(scales - {0.0}) > 1
    return "loss (nats per token, of different tokenizers)" if mixed else "loss (nats per token)"


def _draw_nats(axes: Any, scale: float) -> None:
    """The same losses per token, on the right; `scale` is the bits per byte of one nat per token."""
    right = axes.secondary_yaxis("right", functions=(lambda y: np.divide(y, scale), lambda y: np.multiply(y, scale)))
    right.set_ylabel("nats per token", color=GREY)
    right.tick_params(colors=GREY)
    right.spines["right"].set_color("#bbbbbb")


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
            xy=(0.98 - 0.25 * max(0, crowd - 1), value),
            xycoords=("axes fraction", "data"),
            xytext=(0, -4 if crowd else 4),
            textcoords="offset points",
            ha="right",
            va="top" if crowd else "bottom",
            color=GREY,
            fontsize=8.5,
            bbox=dict(facecolor="white", alpha=0.7, edgecolor="none", pad=0.8),  # legible on a curve
            zorder=5,
        )
