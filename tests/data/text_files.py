"""The same texts in files of every format."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter

from hyjax.data.readers import Options

NAMES = ["a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.array_record"]
SEPARATOR = "<|end|>"  # of the texts in a .txt


def options_of(name: str) -> Options:
    """How the texts are read back."""
    return Options(separator=SEPARATOR.encode() if ".txt" in name else b"")


def write_texts(folder: Path, name: str, texts: Sequence, field: str = "text") -> Path:
    """A file that holds the texts, in the format that its name says."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)).encode()
    if name.endswith(".parquet"):
        table = pyarrow.table({"id": list(range(len(texts))), field: texts})
        pyarrow.parquet.write_table(table, file, row_group_size=2)
    elif name.endswith(".array_record"):
        writer = ArrayRecordWriter(str(file), "group_size:1")
        for text in texts:
            writer.write(text.encode() if field == "text" else json.dumps({field: text}).encode())
        writer.close()
    elif ".txt" in name:
        lines = SEPARATOR.join(texts).encode()
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(lines))
    elif name.endswith(".zst"):  # two frames, one after the other
        half = len(lines) // 2
        file.write_bytes(b"".join(zstandard.ZstdCompressor().compress(part) for part in (lines[:half], lines[half:])))
    elif name.endswith((".jsonl", ".txt")):
        file.write_bytes(lines)
    return file
