"""What a run says about itself: metrics.jsonl, TensorBoard events, lines or a bar on the console, and its speed.

`metrics.jsonl` is the record; everything else can be drawn from it. One JSON object a line:

    {"step": 20, "attempt": 1, "time": 1718900000.25, "split": "train", "loss": 2.31, ...}

`attempt` counts the times the run was started in this workdir, from 1; each has an empty file `attempts/NUMBER`, which
is how processes that start at once have different numbers. A run that resumes at an earlier step than it was stopped
at writes those steps again, under its own attempt; `read_records` keeps the newest of each.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hyjax.cost import chips

FILE = "metrics.jsonl"
CLAIMS = "attempts"
_unique = itertools.count()


class Throughput:
    """Tokens and model FLOPs a second over the time spent in training steps alone.

    Call `start` once the first step has run, so that its compilation does not count, `add` after each step,
    and put evaluations and checkpoints under `with paused():`. Steps are asynchronous: before `read` and before a
    pause the caller must have fetched a value of the last step.

    A training step costs three times the forward pass's model FLOPs (the backward pass twice as much again).
    """

    def __init__(
        self,
        forward_flops_per_token: float,
        device_kind: str,
        num_devices: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._flops_per_token = 3 * forward_flops_per_token
        chip = chips.find(device_kind)
        self.peak = None if chip is None else chip.flops * num_devices
        self._device_kind = device_kind
        self._clock = clock
        self._since: float | None = None
        self._seconds = 0.0
        self._tokens = 0

    def describe(self) -> str:
        """One sentence on what utilisation is measured against."""
        if self.peak is None:
            return f"The peak FLOP/s of {self._device_kind!r} is not known: utilisation is null, FLOP/s are reported."
        return f"Utilisation is of {self.peak / 1e12:,.0f} TFLOP/s, the bfloat16 peak of {self._device_kind!r} devices."

    def start(self) -> None:
        """Start a window now and forget the one before."""
        self._seconds, self._tokens, self._since = 0.0, 0, self._clock()

    def add(self, tokens: int) -> None:
        """Count a step over `tokens` positions; nothing before the first `start`."""
        if self._since is not None:
            self._tokens += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        running = self._since is not None
        if self._since is not None:
            self._seconds += self._clock() - self._since
        self._since = None
        try:
            yield
        finally:
            if running:
                self._since = self._clock()

    def read(self) -> dict[str, float | None]:
        """{"tokens_per_second", "model_flops_per_second", "utilisation"} since the last `read` or `start`.

        All None in a window without a counted step; "utilisation" (0 to 1) also where the peak isn't known.
        """
        if self._since is None:
            return {"tokens_per_second": None, "model_flops_per_second": None, "utilisation": None}
        now = self._clock()
        seconds, tokens = self._seconds + now - self._since, self._tokens
        self._seconds, self._tokens, self._since = 0.0, 0, now
        rate = tokens / seconds if tokens and seconds > 0 else None
        flops = None if rate is None else rate * self._flops_per_token
        utilisation = None if flops is None or self.peak is None else flops / self.peak
        return {"tokens_per_second": rate, "model_flops_per_second": flops, "utilisation": utilisation}


class Logger:
    """Writes `workdir/metrics.jsonl` and TensorBoard events beside it, and reports on standard output.

    Opening it again, in this process or another, even at the same moment, appends: no line or event of another attempt
    is lost. On a terminal there is a progress bar of `steps` steps, elsewhere a plain line a report. `start` is the
    step that this attempt goes on from.
    """

    def __init__(self, workdir: str | Path, steps: int, start: int = 0, console: bool = True):
        self.workdir = Path(workdir)
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.attempt = _claim_attempt(self.workdir)
        self._file = (self.workdir / FILE).open("ab+", buffering=0)
        self._gap = b""  # what ends a line that a kill or a full disk cut off, so that it costs only itself
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            self._gap = b"" if self._file.read(1) == b"\n" else b"\n"
        self._events = _event_writer(self.workdir, self.attempt)
        self._steps = steps
        self._bar = _bar(steps) if console and sys.stdout.isatty() else None
        self._console = console
        self._write({"step": start, "split": "start", "pid": os.getpid()})

    def log(self, step: int, metrics: Mapping[str, Any], split: str = "train") -> None:
        """Record numbers (or None) at a step: the number of updates done. `split` says where they come from."""
        values = {name: _plain(value) for name, value in metrics.items()}
        self._write({"step": step, "split": split} | {name: _jsonable(value) for name, value in values.items()})
        if self._events is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value):  # it complains of others on stderr
                    self._events.add_scalar(f"{split}/{name}", value, step)
        self._show(step, values, split)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Record a piece of text, such as a sample, and print it."""
        self._write({"step": step, "split": "text", "name": name, "text": text})
        if self._events is not None:
            self._events.add_text(name, text, step)
        self.print(f"{name} at step {step}:\n{text}")

    def print(self, text: str) -> None:
        """A line for the person who watches (above the bar); not recorded."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._console:
            print(text, flush=True)

    def close(self) -> None:
        """Flush and close everything; may be called twice."""
        self._file.close()
        if self._events is not None:
            self._events.close()
        if self._bar is not None:
            self._bar.stop()
        self._events = self._bar = None

    def _write(self, record: dict[str, Any]) -> None:
        head = {"step": record.pop("step"), "attempt": self.attempt, "time": round(time.time(), 3)}
        line = self._gap + json.dumps(head | record, allow_nan=False).encode() + b"\n"
        self._gap = b"\n"
        while line:  # at once, where the disk has room: lines of two processes don't mix
            line = line[self._file.write(line) :]
        self._gap = b""

    def _show(self, step: int, values: Mapping[str, Any], split: str) -> None:
        line = describe_metrics(values)
        if not line:  # nothing that a person follows
            return
        if self._bar is None:
            self.print(f"step {step:>{len(str(self._steps))}}/{self._steps}  {split}  {line}")
        elif split == "train":
            self._bar.update(self._bar.task_ids[0], completed=step, status=line)
        else:
            self.print(f"step {step}  {split}  {line}")


_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda v: f"loss {v:.4f}",
    "bits_per_byte": lambda v: f"bits/byte {v:.4f}",
    "accuracy": lambda v: f"accuracy {v:.4f}",
    "grad_norm": lambda v: f"|grad| {v:.3g}",
    "learning_rate": lambda v: f"lr {v:.3g}",
    "tokens_per_second": lambda v: f"{v:,.0f} tokens/s",
    "model_flops_per_second": lambda v: f"{v / 1e9:,.1f} GFLOP/s",
    "utilisation": lambda v: f"MFU {100 * v:.1f} %",
}


def describe_metrics(values: Mapping[str, Any]) -> str:
    """The metrics a person follows, on one line: "loss 2.3101  accuracy 0.3120  |grad| 0.81  ..."."""
    hidden = {"model_flops_per_second"} if values.get("utilisation") is not None else set()
    shown = [name for name in _SHOWN if values.get(name) is not None and name not in hidden]
    return "  ".join(_SHOWN[name](values[name]) for name in shown)


def read_records(workdir: str | Path, split: str | None = None) -> list[dict[str, Any]]:
    """The lines of a workdir's metrics.jsonl (of one split), in order of step and of time.

    Where attempts overlap, an earlier attempt's lines at or beyond the first step that a later one logged in the
    same split are left out. Lines cut off by a kill, and the marks of starts, are left out too.
    """
    records = [r for r in _parse((Path(workdir) / FILE).read_bytes()) if r["split"] != "start"]
    first: dict[tuple[str, int], int] = {}
    for record in records:
        key = (record["split"], record["attempt"])
        first[key] = min(record["step"], first.get(key, record["step"]))

    def superseded(record: dict[str, Any]) -> bool:
        return any(
            kind == record["split"] and attempt > record["attempt"] and step <= record["step"]
            for (kind, attempt), step in first.items()
        )

    kept = [r for r in records if not superseded(r) and split in (None, r["split"])]
    return sorted(kept, key=lambda record: (record["step"], record["time"]))


def next_attempt(workdir: str | Path) -> int:
    """The number that a logger opened in this workdir would have, if no other is opened before."""
    path, claims = Path(workdir) / FILE, Path(workdir) / CLAIMS
    taken = [record["attempt"] for record in _parse(path.read_bytes())] if path.exists() else []
    taken += [int(claim.name) for claim in claims.iterdir() if claim.name.isdecimal()] if claims.is_dir() else []
    return 1 + max(taken, default=0)


def _claim_attempt(workdir: Path) -> int:
    """A number that no other attempt in this workdir has or will have: its file can be created only once."""
    (workdir / CLAIMS).mkdir(exist_ok=True)
    attempt = next_attempt(workdir)
    while True:
        try:
            (workdir / CLAIMS / str(attempt)).touch(exist_ok=False)
            return attempt
        except FileExistsError:
            attempt += 1


def _parse(content: bytes) -> list[dict[str, Any]]:
    records = []
    for line in content.decode("utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # cut off by a kill
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("attempt"), int):
                records.append({k: _NAMED.get(v, v) if isinstance(v, str) else v for k, v in record.items()})
    return records


# JSON has no such numbers; readers other than Python's refuse a bare NaN.
_NAMED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _jsonable(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _plain(value: Any) -> Any:
    """A JAX or NumPy scalar as the Python number it holds."""
    return value.item() if hasattr(value, "item") else value


def _event_writer(workdir: Path, attempt: int) -> Any:
    """A writer whose file no other writer shares: tensorboardX names files by the second and truncates one of the
    same name."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        logging.getLogger(__name__).warning("tensorboardX is not installed: metrics go to %s only", FILE)
        return None
    return SummaryWriter(str(workdir), filename_suffix=f".{attempt}.{os.getpid()}.{next(_unique)}")


def _bar(steps: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    bar = Progress(*columns)
    bar.add_task("train", total=steps, status="compiling")
    bar.start()
    return bar
