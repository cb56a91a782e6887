"""Signals, the watchdog and the lock by themselves: small processes without JAX that are stuck where nothing helps."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from hyjax.config import ConfigError
from hyjax.train.lock import locked
from hyjax.train.signals import Signals, Stopped
from hyjax.train.watchdog import Watchdog

GRACE = 2.0  # seconds

HEAD = """
import ctypes, os, pathlib, sys, time
from hyjax.train.signals import Signals, Stopped
from hyjax.train.watchdog import Watchdog

def stuck():
    "Inside C for ever: no signal handler of Python runs, and none interrupts it."
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

def stuck_in_python():
    while True:
        time.sleep(60)

def ready():
    print("ready", flush=True)

folder = pathlib.Path(sys.argv[1])
stop = Signals(2.0)
stop.record = lambda reason: print("recorded", reason)
"""


class Script:
    """A process that runs `body` after HEAD; a context manager that returns once it has said "ready"."""

    def __init__(self, tmp_path, body):
        code = (
            "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + HEAD + textwrap.dedent(body)
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": ""},  # so that a flush that is left out shows
        )

    def __enter__(self):
        assert self._process.stdout.readline() == "ready\n", self._process.communicate()[1]
        return self

    def __exit__(self, *exception):
        self._process.kill()
        self._process.wait()

    def send(self, *signums, pause=0.3):
        for signum in signums:
            self._process.send_signal(signum)
            time.sleep(pause)

    def end(self):
        """(exit code, seconds until then, stdout, stderr)"""
        began = time.monotonic()
        out, err = self._process.communicate(timeout=30)
        return self._process.returncode, time.monotonic() - began, out, err


SAVE = 'with stop.rescuable(lambda: (folder / "saved").write_text("whole")): '
STUCK = {
    # The loop can't answer, nothing donates the state: another thread saves, at 0.3 of the grace time.
    "evaluating": (SAVE, 75, "whole", (0.25, 0.55), "saved while the loop did not answer"),
    # In a step the state is donated: nothing can be saved, the process ends at 0.8 of the grace time.
    "in a step": ("if True: ", 75, None, (0.6, 0.95), "not saved in 1.6 s; the checkpoint before counts"),
    # A disk that hangs as well: the same.
    "saving hangs": ("with stop.rescuable(stuck): ", 75, None, (0.6, 0.95), "not saved in 1.6 s"),
    # Nothing is new: no need to wait.
    "nothing new": ("with stop.rescuable(): ", 75, None, (0.0, 0.4), "there was nothing new to save"),
    "a save fails": ("with stop.rescuable(lambda: 1 / 0): ", 4, None, (0.25, 0.55), "division by zero"),
}


@pytest.mark.parametrize("case", STUCK)
def test_a_loop_that_does_not_answer(case, tmp_path):
    enter, code, saved, (earliest, latest), said = STUCK[case]
    body = f"with stop:\n    stop.working()\n    {enter}\n        ready(); stuck()"
    with Script(tmp_path, body) as script:
        script.send(signal.SIGTERM, pause=0)
        found, seconds, out, err = script.end()
    assert found == code, err
    assert said in err
    assert earliest * GRACE < seconds < latest * GRACE + 0.5  # the last for a machine that is busy
    assert out == "recorded preempted\n"  # what was in Python's buffer is flushed too
    assert [path.read_text() for path in tmp_path.iterdir()] == [saved] * bool(saved)


def test_start_up_ends_at_once_and_ctrl_c_has_its_code(tmp_path):
    with Script(tmp_path, "with stop:\n    ready(); stuck()") as script:
        script.send(signal.SIGINT, pause=0)
        code, seconds, out, err = script.end()
    assert (code, out) == (130, "recorded interrupted\n") and seconds < 1.5, err


@pytest.mark.parametrize("where", ["stuck", "stuck_in_python"])
def test_a_second_ctrl_c_stops_at_once(where, tmp_path):
    body = f"stop = Signals(60)\nwith stop:\n    stop.working(); ready(); {where}()"
    with Script(tmp_path, body) as script:
        script.send(signal.SIGINT, signal.SIGINT)
        code, seconds, _, err = script.end()
    assert "saving and stopping; again to stop at once" in err
    assert seconds < 5
    assert code == 130 if where == "stuck" else "KeyboardInterrupt" in err


@pytest.mark.parametrize("lose", ["something to lose", "nothing to lose"])
def test_a_loop_that_answers_is_left_to_save(lose, tmp_path):
    """It answers at once and saves for longer than 0.3 of the grace time; SIGTERMs after the first change nothing."""
    body = """
    try:
        with stop:
            SOMETHING and stop.working()
            try:
                with stop.rescuable(lambda: (folder / "rescued").touch()):
                    ready()
                    while True:
                        stop.check(7)
                        time.sleep(0.01)
            except Stopped:
                time.sleep(1.2)
                (folder / "saved").touch()
                raise
    except Stopped as stopped:
        print(stopped, stopped.step, stopped.reason)
        sys.exit(stopped.code)
    """
    with Script(tmp_path, body.replace("SOMETHING", str(lose == "something to lose"))) as script:
        script.send(signal.SIGTERM, signal.SIGTERM)
        code, _, out, err = script.end()
    assert (code, out) == (75, "SIGTERM after step 7 7 preempted\n"), err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_rescue_under_way_holds_the_loop(tmp_path):
    """The loop comes back while another thread saves: it must not go on to a step that donates what is being saved."""
    body = """
    def save():
        time.sleep(0.6)
        (folder / "saved").touch()

    with stop:
        stop.working()
        with stop.rescuable(save):
            ready()
            time.sleep(0.9)  # longer than 0.3 of the grace time, shorter than that and the save
        (folder / "went on").touch()
    """
    with Script(tmp_path, body) as script:
        script.send(signal.SIGTERM, pause=0)
        code, _, _, err = script.end()
    assert code == 75, err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


# ------------------------------------------------------------------------------------------------ in this process


def test_handlers_come_back_and_what_was_ignored_stays_so():
    heard = []
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: heard.append("TERM"))}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wake = signal.set_wakeup_fd(writer)
    try:
        with Signals(60) as stop:
            stop.working()
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            stop.check(3)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Stopped, match="SIGTERM after step 3") as stopped:
                for _ in range(100):
                    stop.check(3)
                    time.sleep(0.05)
        assert (stopped.value.code, stopped.value.reason, stopped.value.step) == (75, "preempted", 3)
        assert os.read(reader, 9) == bytes([signal.SIGTERM])  # who listened before us still does
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["TERM"] and signal.set_wakeup_fd(writer) == writer
    finally:
        signal.set_wakeup_fd(wake)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        os.close(reader)
        os.close(writer)


def test_a_signal_too_late_for_the_run_reaches_its_caller():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("TERM"))
    try:
        with Signals(60) as stop:
            stop.working()
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["TERM"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_it_says_so():
    before, said = signal.getsignal(signal.SIGTERM), []

    def work():
        with Signals(60) as stop:
            said.append(stop.unhandled)
            stop.check(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == ["SIGTERM and Ctrl-C are left to the caller: this is not the main thread"]
    assert signal.getsignal(signal.SIGTERM) is before


# ------------------------------------------------------------------------------------------------ the watchdog

WATCHED = """
with Watchdog(stall_seconds={stall}, start_seconds={start}) as watchdog:
    watchdog.path = folder / "stall-3.txt"
    watchdog.record = lambda reason: print("recorded", reason)
    ready()
    {work}
