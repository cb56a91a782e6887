"""One process a workdir: two runs at once would overwrite each other's checkpoints.

`workdir/lock` is locked with flock, which the kernel gives up when the process ends, however it ends: a lock can't be
left behind. What the file holds says whose it is, or whose it was, if that process was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyjax.config import ConfigError

FILE = "lock"


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[str]:
    """Holds the workdir's lock while inside. Gives a sentence for the person who starts the run, or "".

    Raises ConfigError where another process, or this one already, holds it, and OSError where there can be no file.
    """
    with open(workdir / FILE, "a+") as file:
        failure = _acquire(file, workdir)
        if failure:
            yield f"the workdir is not locked ({failure}): start no second run in it"
            return
        before = _holder(file)
        file.truncate(0)
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        print(json.dumps(me), file=file, flush=True)
        try:
            yield f"the lock of {before}, which is gone, is taken over" if before else ""
        finally:
            file.truncate(0)


def _acquire(file: Any, workdir: Path) -> str:
    """Takes the lock. Gives the reason where this system or file system has none."""
    try:
        import fcntl
    except ImportError:
        return "this system has no flock"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(file) or "another process"
        raise ConfigError(
            f"the workdir {workdir} is in use by {holder}: wait for its end or choose another --workdir"
        ) from None
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _holder(file: Any) -> str:
    """Who wrote the file, or "" where it is empty: nobody, or somebody who has not written yet."""
    file.seek(0)
    try:
        who = json.loads(file.read() or "null")
        return f"process {who['pid']} on {who['host']} (since {who['since']})" if who else ""
    except (ValueError, KeyError, TypeError):  # cut off by a kill
        return "a process that left no name"
