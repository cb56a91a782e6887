"""Files of text to a corpus on disk (`hyjax.data.store`): planned, made in units by several processes, then joined.

What the corpus is depends on the inputs and the options alone, to the last byte: not on the number of processes, and
not on how often it was stopped. The folder holds what is done; `unfinished/` in it says what was asked for and which
units are whole. The manifest comes last.
"""

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from hyjax.config.errors import show
from hyjax.data import store
from hyjax.data.inputs import find_inputs
from hyjax.data.progress import Progress, Report
from hyjax.data.readers import Options, Piece, find_pieces
from hyjax.data.request import Request, compare
from hyjax.data.store import INDEX, MANIFEST, TOKENIZER, UNFINISHED, digest_order
from hyjax.data.tokenizers import FileTokenizer, Tokenizer, get_tokenizer
from hyjax.data.units import UnitMaker, checked, dtype_of, renamed, save, start_worker, work, write_json

# A shard is made of about this many bytes of input at least, and a corpus has so many shards at most: each is a file
# that a reader keeps open (1,024 is a common limit), and a unit of work that is lost when the power fails.
SMALLEST_SHARD = 8_000_000
MOST_SHARDS = 512

REQUEST = "request.json"


def tokenize(
    patterns: Sequence[str],
    out: str | Path,
    *,
    tokenizer: str = "bytes",
    eos: str = "",
    options: Options | None = None,
    format: str = "auto",
    shard_bytes: int = 0,
    workers: int = 1,
    verify: bool = False,
    report: Report = lambda progress: None,
) -> dict[str, Any]:
    """Make the corpus `out`, or go on making it, or see that it is whole where it is finished.

    Args:
      patterns: paths, URLs, folders, globs; see `find_inputs`.
      tokenizer, eos: as data.tokenizer and data.eos of a config.
      shard_bytes: about the bytes of input a shard is made of; 0: by the size of the whole.
      workers: processes; 1 works in this one.
      verify: read everything back before the corpus counts as finished.
      report: called about twice a second.

    Returns {"state": "made" or "finished before", documents, empty, tokens, bytes, shards, seconds, mb_per_second of
    text that was tokenised now, units_kept}.

    Raises ValueError with one sentence for whatever a person can mend; what is done stays done.
    """
    started = time.perf_counter()
    out = Path(out).expanduser().absolute()
    options = options or Options()
    request = Request(get_tokenizer(tokenizer, eos), options, shard_bytes, find_inputs(patterns, format))
    asked = request.to_json()
    if workers > 1 and any(item.name.startswith("memory://") for item in request.inputs):
        raise ValueError("what lies in memory:// is seen by this process only: use --workers=1")
    with _writing(out):
        if _is_finished(out, asked):
            store.verify(out, manifest := store.read_manifest(out))
            return _summary(manifest, "finished before", 0, 0, time.perf_counter() - started)
        units = _units(request)
        with _locked(out):
            _begin(out, asked)
            results = _make_all(UnitMaker(out, request.tokenizer, options), units, workers, report)
            manifest = _join(out, request.tokenizer, asked, results, verify)
    made = sum(result["bytes"] for result in results if not result["kept"])
    kept = sum(result["kept"] for result in results)
    return _summary(manifest, "made", made, kept, time.perf_counter() - started)


def _summary(manifest: dict[str, Any], state: str, made: int, kept: int, seconds: float) -> dict[str, Any]:
    return {
        "state": state,
        "documents": manifest["num_documents"],
        "empty": manifest["num_empty"],
        "tokens": manifest["num_tokens"],
        "bytes": manifest["num_bytes"],
        "shards": len(manifest["shards"]),
        "tokenizer": manifest["tokenizer"]["name"],
        "checksum": manifest["checksum"],
        "units_kept": kept,
        "seconds": round(seconds, 3),
        "mb_per_second": round(made / seconds / 1e6, 3),
    }


# ------------------------------------------------------------------------------------------------ the folder


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """A disk that is full, a folder that may not be written: one sentence. Readers have sentences of their own."""
    try:
        yield
    except OSError as error:
        where = error.filename or out
        raise ValueError(
            f"{where} can't be written: {error.strerror}; what is done is kept for the next try"
        ) from error


