"""Where the documents of a text file begin and end, told from any place in the file.

A file is cut into ranges of bytes that processes read by themselves. Which documents there are does not depend on the
ranges: a document belongs to the range in which it, or its section, begins, and where that is can be told from the
bytes around it. Memory is bounded by the longest document.

`read(n)` of a file must return n bytes unless the file ends, as buffered files do.
"""

from collections.abc import Iterator
from typing import IO

from hyjax.data.sources import cut

WHOLE = 1 << 20  # bytes: the longest text that is one document where nothing separates documents
SECTION = 1 << 16  # bytes: a longer one is cut into documents of about this size
CHUNK = 1 << 20  # bytes read at once

Placed = tuple[int, bytes]  # where a document begins in the file, and its text


def lines(file: IO[bytes], start: int, end: int | None) -> Iterator[Placed]:
    """The lines, with their ends, that begin in [start, end); `end` None: to the end of the file."""
    place = 0
    if start:
        file.seek(start - 1)
        place = start - 1 + len(file.readline())
    while (end is None or place < end) and (line := file.readline()):
        yield place, line
        place += len(line)


def separated(file: IO[bytes], start: int, end: int | None, separator: bytes) -> Iterator[Placed]:
    """What lies between separators, for the documents that begin after a separator in [start, end)."""
    place = _border(file, start, separator) if start else 0
    stop = None if end is None else _border(file, end, separator)
    if start or stop is not None:  # a compressed file is read from where it is
        file.seek(place)
    rest, read = b"", place
    while chunk := file.read(CHUNK if stop is None else min(CHUNK, stop - read)):
        read += len(chunk)
        *whole, rest = (rest + chunk).split(separator)
        for text in whole:
            yield place, text
            place += len(text) + len(separator)
    if rest:
        yield place, rest


def _border(file: IO[bytes], target: int, separator: bytes) -> int:
    """Where the document begins that follows the first separator at `target` or later; the file's end without one.

    A separator may overlap with itself ("\\n\\n" in "\\n\\n\\n"), and then where documents end depends on what came
    before. A separator that no other reaches into is one for every reader: only such a one counts.
    """
    length = len(separator)
    base = max(0, target - length + 1)  # the file's place of text[0]
    file.seek(base)
    text, at, previous = file.read(CHUNK), 0, base - length
    while True:
        found = text.find(separator, at)
        if found >= 0:
            if base + found >= target and base + found - previous >= length:
                return base + found + length
            previous, at = base + found, found + 1
            continue
        more = file.read(CHUNK)
        if not more:
            return base + len(text)
        kept = max(at, len(text) - length + 1)
        text, at, base = text[kept:] + more, 0, base + kept


def sections(file: IO[bytes], start: int, end: int | None) -> Iterator[Placed]:
    """A text up to WHOLE bytes as it is; a longer one in sections: those whose SECTION of bytes begins in [start, end).

    `start` is a multiple of SECTION. Section i goes from the cut after i SECTION to the cut after (i + 1) SECTION: at
    the first blank line there, else the first line end, else between two characters, and never more than another
    SECTION on. The last one takes what is left, from one SECTION to two.
    """
    file.seek(start)
    if start == 0:
        text = file.read(WHOLE + 1)
        if len(text) <= WHOLE:
            yield 0, text
            return
        at = 0
    else:
        text = file.read(CHUNK)
        if len(text) < SECTION:  # the section before has it
            return
        at = cut(text[:SECTION], 0, SECTION)
    place = start
    while end is None or place < end:
        if len(text) < 2 * SECTION:
            text += file.read(CHUNK)
        last = len(text) < 2 * SECTION
        stop = len(text) if last else cut(text, SECTION, 2 * SECTION)
        if stop > at:  # a cut may be as late as the next one: then nothing lies between them
            yield place + at, text[at:stop]
        if last:
            return
        text, at, place = text[SECTION:], stop - SECTION, place + SECTION
