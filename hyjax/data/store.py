"""A tokenised corpus on disk, read by place: any range of a stream of any length, without reading the rest.

    corpus.json          the manifest; written last, so that a folder with one is whole
    tokenizer.json       the tokenizer, where it is a file of the `tokenizers` library
    *.array_record       the documents' tokens one after the other, in the order they were read; a shard's records are
                         BLOCK tokens each (its last one fewer), in the narrowest unsigned type, little endian
    digests.npy          uint64, the first 8 bytes of sha256 of each document's text, big endian: sorted
    starts.npy           int64, where in the stored stream the document begins
    ends.npy             int64, tokens of this document and all before it in this order, eos included
    byte_ends.npy        int64, likewise bytes of text that are predicted: all but what the first tokens stand for

The four arrays have an entry a document, in order of the digest (ties: in order of the stream), which is the order
of `sources.split`: training rows are the same from a corpus and from the documents that it was made of.
"""

import errno
import hashlib
import json
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hyjax.config.errors import show
from hyjax.data.tokenizers import FileTokenizer, Tokenizer, get_tokenizer

FORMAT = "hyjax corpus"
VERSION = 1
MANIFEST = "corpus.json"
TOKENIZER = "tokenizer.json"
UNFINISHED = "unfinished"  # a folder in the corpus: what a corpus being made keeps until it is whole
INDEX = ("digests", "starts", "ends", "byte_ends")

# 8 KiB where ids are two bytes. A read costs 10 us from 2,048 tokens to 16,384, then more; uncompressed, because
# zstd saves a tenth and costs twice the time.
BLOCK = 4096
_WRITER = "group_size:1,uncompressed"
_READER = "readahead_buffer_size:0,max_parallelism:0"


class Store:
    """A corpus that `hyjax data tokenize` made.

    digests, starts, ends, byte_ends are memory-mapped arrays (see above), `checksum` covers every token and every
    document's bounds. Reading from several threads is safe; a pickled store opens the folder again.

    Raises ValueError with one sentence: no such folder, not finished, a file missing or of another size.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()
        self.manifest = read_manifest(self.path)
        self.num_documents: int = self.manifest["num_documents"]
        self.num_tokens: int = self.manifest["num_tokens"]
        self.num_bytes: int = self.manifest["num_bytes"]
        self.dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        self.checksum: str = self.manifest["checksum"]
        self._shards = [shard for shard in self.manifest["shards"] if shard["tokens"]]
        self._firsts = np.cumsum([0] + [shard["tokens"] for shard in self._shards]).tolist()
        _check_files(self.path, self.manifest)
        self.digests, self.starts, self.ends, self.byte_ends = (
            np.load(self.path / f"{name}.npy", mmap_mode="r") for name in INDEX
        )
        self._readers: list[Any] = [None] * len(self._shards)
        self._opening = threading.Lock()
        told = self.manifest["tokenizer"]
        self.tokenizer: Tokenizer
        if told["sha256"]:
            self.tokenizer = FileTokenizer(self.path / TOKENIZER, told["eos_token"])
        else:
            self.tokenizer = get_tokenizer(told["name"])
        if self.tokenizer.identity["sha256"] != told["sha256"]:
            raise ValueError(f"{self.path / TOKENIZER} is not the tokenizer that the corpus was made with")

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self.path,)

    def read(self, start: int, length: int) -> np.ndarray:
        """Ids of the stored stream [start, start + length), in the stored type; not to be written to."""
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise IndexError(f"tokens {start} to {start + length} of {self.num_tokens}")
        parts = []
        shard = bisect_right(self._firsts, start) - 1
        while length > 0:
            within = start - self._firsts[shard]
            take = min(length, self._firsts[shard + 1] - start)
            first, last = within // BLOCK, (within + take - 1) // BLOCK
            blocks = self._blocks(shard, list(range(first, last + 1)))
            begin = within - first * BLOCK
            parts.append(np.frombuffer(blocks, self.dtype)[begin : begin + take])
            start, length, shard = start + take, length - take, shard + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, self.dtype)

    def _blocks(self, shard: int, numbers: list[int]) -> bytes:
        name = self._shards[shard]["file"]
        try:
            reader = self._readers[shard] or self._open(shard)
            records = reader.read(numbers)
        except RuntimeError as error:  # what array_record raises for everything
            raise ValueError(_damaged(self.path / name, str(error).splitlines()[0])) from error
        return records[0] if len(records) == 1 else b"".join(records)

    def _open(self, shard: int) -> Any:
        from array_record.python import array_record_module

        with self._opening:
            if self._readers[shard] is None:
                file = self.path / self._shards[shard]["file"]
                # Readers may be shared by threads; a small buffer, because a read wants one record.
                reader = array_record_module.ArrayRecordReader(str(file), _READER, file_reader_buffer_size=32768)
                blocks = -(-self._shards[shard]["tokens"] // BLOCK)
                if reader.num_records() != blocks:
                    raise ValueError(_damaged(file, f"{reader.num_records()} records where there were {blocks}"))
                self._readers[shard] = reader
            return self._readers[shard]

    def lengths(self) -> np.ndarray:
        """int64 [num_documents]: tokens of each document, eos included, in order of the digest."""
        return np.diff(self.ends, prepend=0)

    def verify(self) -> None:
        """Read every file and compare its sha256; ValueError names the first that is damaged."""
        verify(self.path, self.manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What corpus.json says; ValueError with one sentence where the folder holds no finished corpus."""
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except FileNotFoundError as error:
        if (folder / UNFINISHED).is_dir():
            raise ValueError(f"{folder} is a corpus half made: run its `hyjax data tokenize` again") from error
        what = "has no corpus.json" if folder.is_dir() else "is no local folder"
        raise ValueError(f"{folder} is no corpus that `hyjax data tokenize` made: it {what}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{file} is no manifest of a corpus that `hyjax data tokenize` made")
    if manifest.get("version") != VERSION:
        raise ValueError(f"{folder} is a corpus of version {manifest.get('version')}, and this hyjax reads {VERSION}")
    if manifest.get("checksum") != checksum(manifest):
        raise ValueError(_damaged(file, "its checksum is not that of what it says"))
    return manifest