"""


def watched(tmp_path, stall, start, work, signals=()):
    with Script(tmp_path, WATCHED.format(stall=stall, start=start, work=work)) as script:
        time.sleep(0.2)  # it is in the midst of something
        script.send(*signals, pause=1.5)
        return script.end()


def test_a_stall_writes_every_stack_and_exits(tmp_path):
    work = 'watchdog.begins("training step", 11); watchdog.begins("training step", 12); stuck_in_python()'
    code, _, out, err = watched(tmp_path, 0.5, 60, work)
    assert (code, out) == (76, "recorded stalled\n"), err
    written = (tmp_path / "stall-3.txt").read_text()
    first, stacks = written.split("\n", 1)
    assert first == (
        "stalled: phase 'training step', step 12, 1 seconds without progress (train.stall_seconds is 0.5); the stacks"
        " of all threads:"
    )
    assert first in err
    for text in (stacks, err):
        assert "in stuck_in_python" in text and "in _watch" in text


def test_a_stall_inside_c_is_seen_and_the_first_phase_of_a_kind_may_take_longer(tmp_path):
    code, seconds, _, err = watched(tmp_path, 0.2, 1.0, "stuck()")
    assert code == 76 and "phase 'start', step 0" in err and "(train.start_seconds is 1)" in err and seconds > 0.6
    assert "in stuck\n" in (tmp_path / "stall-3.txt").read_text()


def test_slow_runs_and_stopped_processes_are_left_alone(tmp_path):
    """Thirty steps close to the limit, the first longer than it; and one whose process is suspended meanwhile."""
    steps = "[(watchdog.begins('step', n), time.sleep(0.5 if n == 0 else 0.1)) for n in range(30)]"
    assert watched(tmp_path, 0.4, 60, steps)[0] == 0
    steps = "[(watchdog.begins('step', n), [time.sleep(0.02) for _ in range(20)]) for n in range(10)]"
    code, _, _, err = watched(tmp_path, 1.0, 1.0, steps, (signal.SIGSTOP, signal.SIGCONT))
    assert code == 0, err


def test_a_report_that_can_not_be_written_does_not_keep_the_process(tmp_path):
    work = "watchdog.path = folder / 'no' / 'such'; watchdog.record = lambda reason: stuck(); stuck_in_python()"
    code, seconds, _, err = watched(tmp_path, 0.2, 0.2, work)
    assert code == 76 and "could not be written" in err and "in stuck_in_python" in err and seconds < 10


# ------------------------------------------------------------------------------------------------ the lock

HOLD = """
from hyjax.train.lock import locked
with locked(folder) as notice:
    ready(); stuck()
