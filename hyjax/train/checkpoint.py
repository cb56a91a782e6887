"""Checkpoints: written in the background, read back before they count, compared whenever they are read.

    checkpointer = Checkpointer(workdir / "checkpoints", keep=2)
    found = checkpointer.restore_latest(state)      # None: nothing was ever saved here
    checkpointer.save(step, state, extra)           # returns when the arrays are copied, before they are on disk
    checkpointer.poll()                             # after every step: raises what went wrong behind it
    checkpointer.close()                            # waits, raises what went wrong

A step's folder holds `state`, the arrays by their tree paths; `extra`, a JSON object of the caller's (config,
fingerprint of the data); `manifest`, every leaf's shape, dtype and checksum, taken on the device before the arrays were
copied; and, once all of it was read back and found equal, an empty file `VERIFIED`. Only then are older steps deleted,
so the newest verified one is there at every moment.

A restore compares the checksums too: the newest step *whose bits are those that were saved* counts, not the one with
the highest number. One that is incomplete or damaged is skipped and reported, and moved aside (never deleted) by the
next save. A difference of names, shapes or dtypes is another matter: it means another model, and raises.
"""

import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from hyjax.train import manifest, retention, step_folder, tree_io
from hyjax.train.manifest import DamageError, Leaf
from hyjax.train.tree_io import reason