def checksum(manifest: Mapping[str, Any]) -> str:
    """sha256 over what the tokens and the documents' bounds are, by the sha256 of the files they are in."""
    keys = ("version", "tokenizer", "dtype", "num_documents", "num_tokens", "num_bytes", "shards", "index")
    return hashlib.sha256(json.dumps([manifest.get(key) for key in keys], sort_keys=True).encode()).hexdigest()


def verify(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Compare the sha256 of every file of a corpus; ValueError names the first that is damaged."""
    files = {entry["file"]: entry["sha256"] for entry in (*manifest["shards"], *manifest["index"])}
    if manifest["tokenizer"]["sha256"]:
        files[TOKENIZER] = manifest["tokenizer"]["sha256"]
    _check_files(folder, manifest)
    for name, expected in files.items():
        found = sha256(folder / name)
        if found != expected:
            raise ValueError(_damaged(folder / name, f"its sha256 is {found[:16]}..., not {expected[:16]}..."))


def _check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    for entry in (*manifest["shards"], *manifest["index"]):
        file = folder / entry["file"]
        if not file.is_file():
            raise ValueError(f"{file} is missing from the corpus")
        if file.stat().st_size != entry["size"]:
            raise ValueError(_damaged(file, f"it has {file.stat().st_size} bytes, not {entry['size']}"))


def _damaged(file: Path, how: str) -> str:
    return f"{file} is damaged ({how}): copy it again, or remove the corpus and tokenize again"


def sha256(file: Path) -> str:
    """Of a file's bytes, in hex; ValueError where it can't be read."""
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{show(str(file))} can't be read: {error.strerror}") from error


class BlockWriter:
    """A shard being written: ids in, records of BLOCK tokens out. Raises OSError where the disk won't take them."""

    def __init__(self, file: Path, dtype: np.dtype):
        from array_record.python import array_record_module

        self.file, self.tokens = file, 0
        self.dtype = dtype.newbyteorder("<")
        self._waiting: list[np.ndarray] = []
        self._count = 0  # tokens that wait
        self._writer = self._do(array_record_module.ArrayRecordWriter, str(file), _WRITER)

    def write(self, ids: np.ndarray) -> None:
        self._waiting.append(ids.astype(self.dtype))
        self._count += len(ids)
        self.tokens += len(ids)
        if self._count >= 16 * BLOCK:
            joined = np.concatenate(self._waiting)
            whole = len(joined) // BLOCK * BLOCK
            self._flush(joined[:whole])
            self._waiting, self._count = [joined[whole:]], len(joined) - whole

    def _flush(self, ids: np.ndarray) -> None:
        data, size = ids.tobytes(), BLOCK * self.dtype.itemsize
        for at in range(0, len(data), size):
            self._do(self._writer.write, data[at : at + size])

    def close(self) -> None:
        """Write what waits; the file is whole and on the disk after this."""
        if self._count:
            self._flush(np.concatenate(self._waiting))
        self._do(self._writer.close)
        with self.file.open("rb+") as opened:
            os.fsync(opened.fileno())

    def _do(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:  # "write() failed: No space left on device; writing FILE; at byte 1000; ..."
            reason = re.sub(r"^\w+\(\) failed: ", "", str(error)).split(";")[0]
            raise OSError(errno.EIO, reason, str(self.file)) from error


def digest_order(digests: np.ndarray) -> np.ndarray:
    """The order of sha256 digests, given as four big-endian words each: uint64 [n, 4] -> int64 [n]; ties keep theirs.

    The first word decides but for one chance in 2^64 a pair, so the other three are sorted only where it matters.
    """
    order = np.argsort(digests[:, 0], kind="stable")
    first = digests[:, 0][order]
    same = first[1:] == first[:-1]
    if np.any(digests[order[1:][same]] != digests[order[:-1][same]]):
        order = np.lexsort(digests.T[::-1])
    return order