def _is_finished(out: Path, asked: dict[str, Any]) -> bool:
    """Whether `out` is the corpus asked for. ValueError where it is another, or something else altogether."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out={show(str(out))} is a file; a corpus is a folder")
    if (out / MANIFEST).is_file():
        manifest = store.read_manifest(out)
        compare(manifest, asked, f"{out} was made")
        shutil.rmtree(out / UNFINISHED, ignore_errors=True)  # where it was killed after the last rename
        return True
    if out.is_dir() and any(out.iterdir()) and not (out / UNFINISHED).is_dir():
        raise ValueError(f"--out={show(str(out))} holds other files: give a new or an empty folder")
    return False


def _begin(out: Path, asked: dict[str, Any]) -> None:
    """Write down what is asked for, or compare it with what was, once a unit is done; remove what the killed left."""
    request = out / UNFINISHED / REQUEST
    if request.is_file() and any(request.parent.glob("unit-*.json")):
        compare(json.loads(request.read_text()), asked, f"{out} was begun")
    else:
        write_json(request, asked)
    for left in (*out.glob("*.tmp-*"), *request.parent.glob("*.tmp-*")):
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One process at a time: the lock goes with the process that holds it, however that ends."""
    (out / UNFINISHED).mkdir(parents=True, exist_ok=True)
    with (out / UNFINISHED / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--out={show(str(out))} is being written by another process now") from error
        yield


# ------------------------------------------------------------------------------------------------ making


@dataclass(frozen=True)
class Unit:
    number: int
    shard: str
    pieces: list[Piece]

    @property
    def weight(self) -> int:
        return sum(piece.weight for piece in self.pieces)


def _units(request: Request) -> list[Unit]:
    """The inputs' pieces, in order, in groups of about a shard's bytes: the same however many processes there are."""
    total = sum(item.size for item in request.inputs)
    size = request.shard_bytes or max(SMALLEST_SHARD, -(-total // MOST_SHARDS))
    pieces = find_pieces(request.inputs, size, request.options)
    if not request.shard_bytes:  # a Parquet file's text is larger than the file
        size = max(size, -(-sum(piece.weight for piece in pieces) // MOST_SHARDS))
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if room <= 0:
            groups.append([])
            room = size
        groups[-1].append(piece)
        room -= max(1, piece.weight)
    if len(groups) > MOST_SHARDS:
        least = -(-sum(piece.weight for piece in pieces) // MOST_SHARDS // 1_000_000) + 1
        raise ValueError(f"--shard_mb makes {len(groups):,} shards, more than {MOST_SHARDS}: at least {least} does not")
    names = (f"shard-{i:05d}-of-{len(groups):05d}.array_record" for i in range(len(groups)))
    return [Unit(i, name, pieces) for i, (name, pieces) in enumerate(zip(names, groups, strict=True))]


def _make_all(maker: UnitMaker, units: Sequence[Unit], workers: int, report: Report) -> list[dict[str, Any]]:
    """Every unit's record, in order."""
    context = get_context("spawn")  # a fork would copy locks that threads of libraries hold
    done, stop = context.Value("q", 0), context.Value("b", 0)
    started, total = time.perf_counter(), sum(unit.weight for unit in units)
    results: dict[int, dict[str, Any]] = {}

    def tell() -> None:
        finished = sum(unit.weight for unit in units if unit.number in results)
        report(Progress(len(results), len(units), finished, total, done.value, time.perf_counter() - started))

    workers = min(workers, len(units))
    pool: Executor
    make: Callable[[int, str, list[Piece]], dict[str, Any]]
    if workers > 1:
        pool, make = ProcessPoolExecutor(workers, context, start_worker, (maker, done, stop)), work
    else:
        pool, make = ThreadPoolExecutor(1), partial(maker.make, done=done, stop=stop)
    try:
        waiting: dict[Future[dict[str, Any]], int] = {
            pool.submit(make, unit.number, unit.shard, unit.pieces): unit.number for unit in units
        }
        while waiting:
            tell()
            for future in wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED).done:
                results[waiting.pop(future)] = future.result()
        tell()
    except BrokenProcessPool as error:
        raise ValueError(
            "a process was killed, perhaps for want of memory; the units that are done are kept"
        ) from error
    finally:
        stop.value = 1  # after a failure or Ctrl-C nothing more is wanted
        pool.shutdown(cancel_futures=True)
    return [results[unit.number] for unit in units]


# ------------------------------------------------------------------------------------------------ joining


def _join(
    out: Path, tokenizer: Tokenizer, asked: dict[str, Any], results: Sequence[dict[str, Any]], verify: bool
) -> dict[str, Any]:
    """The index over all units and the manifest: after this the folder is a corpus."""
    documents = np.concatenate(
        [np.load(out / UNFINISHED / f"unit-{number:05d}.npy") for number in range(len(results))] or [[]]
    )
    empty = sum(result["empty"] for result in results)
    if not len(documents):
        shutil.rmtree(out)
        raise ValueError(f"these inputs hold no text: {empty} empty documents in {len(asked['inputs'])} files")
    order = digest_order(documents["digest"].astype(np.uint64))
    starts = np.cumsum(documents["tokens"]) - documents["tokens"]
    arrays = {
        "digests": documents["digest"][order, 0].astype("<u8"),
        "starts": starts[order].astype("<i8"),
        "ends": np.cumsum(documents["tokens"][order]).astype("<i8"),
        "byte_ends": np.cumsum(documents["bytes"][order]).astype("<i8"),
    }
    for name in INDEX:
        save(out / f"{name}.npy", arrays[name])
    if isinstance(tokenizer, FileTokenizer):
        with renamed(out / TOKENIZER) as file:
            file.write_bytes(tokenizer.content)
    manifest = {
        "format": store.FORMAT,
        "version": store.VERSION,
        "dtype": dtype_of(tokenizer).name,
        "num_documents": len(documents),
        "num_tokens": int(arrays["ends"][-1]),
        "num_bytes": sum(result["bytes"] for result in results),
        "num_empty": empty,
        "shards": [result["shard"] for result in results],
        "index": [{"file": f"{name}.npy", **checked(out / f"{name}.npy")} for name in INDEX],
        **asked,
    }
    manifest["checksum"] = store.checksum(manifest)
    if verify:
        store.verify(out, manifest)
    write_json(out / MANIFEST, manifest)
    shutil.rmtree(out / UNFINISHED)
    return manifest
