"""How far the tokenising of a corpus is, and saying so: a bar on a terminal, else a line at times, both on stderr."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LINE_SECONDS = 10  # between lines where there is no terminal


@dataclass(frozen=True)
class Progress:
    """Units and input bytes of those done, bytes of text so far, seconds."""

    units_done: int
    units: int
    input_done: int
    input: int
    text: int
    seconds: float


Report = Callable[[Progress], None]


@contextmanager
def console() -> Iterator[Report]:
    """What reports progress to whoever looks on."""
    if not sys.stderr.isatty():
        yield _line_report()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenize", total=None, done="")
        yield lambda at: bar.update(task, total=at.input, completed=at.input_done, done=_done(at))


def _line_report() -> Report:
    last = time.monotonic()

    def report(at: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"tokenize: {_done(at)}", file=sys.stderr, flush=True)

    return report


def _done(at: Progress) -> str:
    rate = f", {at.text / at.seconds / 1e6:.1f} MB/s" if at.seconds > 1 else ""
    return f"{at.units_done} of {at.units} units, {at.text / 1e6:,.1f} MB of text{rate}"