log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, verified or found: one sentence with the folder, the step and the reason."""


class Skipped(NamedTuple):
    step: int
    reason: str


class Restored(NamedTuple):
    step: int
    state: Any  # the target's tree, with arrays
    extra: dict[str, Any]
    skipped: list[Skipped]  # newer steps that could not be read, newest first


class Checkpointer:
    """Saves to and restores from one folder. Reading alone never writes there.

    Args:
      keep: this many of the newest verified steps stay.
      keep_every: and those that are multiples of it (0: none).
      keep_best: and this many with the least `metrics["loss"]` (0: none).
      verify: read every checkpoint back after it is written. Without it one counts as soon as it is written.
    """

    def __init__(
        self, directory: str | Path, keep: int = 2, *, keep_every: int = 0, keep_best: int = 0, verify: bool = True
    ):
        if keep < 1:
            raise ValueError(f"train.keep={keep} must be 1 or more")
        if keep_every < 0 or keep_best < 0:
            raise ValueError(f"train.keep_every={keep_every} and train.keep_best={keep_best} must be 0 or more")
        self.directory = Path(directory).absolute()
        self._kept = (keep, keep_every, keep_best)
        self._verify = verify
        self._writer: ocp.AsyncCheckpointer | None = None
        self._job: _Job | None = None
        self._lock = threading.RLock()  # a signal's thread may save while the loop's own waits
        self._in_the_way: list[int] = []  # steps found damaged, which the next save moves aside
        self._restored: int | None = None  # a step that this process has read and compared

    # -------------------------------------------------------------------------------------------- what is there

    def steps(self) -> list[int]:
        """Numbers of the steps that have a folder, ascending; nothing is said about what the folders hold."""
        try:
            return step_folder.numbers(self.directory)
        except OSError as error:
            raise CheckpointError(f"{self.directory} can't be read: {error.strerror}") from error

    def is_verified(self, step: int) -> bool:
        """Whether the step was read back, or restored by this object, and found equal to what was saved."""
        return step == self._restored or (self.directory / str(step) / step_folder.VERIFIED).exists()

    def check_writable(self) -> None:
        """Makes the folder and writes to it; raises CheckpointError where that can't be done. Touches no device."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory) as file:
                file.write(b"x")
        except OSError as error:
            blocking = [path for path in (self.directory, *self.directory.parents) if os.path.isfile(path)]
            why = f"{blocking[0]} is a file" if blocking else error.strerror
            raise CheckpointError(f"checkpoints can't be written to {self.directory}: {why}") from error

    def check_space(self, state: Any, copies: int | None = None) -> None:
        """Raises CheckpointError where the disk has no room for `copies` checkpoints of `state`, arrays or shapes.

        None: as many as will stand there at once and don't yet, the one being written included; `keep_every` is left
        out, which has no bound. What unfinished saves hold counts as free: the next save removes them.
        """
        if copies is None:
            copies = max(1, self._kept[0] + self._kept[2] + 1 - len(self.steps()))
        # Uncompressed arrays; beside them a few hundred bytes a leaf in Orbax's lists and the manifest (16 KiB at the
        # least), and what file systems round up: 2 % and 1 MiB.
        needed = copies * (int(1.02 * tree_io.num_bytes(state)) + 2**20)
        place = next(path for path in (self.directory, *self.directory.parents) if path.is_dir())
        free = shutil.disk_usage(place).free
        free += sum(
            file.stat().st_size
            for path in step_folder.unfinished(self.directory)
            for file in path.rglob("*")
            if file.is_file()
        )
        if free < needed:
            what = "a checkpoint needs" if copies == 1 else f"{copies} checkpoints (those kept and one more) need"
            raise CheckpointError(f"{what} {_megabytes(needed)} in {self.directory} and {_megabytes(free)} are free")

    # -------------------------------------------------------------------------------------------- saving

    def save(self, step: int, state: Any, extra: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Start saving. First waits for the save before to be written and verified, whose failure is raised here.

        The arrays are copied before this returns, so `state` may be donated at once. `metrics["loss"]` is what
        `keep_best` goes by. Raises CheckpointError if a step this new or newer is already there, if the disk has no
        room for it (before anything is written), or if the write fails at its start.
        """
        plain = json.loads(json.dumps(dict(extra)))  # a value that JSON cannot hold fails here, by name
        losses = {name: float(value) for name, value in (metrics or {}).items()}
        with self._lock:
            self.wait()
            try:
                writer = self._open()
                newest = max(self.steps(), default=-1)
                if step <= newest:
                    raise CheckpointError(
                        f"step {step} was not saved to {self.directory}: step {newest} is already there"
                    )
                self.check_space(state, copies=1)
                leaves = manifest.describe(state)
                sealed = manifest.seal(leaves, step=step, extra=manifest.digest(plain), metrics=losses)
                items = ocp.args.Composite(
                    state=ocp.args.PyTreeSave(tree_io.nest(state)),
                    extra=ocp.args.JsonSave(plain),
                    manifest=ocp.args.JsonSave(sealed),
                )
                writer.save(self.directory / str(step), args=items)
            except CheckpointError:
                raise
            except Exception as error:
                self._writer = None
                raise self._error(step, "was not written to", error) from error
            self._job = _Job(lambda: self._finish(writer, step, leaves))
            self._job.start()

    def poll(self) -> None:
        """Returns at once; raises the CheckpointError of a save that has failed since the last call."""
        job = self._job
        if job is not None and not job.is_alive():
            self.wait()

    def wait(self) -> None:
        """Block until the last save is on disk and verified; raise if that failed. The steps before it stay."""
        with self._lock:
            if self._job is None:
                return
            self._job.join()
            error, self._job = self._job.error, None
            if error is not None:
                self._writer = None  # after a failure nothing is known of its state: the next save opens anew
                raise error

    def close(self) -> None:
        """`wait`, then release threads. The object may be used again."""
        with self._lock:
            self.wait()
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _open(self) -> ocp.AsyncCheckpointer:
        """The writer; where there is none yet, first clears what earlier attempts have left."""
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            for step in set(self._in_the_way).intersection(self.steps()):
                step_folder.move_aside(self.directory / str(step))
            if self._restored in self.steps():
                (self.directory / str(self._restored) / step_folder.VERIFIED).touch()
            if self._writer is None:
                for path in step_folder.unfinished(self.directory):
                    shutil.rmtree(path)
        self._in_the_way = []
        if self._writer is None:
            for name in ("absl", "asyncio"):
                logging.getLogger(name).addFilter(_is_news)
            self._writer = ocp.AsyncCheckpointer(
                ocp.CompositeCheckpointHandler(
                    state=tree_io.handler(), extra=ocp.JsonCheckpointHandler(), manifest=ocp.JsonCheckpointHandler()
                ),
                # Made in the background, a folder that can't be made leaves threads that wait for it for five minutes.
                async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            )
        return self._writer

    def _finish(self, writer: ocp.AsyncCheckpointer, step: int, leaves: Mapping[str, Leaf]) -> None:
        """In the background: wait for the write, read it back, say that it counts, delete what is no longer kept."""
        folder = self.directory / str(step)
        try:
            writer.wait_until_finished()
        except Exception as error:
            for path in step_folder.unfinished(self.directory):
                shutil.rmtree(path, ignore_errors=True)  # on a full disk it would be in the way of everything else
            raise self._error(step, "was not written to", error) from error
        if jax.process_index() != 0:
            return
        try:
            if self._verify:
                tree_io.drop_from_cache(folder)
                step_folder.read_lists(folder)
                tree_io.compare(folder / "state", leaves)
                (folder / step_folder.VERIFIED).touch()
        except Exception as error:
            self._in_the_way.append(step)
            raise self._error(step, "was written but can't be read back from", error) from error
        try:
            self._delete_old(step)
        except OSError as error:
            raise CheckpointError(f"old steps in {self.directory} can't be deleted: {reason(error)}") from error

    def _delete_old(self, newest: int) -> None:
        """A step that was never verified (a crash came between) holds no place of a verified one, and goes with the
        others of its age."""
        losses = {step: step_folder.loss(self.directory / str(step)) for step in self.steps() if step <= newest}
        verified = {step: loss for step, loss in losses.items() if self.is_verified(step)}
        kept = retention.kept(losses, *self._kept) | retention.kept(verified, *self._kept)
        for step in losses.keys() - kept:
            step_folder.delete(self.directory / str(step))

    def _error(self, step: int, what: str, error: Exception) -> CheckpointError:
        older = [other for other in self.steps() if other < step]
        intact = [other for other in older if self.is_verified(other)]
        rest = f"step {intact[-1]} is intact" if intact else "no older step there is verified"
        return CheckpointError(f"step {step} {what} {self.directory}: {reason(error)}; {rest}")

    # -------------------------------------------------------------------------------------------- restoring

    def restore_latest(self, target: Any, partial: bool = False, must: bool = False) -> Restored | None:
        """The newest step that is whole, in the form of `target`: arrays or `jax.ShapeDtypeStruct`s, whose shardings
        (if any) the result takes. With `partial`, a target of some of the state's top-level keys, such as
        `{"params": ...}`, restores those and leaves the others on disk; otherwise they are a difference.

        None if no save was ever finished here, which with `must` is an error. Raises ValueError where a leaf's name,
        shape or dtype differs, and CheckpointError if there are steps and none can be read.
        """
        steps = self.steps()
        for path in step_folder.unfinished(self.directory):
            log.warning("%s: this save was not finished; ignored", path)
        skipped: list[Skipped] = []
        for step in reversed(steps):
            restored = self._try(step, target, partial)
            if isinstance(restored, Restored):
                self._in_the_way = [skip.step for skip in skipped]
                return restored._replace(skipped=skipped)
            log.warning("%s: step %d is skipped: %s", self.directory, step, restored.reason)
            skipped.append(restored)
        reasons = [f"step {skip.step}: {skip.reason}" for skip in skipped]
        reasons += [f"{path.name} was moved aside" for path in step_folder.moved_aside(self.directory)]
        if reasons:
            raise CheckpointError(f"no checkpoint in {self.directory} can be read ({'; '.join(reasons)})")
        if must:
            raise CheckpointError(f"there is no checkpoint in {self.directory} to go on from")
        return None

    def restore(self, step: int, target: Any, partial: bool = False) -> Restored:
        """One step, as `restore_latest` would read it; raises ValueError if it isn't there or can't be read."""
        there = self.steps()
        if step not in there:
            nearest = f"; the nearest is {min(there, key=lambda other: abs(other - step))}" if there else ""
            raise ValueError(f"there is no step {step} in {self.directory}; there are {there}{nearest}")
        restored = self._try(step, target, partial)
        if isinstance(restored, Skipped):
            raise ValueError(f"step {step} in {self.directory} can't be read: {restored.reason}")
        return restored

    def _try(self, step: int, target: Any, partial: bool) -> Restored | Skipped:
        folder = self.directory / str(step)
        try:
            leaves, extra = step_folder.read_lists(folder)
        except DamageError as error:
            return Skipped(step, str(error))
        manifest.refuse_differences(leaves, target, partial, f"the checkpoint {folder}")
        try:
            state = tree_io.read(folder / "state", leaves, target)
        except DamageError as error:
            return Skipped(step, str(error))
        if not partial:
            self._restored = step
        return Restored(step, state, extra, [])


class _Job(threading.Thread):
    """One save's work in the background. Not a daemon: a process that ends in order lets it finish."""

    def __init__(self, work: Callable[[], None]):
        super().__init__(name="checkpoint")
        self._work = work
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.error = error


def _is_news(record: logging.LogRecord) -> bool:
    """False for the tracebacks that a failed save leaves in the log: the error is raised, with them as its cause."""
    return record.levelno != logging.ERROR or "orbax" not in record.pathname + record.getMessage()


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
