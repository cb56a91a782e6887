"""One unit of a corpus: the documents of a few pieces, tokenised into one shard by whichever process takes it.

A unit is done when `unit-N.json` exists, which is written last and holds the checksums of the shard and of
`unit-N.npy` (an entry a document, in stream order: sha256 of its text, tokens, predicted bytes). Every file comes into
being under another name and is renamed, so that a process killed at any moment leaves no file that is half one.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hyjax.data.readers import Options, Piece, read_piece
from hyjax.data.store import UNFINISHED, BlockWriter, sha256
from hyjax.data.tokenizers import Tokenizer

# The `tokenizers` library is a third slower with several megabytes in a call than with a quarter of one.
BATCH_BYTES = 1 << 18
BATCH_DOCUMENTS = 1024

# digest: sha256 as four big-endian words
DOCUMENT = np.dtype([("digest", ">u8", (4,)), ("tokens", "<i8"), ("bytes", "<i8")])


class Shared(Protocol):
    """What `multiprocessing.Value` is: a number that processes share."""

    value: int

    def get_lock(self) -> Any: ...


class Stopped(Exception):
    """Another unit failed, or the person who started this wants it to end."""


@dataclass
class UnitMaker:
    """Makes units in `folder`, in this process or, pickled, in others."""

    folder: Path
    tokenizer: Tokenizer
    options: Options

    def make(self, number: int, shard: str, pieces: Sequence[Piece], done: Shared, stop: Shared) -> dict[str, Any]:
        """Make unit `number`, or keep it where it is done and undamaged; returns what unit-N.json holds.

        Args: shard: the name of its file. done: bytes of text are added to it. stop: not 0 ends the work.

        Raises ValueError for what can't be read, OSError for what can't be written, Stopped.
        """
        record = self.folder / UNFINISHED / f"unit-{number:05d}.json"
        found = self._finished(record, shard)
        if found is not None:
            return found | {"kept": True}
        documents = _Documents()
        with renamed(self.folder / shard) as file:
            writer = BlockWriter(file, dtype_of(self.tokenizer))
            for batch in _batches(text for piece in pieces for text in read_piece(piece, self.options)):
                if stop.value:
                    raise Stopped
                documents.add(batch, self.tokenizer.encode_documents(batch), writer.write)
                with done.get_lock():
                    done.value += sum(map(len, batch))
            writer.close()
        index = record.with_suffix(".npy")
        save(index, documents.index())
        result = {
            "shard": {"file": shard, "tokens": writer.tokens, **checked(self.folder / shard)},
            "index": checked(index),
            "documents": len(documents.tokens),
            "empty": documents.empty,
            "bytes": documents.text_bytes,
        }
        write_json(record, result)
        return result | {"kept": False}

    def _finished(self, record: Path, shard: str) -> dict[str, Any] | None:
        if not record.is_file():
            return None
        result = json.loads(record.read_text())
        files = ((self.folder / shard, result["shard"]), (record.with_suffix(".npy"), result["index"]))
        whole = all(file.is_file() and sha256(file) == entry["sha256"] for file, entry in files)
        return result if whole else None


class _Documents:
    """What is noted of each document while its tokens go by, at 48 bytes a document."""

    def __init__(self) -> None:
        self.digests, self.tokens, self.bytes = bytearray(), array("q"), array("q")
        self.empty = self.text_bytes = 0

    def add(self, texts: Sequence[bytes], encoded: Iterable[Any], write: Callable[[np.ndarray], None]) -> None:
        for text, (ids, first_bytes) in zip(texts, encoded, strict=True):
            if not len(ids):
                self.empty += 1
                continue
            write(ids)
            self.digests += hashlib.sha256(text).digest()
            self.tokens.append(len(ids))
            self.bytes.append(len(text) - first_bytes)
            self.text_bytes += len(text)

    def index(self) -> np.ndarray:
        result = np.zeros(len(self.tokens), DOCUMENT)
        result["digest"] = np.frombuffer(self.digests, ">u8").reshape(-1, 4)
        result["tokens"], result["bytes"] = self.tokens, self.bytes
        return result


def _batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """The narrowest unsigned type of its ids."""
    return np.dtype(np.min_scalar_type(tokenizer.vocab_size - 1))


# ------------------------------------------------------------------------------------------------ files


@contextlib.contextmanager
def renamed(file: Path) -> Iterator[Path]:
    """Another name to write to, which becomes `file` at the end; after an exception nothing is left of it."""
    other = file.with_name(f"{file.name}.tmp-{os.getpid()}")
    try:
        yield other
        os.replace(other, file)
    finally:
        other.unlink(missing_ok=True)


def save(file: Path, values: np.ndarray) -> None:
    """np.save, whole or not at all."""
    with renamed(file) as other, other.open("wb") as opened:
        np.save(opened, values)
        opened.flush()
        os.fsync(opened.fileno())


def write_json(file: Path, value: Any) -> None:
    """JSON, whole or not at all."""
    with renamed(file) as other, other.open("w") as opened:
        json.dump(value, opened, indent=1)
        opened.write("\n")
        opened.flush()
        os.fsync(opened.fileno())


def checked(file: Path) -> dict[str, Any]:
    """Size and checksum of a file, for the manifest."""
    return {"size": file.stat().st_size, "sha256": sha256(file)}


# ------------------------------------------------------------------------------------------------ in other processes

_maker: UnitMaker
_done: Shared
_stop: Shared


def start_worker(maker: UnitMaker, done: Shared, stop: Shared) -> None:
    """What a worker process does first."""
    import signal

    global _maker, _done, _stop
    _maker, _done, _stop = maker, done, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the first one says stop
    # A process whose parent was killed would wait for work for ever.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def work(number: int, shard: str, pieces: Sequence[Piece]) -> dict[str, Any]:
    """`UnitMaker.make` in a worker process."""
    return _maker.make(number, shard, pieces, _done, _stop)
