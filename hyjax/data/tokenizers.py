"""Text to ids and back. A tokenizer is small, has no file and no state.

vocab_size   number of ids
eos          id that ends a document, or None where documents just end
token_bytes  int64 [vocab_size]: bytes of text an id stands for (0 for eos): what "bits per byte" divides by
encode       str or UTF-8 bytes -> int32 [n], without eos
decode       ids -> str
"""

import re
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from hyjax.config.errors import lookup


class Tokenizer(Protocol):
    """What the loader, the samples and the baselines ask of a tokenizer."""

    name: str
    vocab_size: int
    eos: int | None
    token_bytes: np.ndarray

    def encode(self, text: str | bytes) -> np.ndarray: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """The 256 bytes of UTF-8 text and an end of document (256)."""

    name = "bytes"
    vocab_size = 257
    eos: int | None = 256

    def __init__(self) -> None:
        self.token_bytes = np.array([1] * 256 + [0])

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Ids above 255 are dropped; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")


class LetterTokenizer:
    """Space (0), `<unk>` (1), a to z (2 to 27): every run of anything else becomes one space, lower case.

    `encode` never gives `<unk>`; the id is there because the vocabulary of 28 is. A document has no end mark.
    A token counts as one byte: bits per byte are bits per character of the reduced text.
    """

    name = "letters"
    vocab_size = 28
    eos: int | None = None
    _symbols = (" ", "<unk>", *"abcdefghijklmnopqrstuvwxyz")

    def __init__(self) -> None:
        self.token_bytes = np.ones(self.vocab_size, np.int64)

    def encode(self, text: str | bytes) -> np.ndarray:
        text = text if isinstance(text, str) else text.decode("utf-8")
        reduced = re.sub("[^A-Za-z]+", " ", text).lower().encode("ascii")
        codes = np.frombuffer(reduced, np.uint8).astype(np.int32)
        return np.where(codes == ord(" "), 0, codes - (ord("a") - 2)).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self._symbols[int(i)] for i in ids)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": ByteTokenizer, "letters": LetterTokenizer}


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name, or a ValueError with the nearest one."""
    return lookup(TOKENIZERS, name, "data.tokenizer")()
