"""Checkpoints: written in the background by Orbax, checked leaf by leaf before they are read.

    checkpointer = Checkpointer(workdir / "checkpoints", keep=2)
    found = checkpointer.restore_latest(state)      # None: nothing was ever saved here
    checkpointer.save(step, state, extra)           # returns when the arrays are copied, before they are on disk
    checkpointer.close()                            # waits, raises what went wrong

A step's folder holds `state`, the arrays by their tree paths, and `extra`, a JSON object (config, fingerprint of the
data, attempt). The newest step *that loads* counts, not the one with the highest number: a folder that is empty or
damaged is skipped and reported, and moved aside (never deleted) by the next save. A difference of names, shapes or
dtypes is another matter: it means another model, and raises.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from hyjax.train.optimizer import leaf_paths

UNFINISHED = ".orbax-checkpoint-tmp"


class Skipped(NamedTuple):
    step: int
    reason: str


class Restored(NamedTuple):
    step: int
    state: Any  # the target's tree, with arrays
    extra: dict[str, Any]
    skipped: list[Skipped]  # newer steps that could not be read, newest first


class Checkpointer:
    """Saves to and restores from one folder, keeping the newest `keep` steps. Reading alone never writes there."""

    def __init__(self, directory: str | Path, keep: int = 2):
        if keep < 1:
            raise ValueError(f"train.keep={keep} must be 1 or more")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._in_the_way: list[int] = []

    def steps(self) -> list[int]:
        """Numbers of the steps that have a folder, ascending; nothing is said about what the folders hold."""
        return sorted(int(path.name) for path in self._entries() if path.name.isdecimal())

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Start saving. First waits for the save before, whose failure is raised here.

        The arrays are copied before this returns, so `state` may be donated at once. Raises RuntimeError if a step
        this new or newer is already there.
        """
        self.wait()
        plain_extra = json.loads(json.dumps(dict(extra)))  # a value that JSON cannot hold fails here, by name
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(_nest(state)), extra=ocp.args.JsonSave(plain_extra))
        if self._manager is None:
            self._manager = self._open()
        if not self._manager.save(step, args=items):
            newest = max(self.steps(), default=None)
            raise RuntimeError(f"step {step} was not saved to {self.directory}: step {newest} is already there")

    def wait(self) -> None:
        """Block until the last save is on disk; raise if it failed. The steps before it stay as they were."""
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception:
            self._manager = None  # after a failure it no longer knows the steps on disk: the next save opens anew
            raise

    def close(self) -> None:
        """`wait`, then release threads. The object may be used again."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def restore_latest(self, target: Any, partial: bool = False) -> Restored | None:
        """The newest step that loads, in the form of `target`: arrays or `jax.ShapeDtypeStruct`s, whose shardings
        (if any) the result takes. With `partial`, a target of some of the state's top-level keys, such as
        `{"params": ...}`, restores those and leaves the others on disk; otherwise they are a difference.

        None if nothing was ever saved here. Raises ValueError where a leaf's name, shape or dtype differs, and
        RuntimeError if there are steps and none can be read.
        """
        steps = self.steps()
        for path in self._entries():
            if UNFINISHED in path.name:
                logging.getLogger(__name__).warning("%s: this save was not finished; ignored", path)
        skipped: list[Skipped] = []
        for step in reversed(steps):
            restored = self._try(step, target, partial)
            if isinstance(restored, Restored):
                self._in_the_way = [skip.step for skip in skipped]
                return restored._replace(skipped=skipped)
            skipped.append(restored)
        if not steps:
            return None
        reasons = "; ".join(f"step {skip.step}: {skip.reason}" for skip in skipped)
        raise RuntimeError(f"no checkpoint in {self.directory} can be read ({reasons})")

    def restore(self, step: int, target: Any, partial: bool = False) -> Restored:
        """One step, as `restore_latest` would read it; raises ValueError if it isn't there or can't be read."""
        if step not in self.steps():
            raise ValueError(f"there is no step {step} in {self.directory}; there are {self.steps()}")
        restored = self._try(step, target, partial)
        if isinstance(restored, Skipped):
            raise ValueError(f"step {step} in {self.directory} can't be read: {restored.reason}")
        return restored

    def _try(self, step: int, target: Any, partial: bool) -> Restored | Skipped:
        directory = self.directory / str(step)
        reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler(), extra=ocp.JsonCheckpointHandler())
        )
        # Damage shows as almost any exception (JSON, KeyError, tensorstore's ValueError), so all of them mean
        # "unreadable" here; the reason is kept, and is raised if no step is left. Differences are found between.
        with reader:
            try:
                metadata = reader.metadata(directory).item_metadata["state"]
                if metadata is None:
                    raise FileNotFoundError("the list of its arrays is missing")
                stored = dict(zip(leaf_paths(metadata.tree), jax.tree.leaves(metadata.tree), strict=True))
            except Exception as error:
                return Skipped(step, _reason(error))
            _refuse_differences(stored, target, partial, directory)
            nested = _nest(jax.tree.map(_abstract, target))
            restore_args = ocp.checkpoint_utils.construct_restore_args(nested)
            state_args = ocp.args.PyTreeRestore(nested, restore_args=restore_args, partial_restore=True)
            try:
                items = reader.restore(
                    directory, args=ocp.args.Composite(state=state_args, extra=ocp.args.JsonRestore())
                )
                state = jax.block_until_ready(_unnest(items["state"], target))
            except Exception as error:
                return Skipped(step, _reason(error))
        return Restored(step, state, items["extra"], [])

    def _open(self) -> ocp.CheckpointManager:
        if jax.process_index() == 0:
            for step in self._in_the_way:
                _move_aside(self.directory / str(step))
        self._in_the_way = []
        return ocp.CheckpointManager(
            self.directory,
            item_handlers=dict(state=ocp.PyTreeCheckpointHandler(), extra=ocp.JsonCheckpointHandler()),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=self._keep, create=True, cleanup_tmp_directories=True, enable_async_checkpointing=True
            ),
        )

    def _entries(self) -> Iterable[Path]:
        return sorted(self.directory.iterdir()) if self.directory.is_dir() else []


def _nest(tree: Any) -> dict[str, Any]:
    """The tree as nested dicts by path, whatever its nodes were: {"opt_state": {"1": {"0": {"mu": ...}}}}."""
    nested: dict[str, Any] = {}
    for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
        *parents, last = path.split("/")
        node = nested
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return nested


def _unnest(nested: Mapping[str, Any], target: Any) -> Any:
    """Inverse of `_nest`, into the nodes of `target`."""
    leaves = dict(zip(leaf_paths(nested), jax.tree.leaves(nested), strict=True))
    return jax.tree.unflatten(jax.tree.structure(target), [leaves[path] for path in leaf_paths(target)])


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a target leaf; without a sharding, one device holds it."""
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _refuse_differences(stored: Mapping[str, Any], target: Any, partial: bool, directory: Path) -> None:
    """Orbax casts to the target's dtype in silence (int32 2²⁴ + 1 into float32 loses the one): compare first."""
    wanted = dict(zip(leaf_paths(target), jax.tree.leaves(target), strict=True))
    if partial:
        parts = {path.split("/", 1)[0] for path in wanted}
        stored = {path: leaf for path, leaf in stored.items() if path.split("/", 1)[0] in parts}
    faults = [f"{path} is not in it" for path in wanted if path not in stored]
    faults += [f"it holds {path}, which is not wanted" for path in stored if path not in wanted]
    for path in [path for path in wanted if path in stored]:
        there, here = stored[path], wanted[path]
        if tuple(there.shape) != tuple(here.shape):
            faults.append(f"{path} has shape {tuple(there.shape)} there and {tuple(here.shape)} here")
        if np.dtype(there.dtype) != np.dtype(here.dtype):
            faults.append(f"{path} is {np.dtype(there.dtype)} there and {np.dtype(here.dtype)} here")
    if faults:
        more = f" (and {len(faults) - 3} more differences)" if len(faults) > 3 else ""
        raise ValueError(f"the checkpoint {directory} is of another state: {'; '.join(faults[:3])}{more}")


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _move_aside(path: Path) -> None:
    number = 0
    while (aside := path.with_name(f"unreadable-{path.name}-{number}")).exists():
        number += 1
    path.rename(aside)
