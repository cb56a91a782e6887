"""Best-fit packing: an index of which pieces share a row, made once and, for a corpus on disk, kept beside it.

Only a document longer than a row is cut. Pieces, longest first, go to the row with the least room that still holds
them, the earliest made of several (best-fit decreasing). Done by length and not by piece: all rows with equal room take
pieces of one length together, in a few array operations, so that a million documents take a second.

Documents are packed in groups of GROUP, each in rows of its own: the memory that it takes does not grow with the
corpus, and a group's one or two rows that stay half empty are nothing among its thousands.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hyjax.data.corpus import StoredCorpus, TokenStream

log = logging.getLogger(__name__)

# Raised when the same documents give other rows than before.
VERSION = 1
GROUP = 2**22  # documents

Group = tuple[np.ndarray, np.ndarray]


class PackIndex:
    """Which pieces make which row: row r has the pieces first[r] to first[r+1], each (start, length) in the stream."""

    def __init__(self, first: np.ndarray, pieces: np.ndarray):
        self.first, self.pieces = first, pieces

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.pieces[self.first[row] : self.first[row + 1]]


def best_fit(corpus: TokenStream, seq_len: int) -> PackIndex:
    """Pieces of at most seq_len inputs in as few rows as best-fit decreasing finds.

    A corpus on disk has its index in `packing/` of its folder: read if it is there and whole, else made and written.
    Where it can't be written, that is logged and the index stays in memory.
    """
    if not isinstance(corpus, StoredCorpus):
        return _in_memory(_groups(corpus, seq_len))
    identity = dict(
        version=VERSION,
        corpus=corpus.checksum,
        first_document=corpus.first,
        num_documents=corpus.num_documents,
        seq_len=seq_len,
    )
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = Path(corpus.folder) / "packing" / f"best_fit-{seq_len}-{key}.json"
    try:
        return _read(path, identity)
    except FileNotFoundError:
        pass  # not made yet
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s can't be used (%s): it is made anew", path, error)
    try:
        _write(path, identity, _groups(corpus, seq_len))
        return _read(path, identity)
    except OSError as error:
        log.warning("%s can't be written (%s): the packing stays in memory, for this run", path, error)
        return _in_memory(_groups(corpus, seq_len))


# ------------------------------------------------------------------------------------------------ packing


def _groups(corpus: TokenStream, seq_len: int) -> Iterator[Group]:
    """(pieces in each row int64 [rows], pieces int64 [n, 2] row by row) of GROUP documents after GROUP documents."""
    start = corpus.start
    for at in range(0, corpus.num_documents, GROUP):
        ends = np.asarray(corpus.ends[at : at + GROUP])
        starts = np.append(start, ends[:-1])
        yield _pack(*_pieces(starts, ends, seq_len), seq_len)
        start = ends[-1]


def _pieces(starts: np.ndarray, ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of pieces of at most seq_len inputs; a document's last token is a target only."""
    inputs = ends - starts - 1
    count = -(-inputs // seq_len)
    first = np.cumsum(count) - count
    within = (np.arange(count.sum()) - np.repeat(first, count)) * seq_len
    return np.repeat(starts, count) + within, np.minimum(seq_len, np.repeat(inputs, count) - within)


def _pack(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> Group:
    """Best-fit decreasing of all pieces."""
    order = np.argsort(-lengths, kind="stable")
    rows, num_rows = _assign(np.bincount(lengths, minlength=seq_len + 1), seq_len)
    by_row = order[np.argsort(rows, kind="stable")]  # a row's pieces stay in the order in which they came to it
    return np.bincount(rows, minlength=num_rows), np.stack([starts[by_row], lengths[by_row]], axis=1)


def _assign(how_many: np.ndarray, seq_len: int) -> tuple[np.ndarray, int]:
    """The row of each piece, longest piece first, and the number of rows; how_many[n] pieces have length n.

    A row with `room` places takes room // length pieces in a row: after the first it has the least room of all that
    still hold one, for those with less than `room` were filled before it.
    """
    rooms: list[list[np.ndarray]] = [[] for _ in range(seq_len + 1)]  # [places left]: rows, in sorted parts
    open_rows = np.zeros(seq_len + 1, np.int64)  # how many rows each entry has

    def put(rows: np.ndarray, room: int) -> None:
        if room and len(rows):
            rooms[room].append(rows)
            open_rows[room] += len(rows)

    def take(room: int) -> np.ndarray:
        parts, rooms[room], open_rows[room] = rooms[room], [], 0
        return parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts), kind="stable")

    assigned, num_rows = [np.zeros(0, np.int64)], 0
    for length in np.flatnonzero(how_many)[::-1].tolist():
        left = int(how_many[length])
        least_first = iter((np.flatnonzero(open_rows[length:]) + length).tolist())
        while left:
            room = next(least_first, None)
            if room is None:
                room = seq_len
                rows = np.arange(num_rows, num_rows - (-left // (room // length)))
                num_rows += len(rows)
            else:
                rows = take(room)
            each = room // length
            used = min(len(rows), -(-left // each))
            placed = min(left, used * each)
            assigned.append(np.repeat(rows[:used], each)[:placed])
            last = placed - (used - 1) * each  # pieces in the last row that is used, perhaps fewer than it holds
            put(rows[: used - 1], room - each * length)
            put(rows[used - 1 : used], room - last * length)
            put(rows[used:], room)
            left -= placed
    return np.concatenate(assigned), num_rows


# ------------------------------------------------------------------------------------------------ keeping


def _in_memory(groups: Iterable[Group]) -> PackIndex:
    counts, pieces = zip(*groups, strict=True)
    return PackIndex(np.append(0, np.cumsum(np.concatenate(counts))), np.concatenate(pieces))


def _write(path: Path, identity: dict[str, Any], groups: Iterable[Group]) -> None:
    """Two files of int64 and, last, the JSON that says what they are: whoever finds it finds all three whole.

    Several processes may do this at once; each writes the same bytes under a name of its own and renames.
    """
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        files = {name: Path(folder) / name for name in ("first", "pieces")}
        num_rows = num_pieces = 0
        with files["first"].open("wb") as first, files["pieces"].open("wb") as pieces:
            first.write(np.zeros(1, "<i8").tobytes())
            for counts, group in groups:
                first.write((num_pieces + np.cumsum(counts)).astype("<i8").data)
                pieces.write(group.astype("<i8").data)
                num_rows, num_pieces = num_rows + len(counts), num_pieces + len(group)
        sums = {name: _sha256(file) for name, file in files.items()}
        description = Path(folder) / "description"
        description.write_text(json.dumps(dict(identity=identity, rows=num_rows, pieces=num_pieces, sha256=sums)))
        for name, file in files.items():
            os.replace(file, path.with_suffix(f".{name}"))
        os.replace(description, path)


def _read(path: Path, identity: dict[str, Any]) -> PackIndex:
    """The index at `path`, mapped; ValueError or OSError where it is another's or damaged."""
    found = json.loads(path.read_text())
    if found["identity"] != identity:
        raise ValueError(f"it is that of {found['identity']}")
    files = {name: path.with_suffix(f".{name}") for name in ("first", "pieces")}
    for name, file in files.items():
        if _sha256(file) != found["sha256"][name]:
            raise ValueError(f"{file.name} is not what was written")
    first = np.memmap(files["first"], "<i8", "r", shape=(found["rows"] + 1,))
    shape = (found["pieces"], 2)
    pieces = np.memmap(files["pieces"], "<i8", "r", shape=shape) if found["pieces"] else np.zeros(shape, np.int64)
    return PackIndex(np.asarray(first), np.asarray(pieces))


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
