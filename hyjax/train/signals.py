"""SIGTERM and Ctrl-C: the loop is asked to stop, and the process is gone in time even where the loop cannot answer.

    with Signals(grace_seconds=20) as stop:
        ...                                       # start-up: there is nothing to lose
        stop.working()                            # from here on there is: steps that no checkpoint holds
        with stop.rescuable(save): evaluate(...)  # nothing here changes the state, so another thread may save it
        stop.check(step)                          # raises Stopped if a signal came; the loop then saves `step`

Python runs a signal's handler only between two instructions of the main thread, so not while that is inside XLA's
compiler. The interpreter's own handler, in C, writes the signal's number into a pipe at once; a thread reads it.

    the signal comes                     | what is saved, and when the process ends
    -------------------------------------+------------------------------------------------------------------------
    in a training step                   | that step (and one that is already dispatched); when the save is on disk
    in an evaluation                     | the state it evaluates, after the current batch; when that is on disk
    there, and the loop doesn't answer   | at 0.3 of the grace time the thread saves that state, unless it is on
      (its step compiles, a batch hangs) |   disk already, and ends the process
    in a save                            | it is finished, then as in a training step
    before the first step has run        | nothing new exists; the process ends within a second
    at any time, all this not done       | nothing more: at 0.8 of the grace time the process ends. The checkpoint
      (a step longer than that, a disk)  |   before counts, and a save cut off here is an unfinished folder

All this is with the exit code of the signal (hyjax/exit_codes.py). A second Ctrl-C raises KeyboardInterrupt, and ends
the process one second later where that doesn't. In an interactive interpreter Ctrl-C never ends the process.

Outside the main thread handlers can't be set: then `unhandled` says so, and signals do what they did before. A signal
that was ignored (nohup, a job in a shell's background) stays ignored.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from hyjax import exit_codes

REASONS = {signal.SIGTERM: "preempted", signal.SIGINT: "interrupted"}
CODES = {signal.SIGTERM: exit_codes.PREEMPTED, signal.SIGINT: exit_codes.INTERRUPTED}
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}

START_SECONDS = 0.5  # that the loop has to answer where there is nothing to lose
RESCUE_AFTER = 0.3  # of the grace time: the loop has not answered, so another thread saves
END_AFTER = 0.8  # of the grace time: the process ends whatever has been done
LAST_WORDS_SECONDS = 5.0  # for a record and a flush, which a full disk or pipe may block


class Stopped(Exception):
    """A signal ended the run. `code` is the exit code, `reason` a word, `step` the last finished step."""

    def __init__(self, signum: int, step: int):
        super().__init__(f"{NAMES[signal.Signals(signum)]} after step {step}")
        self.code, self.reason, self.step = CODES[signal.Signals(signum)], REASONS[signal.Signals(signum)], step


def leave(code: int, last_words: Callable[[], None]) -> NoReturn:
    """Ends the process from any thread, without waiting for any other, once `last_words` is done or takes too long."""

    def speak() -> None:
        try:
            last_words()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    speaker = threading.Thread(target=speak, daemon=True, name="last-words")
    speaker.start()
    speaker.join(LAST_WORDS_SECONDS)
    os._exit(code)


def _nothing_new() -> None:
    """The state is on disk or can be made again: what `rescuable` needs no save for."""


class Signals:
    """Handles SIGTERM and SIGINT from `__enter__` to `__exit__`, then gives them back to the handlers before.

    `record(reason)` is called before the process is ended from here; the owner sets it once there is a place to write.
    """

    def __init__(self, grace_seconds: float):
        self.record: Callable[[str], None] = lambda reason: None
        self.unhandled = ""
        self._grace = grace_seconds
        self._lock = threading.Lock()  # held while the state is saved from here: the loop waits at its next word
        self._signum: int | None = None  # the first signal
        self._answered = False  # the loop knows, and saves by itself
        self._rescue: Callable[[], None] | None = _nothing_new  # None: there is something new that can't be saved now
        self._interrupts = 0  # Ctrl-C as Python's handler saw it
        self._closed = threading.Event()
        self._timers: list[threading.Timer] = []

    # ------------------------------------------------------------------------------------------ what the loop calls

    def check(self, step: int) -> None:
        """Raises Stopped if a signal came; `step` is the last finished one, whose state the caller then saves."""
        with self._lock:
            if self._signum is None:
                return
            self._answered = True
        raise Stopped(self._signum, step)

    def working(self) -> None:
        """From here on there are steps that no checkpoint holds and, since steps donate their state, none can."""
        with self._lock:
            self._rescue = None

    @contextlib.contextmanager
    def rescuable(self, save: Callable[[], None] | None = None) -> Iterator[None]:
        """While inside, `save()` from another thread makes it safe to end the process: it saves the state, which
        nothing inside donates, and waits for the disk. None: there is nothing to save."""
        with self._lock:
            before, self._rescue = self._rescue, save or _nothing_new
        try:
            yield
        finally:
            with self._lock:
                self._rescue = before

    # ------------------------------------------------------------------------------------------------- the machinery

    def __enter__(self) -> Signals:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            self.unhandled = "SIGTERM and Ctrl-C are left to the caller: this is not the main thread"
            return self
        self._pipe, self._wake = os.pipe()
        os.set_blocking(self._wake, False)  # a handler must never wait
        self._wake_before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._reader = threading.Thread(target=self._read, daemon=True, name="signals")
        self._reader.start()
        for signum in CODES:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, handler in self._before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wake_before)
        os.close(self._wake)
        self._reader.join()  # it reads what came to the last, and closes its side
        with self._lock:  # not while the state is being saved: the process ends after that
            self._closed.set()
            for timer in self._timers:
                timer.cancel()
        if self._signum is not None and not self._answered and exception[0] is None:
            signal.raise_signal(self._signum)  # too late for this run; its caller must not miss it

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Python's handler. What is to be done the reader does, unless the same person asks twice."""
        if signum == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt

    def _read(self) -> None:
        interrupts = 0
        with open(self._pipe, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                if self._wake_before != -1:  # whoever listened before us, such as an event loop
                    with contextlib.suppress(OSError):
                        os.write(self._wake_before, numbers)
                for signum in [number for number in numbers if number in CODES]:
                    interrupts += signum == signal.SIGINT
                    if self._signum is None:
                        self._begin(signum)
                    elif interrupts > 1:
                        self._after(1.0, functools.partial(self._end, exit_codes.INTERRUPTED, "interrupted at once"))

    def _begin(self, signum: int) -> None:
        """The first signal: say so, and see to the end in a thread of its own, so that a second one is read."""
        self._signum = signum
        again = "; again to stop at once" if signum == signal.SIGINT else ""
        print(f"hyjax: {NAMES[signal.Signals(signum)]}: saving and stopping{again}", file=sys.stderr, flush=True)
        if signum == signal.SIGINT and hasattr(sys, "ps1"):
            return  # a person at an interpreter whose process isn't this run's to end
        code = CODES[signal.Signals(signum)]
        said = f"not saved in {END_AFTER * self._grace:g} s; the checkpoint before counts"
        self._after(END_AFTER * self._grace, functools.partial(self._end, code, said))
        threading.Thread(target=self._see_to_the_end, args=(code,), daemon=True, name="grace").start()

    def _see_to_the_end(self, code: int) -> None:
        """Until the loop has answered; where it doesn't, saves in its place."""
        began = time.monotonic()
        while not self._closed.wait(0.02):
            with self._lock:
                if self._answered or self._closed.is_set():
                    return
                patience = START_SECONDS if self._rescue is _nothing_new else RESCUE_AFTER * self._grace
                if self._rescue is None or time.monotonic() - began < patience:
                    continue
                try:
                    self._rescue()
                except BaseException as error:  # whatever it is, the process ends here and says it
                    self._end(exit_codes.CHECKPOINT, f"the state could not be saved: {type(error).__name__}: {error}")
                nothing = self._rescue is _nothing_new
                self._end(code, "there was nothing new to save" if nothing else "saved while the loop did not answer")

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _end(self, code: int, said: str) -> None:
        def last_words() -> None:
            print(f"hyjax: stopped: {said}", file=sys.stderr)
            self.record(REASONS[signal.Signals(self._signum or signal.SIGINT)])

        leave(code, last_words)


@contextlib.contextmanager
def ended_at_once() -> Iterator[None]:
    """SIGTERM inside ends the process at once with its exit code: for imports, before a run has anything to lose."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(exit_codes.PREEMPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
