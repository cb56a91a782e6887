"""A trained model apart from its run: parameters, config and tokenizer, without optimizer and logs.

export_params("runs/a", "models/a")     # a folder of a third of a checkpoint's size
run = load_run("models/a")              # or of the workdir itself: model, params, config, step, tokenizer
params = load_params("models/a", like)  # strictly in the form and the places of another tree

OUT/config.json      the resolved config
OUT/params/          the arrays
OUT/meta.json        step, source, fingerprint of the data, and the manifest of the arrays
OUT/tokenizer.json   where the run's tokenizer is a file
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from hyjax import config as configs
from hyjax.config import ConfigError
from hyjax.data.tokenizers import FileTokenizer, Tokenizer, get_tokenizer
from hyjax.models import HybridLM
from hyjax.train import manifest, tree_io
from hyjax.train.checkpoint import Checkpointer, CheckpointError
from hyjax.train.manifest import DamageError, read_json

if TYPE_CHECKING:
    from ml_collections import FrozenConfigDict

CONFIG, META, PARAMS, TOKENIZER = "config.json", "meta.json", "params", "tokenizer.json"
CHECKPOINTS = "checkpoints"


class Run(NamedTuple):
    model: HybridLM
    params: Any
    config: FrozenConfigDict
    step: int
    tokenizer: Tokenizer | None  # None where the data is no text
    data: dict[str, Any]  # the fingerprint of the data


def load_run(path: str | Path, step: int | None = None) -> Run:
    """A model and its parameters, on one device, from a training workdir or an export.

    `step`: of a workdir, one of its checkpoints (None: the newest that is whole). Raises ValueError with one sentence
    where there is no such thing or it is damaged.
    """
    path = _model_folder(path)
    config = _config(path)
    model = HybridLM(config.model)
    streams = (len(config.model.streams),) if config.model.streams else ()
    tokens = jnp.zeros((1, 1, *streams), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    params, step, data = _read(path, shapes, step)
    return Run(model, params, config, step, _tokenizer(path, config, data), data)


def load_params(path: str | Path, target: Any, step: int | None = None) -> Any:
    """The parameters in a workdir or an export in the form of `target`, a tree of arrays or shapes, with its shardings.

    Raises ValueError naming the leaves whose names, shapes or dtypes differ, and as `load_run`.
    """
    return _read(_model_folder(path), target, step)[0]


def export_params(workdir: str | Path, out: str | Path, step: int | None = None) -> Run:
    """Writes the folder `out`, which appears when all of it is written and read back. Returns what is in it.

    Raises ValueError where `out` holds something already, CheckpointError where it can't be written, and as `load_run`.
    """
    out = Path(out).absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} holds something already: name a folder that is not there yet")
    run = load_run(workdir, step)
    part = out.with_name(f"{out.name}.unfinished-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        _write(part, Path(workdir), run)
        part.rename(out)
    except (OSError, DamageError) as error:
        raise CheckpointError(f"{out} can't be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return run


def _write(part: Path, workdir: Path, run: Run) -> None:
    needed, free = tree_io.num_bytes(run.params) * 1.02 + 2**20, shutil.disk_usage(part).free
    if free < needed:
        raise CheckpointError(f"{part.parent} has {free / 1e6:,.1f} MB free; {needed / 1e6:,.1f} MB are needed")
    leaves = manifest.describe(run.params)
    with ocp.Checkpointer(tree_io.handler()) as writer:
        try:
            writer.save(part / PARAMS, args=ocp.args.PyTreeSave(tree_io.nest(run.params)))
        except Exception as error:  # tensorstore's are ValueErrors, whatever the disk said
            raise OSError(tree_io.reason(error)) from error
    tree_io.compare(part / PARAMS, leaves)
    (part / CONFIG).write_text(configs.to_json(run.config))
    if isinstance(run.tokenizer, FileTokenizer):
        (part / TOKENIZER).write_bytes(run.tokenizer.content)
    meta = manifest.seal(leaves, step=run.step, source=str(workdir.absolute()), data=run.data)
    (part / META).write_text(json.dumps(meta, indent=1))


# ------------------------------------------------------------------------------------------------ reading


def _model_folder(path: str | Path) -> Path:
    """The path; one sentence where it is neither a workdir nor an export."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is {'a file' if path.exists() else 'not there'}: give a workdir or an export")
    if (path / META).is_file() or (path / CHECKPOINTS).is_dir():
        return path
    inside = [parent for parent in path.absolute().parents if (parent / META).is_file() or (parent / CONFIG).is_file()]
    hint = f"; did you mean {inside[0]}?" if inside else ""
    raise ValueError(f"{path} holds neither a run ({CHECKPOINTS}/) nor an export ({META}){hint}")


def _config(path: Path) -> FrozenConfigDict:
    try:
        return configs.from_json((path / CONFIG).read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} has no {CONFIG}") from None
    except (OSError, ConfigError) as error:
        raise ValueError(f"{path / CONFIG}: {error}") from error


def _read(path: Path, target: Any, step: int | None) -> tuple[Any, int, dict[str, Any]]:
    """(params, step, fingerprint of the data)"""
    if (path / META).is_file():
        return _read_export(path, target, step)
    checkpointer = Checkpointer(path / CHECKPOINTS)
    try:
        if step is None:
            found = checkpointer.restore_latest({"params": target}, partial=True, must=True)
            assert found is not None
        else:
            found = checkpointer.restore(step, {"params": target}, partial=True)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    return found.state["params"], found.step, found.extra["data"]


def _read_export(path: Path, target: Any, step: int | None) -> tuple[Any, int, dict[str, Any]]:
    try:
        leaves, others = manifest.unseal(read_json(path / META))
        if step not in (None, others["step"]):
            raise ValueError(f"there is no step {step} in the export {path}, which is of step {others['step']}")
        manifest.refuse_differences(leaves, target, False, f"the export {path}")
        return tree_io.read(path / PARAMS, leaves, target), others["step"], others["data"]
    except DamageError as error:
        raise ValueError(f"the export {path} is damaged: {error}") from error


# ------------------------------------------------------------------------------------------------ tokenizers


def _tokenizer(path: Path, config: FrozenConfigDict, data: dict[str, Any]) -> Tokenizer | None:
    """The one that the run was trained with, by the fingerprint of its data: a name, or the checksum of a file."""
    known = data.get("tokenizer")
    if known is None:
        return None
    if not known.startswith("sha256:"):
        return get_tokenizer(known)
    named = [source.removeprefix("corpus:") for source in config.data.mixture]
    places = [path, config.data.path, *named] if config.data.source in ("corpus", "mixture") else [path]
    for file in [*(Path(place) / TOKENIZER for place in places), Path(config.data.tokenizer).expanduser()]:
        if file.is_file() and known == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}":
            from tokenizers import Tokenizer as Library

            return FileTokenizer(file, Library.from_file(str(file)).id_to_token(data["eos"]) or "")
    raise ValueError(f"the tokenizer of {path} is gone: put its file, of {known}, at {path / TOKENIZER}")