"""


def test_a_workdir_in_use_is_refused_and_a_dead_owner_s_lock_taken_over(tmp_path):
    with Script(tmp_path, HOLD) as script:
        pid = script._process.pid
        with pytest.raises(ConfigError, match=f"in use by process {pid} on .* wait for its end"), locked(tmp_path):
            pass
        script.send(signal.SIGKILL)
    with locked(tmp_path) as notice:
        assert notice.startswith(f"the lock of process {pid} on ") and notice.endswith("which is gone, is taken over")
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"), locked(tmp_path):
            pass
    with contextlib.suppress(RuntimeError), locked(tmp_path) as notice:
        assert notice == ""  # the one before gave it back
        raise RuntimeError
    with locked(tmp_path) as notice:
        assert notice == ""
    (tmp_path / "lock").write_text('{"pid"')
    with locked(tmp_path) as notice:
        assert "a process that left no name" in notice


def test_where_there_are_no_locks_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with locked(tmp_path) as notice:
        assert notice == "the workdir is not locked (this system has no flock): start no second run in it"


def test_importing_needs_no_posix():
    """What only POSIX has is imported where it is used."""
    code = "import sys; sys.modules['fcntl'] = None; import hyjax.train.signals, hyjax.train.watchdog, hyjax.train.lock"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_watchdog_ends_with_its_block():
    with Watchdog(60, 60) as watchdog:
        watchdog.begins("training step", 1)
    for _ in range(100):
        if not [thread for thread in threading.enumerate() if thread.name == "watchdog"]:
            return
        time.sleep(0.05)
    raise AssertionError("its thread is still there")
