"""The stall watchdog: where nothing completes in time, every thread's stack is written down and the process ends.

    with Watchdog(stall_seconds=600, start_seconds=3600) as watchdog:
        watchdog.begins("training step", 12)      # what was before is complete; this has so long

A run that hangs (a collective whose partner is gone, a file system that doesn't answer, a dead data source) costs its
machines until somebody looks. A process that ends with hyjax/exit_codes.py's STALLED is started again.

The first phase of each kind may take `start_seconds`: it may be compiled. Every later one has `stall_seconds`. Time
in which the process as a whole was stopped (a suspended job, a debugger) isn't counted, and a phase that is slow but
ends within its limit is left alone. A hang inside C code that holds Python's global lock can't be seen from here.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hyjax import exit_codes
from hyjax.train.signals import leave


class Phase(NamedTuple):
    name: str
    step: int
    limit: float  # seconds
    key: str  # of the config, that the limit comes from


class Watchdog:
    """Watches from `__enter__` to `__exit__`, from a thread of its own, that phases end within their limits.

    `path` is where the stacks go beside stderr, `record(reason)` is called after they are written: the owner sets both
    once they are known.
    """

    def __init__(self, stall_seconds: float, start_seconds: float):
        self.path: Path | None = None
        self.record: Callable[[str], None] = lambda reason: None
        self._limits = {"train.stall_seconds": float(stall_seconds), "train.start_seconds": float(start_seconds)}
        self._known: set[str] = set()  # kinds of phases of which one has begun
        self._closed = threading.Event()
        self.begins("start", 0)

    def begins(self, name: str, step: int) -> None:
        """Something is complete, and this is what the run waits for now."""
        key = "train.stall_seconds" if name in self._known else "train.start_seconds"
        self._known.add(name)
        self.phase = Phase(name, step, self._limits[key], key)

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed.set()

    def _watch(self) -> None:
        tick = min(1.0, min(self._limits.values()) / 20)
        phase, waited, last = self.phase, 0.0, time.monotonic()
        while not self._closed.wait(tick):
            now = time.monotonic()
            if self.phase is phase:
                waited += min(now - last, 2 * tick)  # more has passed only where this thread could not run either
            else:
                phase, waited = self.phase, 0.0
            last = now
            if waited > phase.limit:
                self._stalled(phase, waited)

    def _stalled(self, phase: Phase, waited: float) -> None:
        headline = (
            f"stalled: phase {phase.name!r}, step {phase.step}, {waited:.0f} seconds without progress"
            f" ({phase.key} is {phase.limit:g}); the stacks of all threads:\n"
        )

        def last_words() -> None:
            os.write(2, f"hyjax: {headline}".encode())  # not through sys.stderr, whose lock a stuck thread may hold
            faulthandler.dump_traceback(2)
            try:
                if self.path is not None:
                    with open(self.path, "w") as file:
                        print(headline, file=file, flush=True)
                        faulthandler.dump_traceback(file)
            except OSError as error:
                os.write(2, f"hyjax: {self.path} could not be written: {error}\n".encode())
            self.record("stalled")

        leave(exit_codes.STALLED, last_words)
