"""`hyjax train` in a process of its own, on one device, with a tiny model and perhaps something slow or stuck.

It says "step N" for every step that it logs; `Process.wait_for` waits for such a line.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyjax import config as configs
from tests.conftest import QUICK_TO_COMPILE

ROOT = Path(__file__).parents[2]

DRIVER = """
import ctypes, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in a shell's background ignores it

def stuck():
    "Inside C for ever: no signal handler of Python runs, and none interrupts it."
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

def hold(path):
    print("holding", flush=True)
    while not os.path.exists(path):
        time.sleep(0.01)

{patch}
from hyjax.cli import main
print("begun", flush=True)
sys.exit(main(sys.argv[1:]))
"""

# The batches of one attempt, as BODY, which may look at their INDEX, wants it.
BATCHES = """
from hyjax.data import Loader
plain = Loader.batches
def a_slow_source(self, start=0):
    for index, batch in enumerate(plain(self, start)):
        {body}
        yield batch
Loader.batches = a_slow_source
"""


def slow(seconds: float) -> str:
    """So many seconds between two steps, so that there is a moment to hit."""
    return BATCHES.format(body=f"time.sleep({seconds})")


def held(index: int, path: Path) -> str:
    """The batch of that index of an attempt doesn't come before the file is there; the process says "holding"."""
    return BATCHES.format(body=f"index == {index} and hold({str(path)!r})")


def config_file(path: Path, text: Path, **sections: dict[str, Any]) -> Path:
    """A config whose run takes a second beside start-up; `sections` change it."""
    parts: dict[str, dict[str, Any]] = dict(
        model=dict(layout="G", width=16, heads=2, ffn_width=16),
        data=dict(source="text", path=str(text), tokenizer="bytes", seq_len=32, heldout=0.2),
        optimizer=dict(learning_rate=1e-2, warmup_steps=3, weight_decay=0.1),
        train=dict(steps=12, batch_size=4, log_every=1, checkpoint_every=4, keep=3),
        eval=dict(every=0, batches=3, final=False, sample_tokens=0),
    )
    config = configs.base(**{name: parts.get(name, {}) | sections.get(name, {}) for name in {*parts, *sections}})
    body = f"return from_json({configs.to_json(config)!r})"
    path.write_text(f"from hyjax.config import from_json\n\ndef get_config(arg=''):\n    {body}\n")
    return path


class Process:
    """One `hyjax train`; a context manager that kills what is left at its end."""

    def __init__(self, config: Path, workdir: Path, *flags: str, patch: str = "", xla_flags: str = QUICK_TO_COMPILE):
        script = DRIVER.format(patch=patch)
        command = [sys.executable, "-c", script, "train", f"--config={config}", f"--workdir={workdir}", *flags]
        environment = os.environ | {"XLA_FLAGS": xla_flags, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        workdir.parent.mkdir(parents=True, exist_ok=True)
        self.log = workdir.with_suffix(f".{time.monotonic_ns()}.log")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, what: str | Path | Callable[[str], bool], seconds: float = 120) -> None:
        """Until the text was said, the file is there, or the function of what was said is true."""

        def there() -> bool:
            if isinstance(what, Path):
                return what.exists()
            return what in self.output if isinstance(what, str) else what(self.output)

        deadline = time.monotonic() + seconds
        while not there():
            assert self._process.poll() is None, f"ended with {self._process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what!r} in {seconds} s:\n{self.output}"
            time.sleep(0.02)

    def send(self, signum: signal.Signals) -> float:
        """Sends a signal; the time."""
        self._process.send_signal(signum)
        return time.monotonic()

    def code(self, seconds: float = 120) -> int:
        """Waits for the end; the exit code."""
        return self._process.wait(timeout=seconds)


def run(config: Path, workdir: Path, *flags: str, patch: str = "") -> str:
    """From start to end; what it said."""
    with Process(config, workdir, *flags, patch=patch) as process:
        code = process.code()
        assert code == 0, f"ended with {code}:\n{process.output}"
        return process.output


def lines(workdir: Path) -> list[dict[str, Any]]:
    """Every record of metrics.jsonl, starts and ends included; a line that a kill cut off is left out."""
    found = []
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        if line.endswith("}"):
            found.append(json.loads(line))
    return found


def reasons(workdir: Path) -> list[str]:
    """Why each attempt ended; one that was killed has none."""
    return [line["reason"] for line in lines(workdir) if line["split"] == "end"]
