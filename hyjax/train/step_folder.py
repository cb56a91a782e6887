"""The folders in which checkpoints lie, by their names and lists:

STEP                              a finished save: state/, extra/, manifest/ and, once it was read back, VERIFIED
STEP.orbax-checkpoint-tmp...      a save (or a deletion) that was not finished
unreadable-STEP-N                 a damaged step that a later save has moved out of its way; never deleted
"""

import logging
import shutil
from pathlib import Path
from typing import Any

from hyjax.train import manifest, tree_io
from hyjax.train.manifest import DamageError, Leaf, read_json

UNFINISHED = ".orbax-checkpoint-tmp"
MOVED_ASIDE = "unreadable-"
VERIFIED = "VERIFIED"
JSON = "metadata"  # Orbax's name of the file that holds a JSON item
log = logging.getLogger(__name__)


def numbers(directory: Path) -> list[int]:
    """Steps that have a folder, ascending."""
    return sorted(int(path.name) for path in entries(directory) if path.name.isdecimal())


def unfinished(directory: Path) -> list[Path]:
    return [path for path in entries(directory) if UNFINISHED in path.name]


def moved_aside(directory: Path) -> list[Path]:
    return [path for path in entries(directory) if path.name.startswith(MOVED_ASIDE)]


def entries(directory: Path) -> list[Path]:
    """What is in the directory, by name; nothing where there is no such directory."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


def read_lists(folder: Path) -> tuple[dict[str, Leaf], dict[str, Any]]:
    """(leaves, extra) of a step, all but the arrays; raises DamageError where they do not go together."""
    items = read_json(folder / "_CHECKPOINT_METADATA")
    extra = read_json(folder / "extra" / JSON)
    if not (folder / "manifest").exists() and "manifest" not in str(items):
        log.warning("%s has no checksums (it was written before there were any): its values are not compared", folder)
        return tree_io.listed(folder / "state"), extra
    leaves, others = manifest.unseal(read_json(folder / "manifest" / JSON))
    if others["step"] != int(folder.name):
        raise DamageError(f"it holds step {others['step']}")
    if others["extra"] != manifest.digest(extra):
        raise DamageError("its extra differs from what was saved")
    try:
        listed = tree_io.listed(folder / "state")
    except DamageError:
        tree_io.compare(folder / "state", leaves)  # Orbax's list opens the arrays: if it is one of them, name it
        raise
    if listed != {path: leaf._replace(checksum=None) for path, leaf in leaves.items()}:
        raise DamageError("Orbax's list of its arrays differs from what was saved")
    return leaves, extra


def loss(folder: Path) -> float | None:
    """`metrics["loss"]` that a step was saved with; None where there was none, or its manifest is damaged."""
    try:
        return manifest.unseal(read_json(folder / "manifest" / JSON))[1]["metrics"].get("loss")
    except DamageError:
        return None


def move_aside(folder: Path) -> None:
    number = 0
    while (aside := folder.with_name(f"{MOVED_ASIDE}{folder.name}-{number}")).exists():
        number += 1
    folder.rename(aside)


def delete(folder: Path) -> None:
    """Under another name first: half a deletion never looks like a step."""
    doomed = folder.with_name(f"{folder.name}{UNFINISHED}-deleted")
    folder.rename(doomed)
    shutil.rmtree(doomed)
