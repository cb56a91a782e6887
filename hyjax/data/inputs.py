"""Files to be tokenised, wherever they lie: which there are, and opening them.

Paths are local or URLs that `fsspec` knows (gs://, s3://, https://, ...). Names ending in .gz or .zst are
decompressed as they are read.
"""

import contextlib
import gzip
import io
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any

from hyjax.config.errors import near, show

FORMATS = ("text", "jsonl", "parquet", "array_record")
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}
# Where the file systems say when a file was last changed, or which version of it this is.
_STAMPS = ("mtime", "updated", "LastModified", "last_modified", "ETag", "etag", "created")


@dataclass(frozen=True)
class Input:
    """A file: its URL or absolute path, bytes, when it was last changed, what is in it, and "", ".gz" or ".zst"."""

    name: str
    size: int
    modified: str
    format: str
    compression: str

    @property
    def is_local(self) -> bool:
        return "://" not in self.name


def find_inputs(patterns: Sequence[str], format: str = "auto") -> list[Input]:
    """The files that paths, URLs, folders and globs name, each once, in sorted order of their names.

    Of a folder or glob, what begins with a dot is left out. `format` is one of FORMATS; "auto" tells it from a file's
    name, and what it does not know is text.

    Raises ValueError: a pattern that names nothing, a scheme whose package is not installed, a format that the name
    leaves open.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for pattern in patterns:
        fs, path = filesystem(pattern)
        with reading(pattern):
            entries = _list(fs, path)
        if not entries:
            raise ValueError(f"--input={show(pattern)} names no file")
        found |= {fs.unstrip_protocol(name).removeprefix("file://"): info for name, info in entries.items()}
    return [_input(name, info, format) for name, info in sorted(found.items())]


def _list(fs: Any, path: str) -> dict[str, Mapping[str, Any]]:
    """What fsspec knows of the file itself, of each file below a folder, or of each that a glob matches."""
    if fs.isfile(path):
        return {path: fs.info(path)}
    if fs.isdir(path):
        return {name: info for name, info in fs.find(path, detail=True).items() if not _hidden(name, path)}
    fixed, *wild = re.split(r"[*?\[]", path, maxsplit=1)
    if not wild:
        raise FileNotFoundError(2, "no such file or folder")
    root = fixed.rpartition("/")[0]
    found = {name: info for name, info in fs.glob(path, detail=True).items() if info["type"] == "file"}
    return {name: info for name, info in found.items() if not _hidden(name, root) or _hidden(path, root)}


def _hidden(name: str, root: str) -> bool:
    """Whether the file, or a folder between it and the root, has a name that begins with a dot."""
    return any(part.startswith(".") for part in PurePosixPath(name.removeprefix(root)).parts)


def _input(name: str, info: Mapping[str, Any], format: str) -> Input:
    path = PurePosixPath(name.lower())
    compression = path.suffix if path.suffix in (".gz", ".zst") else ""
    suffix = path.with_suffix("").suffix if compression else path.suffix
    if format == "auto":
        if suffix == ".json":
            raise ValueError(f"{name} may be one text or a document a line: say --format=text or --format=jsonl")
        format = _SUFFIXES.get(suffix, "text")
    if compression and format in ("parquet", "array_record"):
        raise ValueError(f"{name}: a {format} file is compressed inside and can't be read through {compression}")
    if info.get("size") is None:
        raise ValueError(f"{name} can't be read: whoever keeps it does not say how long it is")
    modified = next((str(info[key]) for key in _STAMPS if info.get(key)), "")
    return Input(name, int(info["size"]), modified, format, compression)


# ------------------------------------------------------------------------------------------------ opening


def filesystem(url: str) -> tuple[Any, str]:
    """(the fsspec file system, the path in it) of a path or URL."""
    import fsspec

    if "::" in url:
        raise ValueError(f"{show(url)} is a chain of URLs: name the files themselves")
    try:
        return fsspec.url_to_fs(url)
    except ImportError as error:
        raise ValueError(f"{show(url)} needs a package that is not installed: {error}") from error
    except ValueError as error:  # a scheme that no file system has
        scheme = url.partition("://")[0]
        raise ValueError(f"{show(url)}: {error}{near(scheme, ('gs', 's3', 'https', 'file'))}") from error


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """What goes wrong with a file in here is one sentence with its name."""
    try:
        yield
    except EOFError as error:
        raise ValueError(f"{name} is cut short: {error}") from error
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ValueError(f"{name} can't be read: {reason}") from error


@contextlib.contextmanager
def open_bytes(item: Input) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed."""
    fs, path = filesystem(item.name)
    with fs.open(path, "rb") as file:
        if item.compression == ".gz":
            yield io.BufferedReader(gzip.GzipFile(fileobj=file))
        elif item.compression == ".zst":
            try:
                import zstandard
            except ImportError as error:
                raise ValueError(f"{item.name} needs the package zstandard, which is not installed") from error
            try:
                yield io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
            except zstandard.ZstdError as error:
                raise ValueError(f"{item.name} can't be read: {error}") from error
        else:
            yield file


@contextlib.contextmanager
def open_parquet(item: Input) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{item.name} needs the package pyarrow, which is not installed") from error
    fs, path = filesystem(item.name)
    with fs.open(path, "rb") as file:
        try:
            yield pyarrow.parquet.ParquetFile(file)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{item.name} can't be read: {str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def open_records(item: Input) -> Iterator[Any]:
    """An `ArrayRecordReader`, which reads local files only: a file that lies elsewhere is copied first."""
    from array_record.python import array_record_module

    fs, path = filesystem(item.name)
    with contextlib.ExitStack() as stack:
        if not item.is_local:
            local = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".array_record"))
            fs.get(path, local.name)
            path = local.name
        try:
            reader = array_record_module.ArrayRecordReader(path, "readahead_buffer_size:0,max_parallelism:0")
            if not reader.ok() or (item.size and not reader.num_records()):
                raise ValueError(f"{item.name} is no ArrayRecord file, or one that is cut short")
            yield reader
            reader.close()
        except RuntimeError as error:
            raise ValueError(f"{item.name} can't be read: {str(error).splitlines()[0]}") from error
