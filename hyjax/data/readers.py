"""Inputs as documents, in pieces that processes read by themselves.

A piece is a range of an input's bytes, row groups or records. Every document belongs to one piece, and which documents
there are does not depend on how the inputs are cut into pieces:

* `jsonl`: a line's field. A line belongs to the piece that its first byte is in.
* `parquet`: a row's field. `array_record`: a record, or its field where one is named and the record is JSON.
* `text`: what lies between separators; without one, see `hyjax.data.cuts.sections`.

A compressed file is one piece.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hyjax.config.errors import near, show
from hyjax.data import cuts
from hyjax.data.inputs import Input, open_bytes, open_parquet, open_records, reading

DEFAULT_FIELD = "text"
_ALL = 2**62  # an end that is past every file's


@dataclass(frozen=True)
class Options:
    """How documents lie in files.

    field      of a JSON object or a table; "": `text`, and an ArrayRecord file's records are themselves text
    separator  between the documents of a text file; b"": none
    """

    field: str = ""
    separator: bytes = b""


@dataclass(frozen=True)
class Piece:
    """Of one input, [start, end) of its bytes, row groups or records; `weight` is about the bytes there are to read."""

    input: Input
    start: int
    end: int
    weight: int


def find_pieces(inputs: Sequence[Input], size: int, options: Options) -> list[Piece]:
    """The inputs in pieces of about `size` bytes, in order.

    Raises ValueError: a file's index can't be read, an option is given that none of the inputs takes.
    """
    formats = {item.format for item in inputs}
    if options.separator and "text" not in formats:
        raise ValueError("--separator is for text files, and none of the inputs is one")
    if options.field and formats == {"text"}:
        raise ValueError(
            f"--field={show(options.field)} is for records and tables, and all of the inputs are text files"
        )
    with ThreadPoolExecutor(16) as threads:  # many files' footers, which may lie far away
        return [piece for part in threads.map(lambda item: _pieces(item, size, options), inputs) for piece in part]


def _pieces(item: Input, size: int, options: Options) -> list[Piece]:
    if item.format == "parquet":
        with reading(item.name), open_parquet(item) as file:
            column = _column(file, item, options.field or DEFAULT_FIELD)
            groups = [file.metadata.row_group(i).column(column) for i in range(file.num_row_groups)]
            return [Piece(item, i, i + 1, group.total_uncompressed_size) for i, group in enumerate(groups)]
    if item.format == "array_record" and item.is_local:
        with reading(item.name), open_records(item) as reader:
            total = reader.num_records()
        step = max(1, total * size // max(1, item.size))
        ranges = [(start, min(total, start + step)) for start in range(0, total, step)]
        return [Piece(item, start, end, item.size * (end - start) // total) for start, end in ranges]
    one_document = item.format == "text" and not options.separator and item.size <= cuts.WHOLE
    if item.format == "array_record" or item.compression or one_document or item.size <= size:
        return [Piece(item, 0, _ALL, item.size)]
    step = -(-size // cuts.SECTION) * cuts.SECTION
    starts = range(0, item.size, step)
    return [Piece(item, at, at + step if at + step < item.size else _ALL, min(step, item.size - at)) for at in starts]


def read_piece(piece: Piece, options: Options) -> Iterator[bytes]:
    """The documents of a piece as UTF-8 text, empty ones among them.

    Raises ValueError with the file's name and the line, row, record or byte: not UTF-8, not JSON, no such field, a
    value that is no text, a file that can't be read.
    """
    with reading(piece.input.name):
        yield from _READERS[piece.input.format](piece, options)


def _end(piece: Piece) -> int | None:
    return None if piece.end == _ALL else piece.end


def _text(piece: Piece, options: Options) -> Iterator[bytes]:
    with open_bytes(piece.input) as file:
        if options.separator:
            documents = cuts.separated(file, piece.start, _end(piece), options.separator)
        else:
            documents = cuts.sections(file, piece.start, _end(piece))
        for place, text in documents:
            try:
                text.decode("utf-8")
            except UnicodeDecodeError as error:
                bad, at = text[error.start], place + error.start
                raise ValueError(f"{piece.input.name} is not UTF-8 text: byte {bad:#04x} at {at}") from error
            yield text


def _jsonl(piece: Piece, options: Options) -> Iterator[bytes]:
    with open_bytes(piece.input) as file:
        for number, (place, line) in enumerate(cuts.lines(file, piece.start, _end(piece)), 1):
            if place == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")  # what some editors begin a UTF-8 file with
            if line.isspace() or not line:
                continue
            try:
                text = _field(line, options.field or DEFAULT_FIELD)
            except _BadRecord as error:
                row = number if piece.start == 0 else _line_number(piece.input, place)
                raise ValueError(f"{piece.input.name}, line {row}: {error}") from error
            yield text


def _line_number(item: Input, place: int) -> int:
    """Of the line that begins at byte `place`, counted from 1."""
    number = 1
    with open_bytes(item) as file:
        while place > 0 and (chunk := file.read(min(cuts.CHUNK, place))):
            number, place = number + chunk.count(b"\n"), place - len(chunk)
    return number


def _parquet(piece: Piece, options: Options) -> Iterator[bytes]:
    item, field = piece.input, options.field or DEFAULT_FIELD
    with open_parquet(item) as file:
        _column(file, item, field)
        for group in range(piece.start, piece.end):
            row = 0
            for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[field]):
                for value in batch.column(0).to_pylist():
                    try:
                        text = _utf8(value, f"column {field!r}")
                    except _BadRecord as error:
                        raise ValueError(f"{item.name}, row {row} of row group {group}: {error}") from error
                    yield text
                    row += 1


def _column(file: Any, item: Input, field: str) -> int:
    """The column's number in the file's row groups."""
    names = file.schema_arrow.names
    if field not in names:
        raise ValueError(f"{item.name} has no column {field!r} but {', '.join(names)}{near(field, names)} (--field)")
    leaves = [file.metadata.schema.column(i).path for i in range(len(file.metadata.schema))]
    if field not in leaves:
        raise ValueError(f"{item.name}: column {field!r} is no text but {file.schema_arrow.field(field).type}")
    return leaves.index(field)


def _array_record(piece: Piece, options: Options) -> Iterator[bytes]:
    with open_records(piece.input) as reader:
        for number in range(piece.start, min(piece.end, reader.num_records())):
            record = reader.read([number])[0]
            try:
                text = _field(record, options.field) if options.field else _utf8(record, "the record")
            except _BadRecord as error:
                raise ValueError(f"{piece.input.name}, record {number}: {error}") from error
            yield text


_READERS = {"text": _text, "jsonl": _jsonl, "parquet": _parquet, "array_record": _array_record}


class _BadRecord(ValueError):
    """What is wrong with a record; the reader adds where it lies."""


def _field(record: bytes, field: str) -> bytes:
    """The text in a field of a JSON object."""
    try:
        value = json.loads(record.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRecord(f"not UTF-8 text: byte {record[error.start]:#04x} at {error.start} of it") from error
    except json.JSONDecodeError as error:
        raise _BadRecord(f"not JSON: {error.msg} at character {error.pos}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands of brackets
        raise _BadRecord(f"not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise _BadRecord(f"not an object with a field {field!r} but {show(value)}")
    if field not in value:
        raise _BadRecord(f"no field {field!r} but {', '.join(map(repr, value))}{near(field, value)} (--field)")
    return _utf8(value[field], f"field {field!r}")


def _utf8(value: Any, what: str) -> bytes:
    """A value as UTF-8 text; null is an empty document."""
    if value is None:
        return b""
    if not isinstance(value, str | bytes):
        raise _BadRecord(f"{what} is no text but {show(value)}")
    try:
        if isinstance(value, str):
            return value.encode("utf-8")
        value.decode("utf-8")
    except UnicodeError as error:
        raise _BadRecord(f"{what} is not UTF-8 text: {error}") from error
    return value
