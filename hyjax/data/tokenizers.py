"""Text to ids and back: bytes, letters, and any file of the `tokenizers` library.

name              for people; of a file, its kind and the start of its sha256
vocab_size        number of ids
eos               id that ends a document, or None where documents just end
identity          {name, sha256 of the file or "", eos}: equal identities give equal ids
encode            str or UTF-8 bytes -> int32 [n]; no eos, and no other token that the text does not hold
decode            ids -> str; special tokens and the eos are left out
encode_document   UTF-8 bytes -> (int32 [n], eos included, first_bytes)
encode_documents  the same of many at once, which is quicker

A document's first token is given, not predicted. `first_bytes` are the bytes of text that are given with it, so that
`len(text) - first_bytes` is what the predicted tokens stand for, and "bits per byte" divides by it. A text that holds
no token gives no eos either: it is no document.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hyjax.config.errors import lookup, near, show

# Names that end a document in well-known vocabularies, tried in this order; two of them in one file are ambiguous.
END_MARKS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_document|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)

Encoded = tuple[np.ndarray, int]  # ids of a document, and first_bytes


class Tokenizer(Protocol):
    """What corpora, the loader, the samples and the baselines ask of a tokenizer."""

    name: str
    vocab_size: int
    eos: int | None

    @property
    def identity(self) -> dict[str, Any]: ...

    def encode(self, text: str | bytes) -> np.ndarray: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def encode_document(self, text: bytes) -> Encoded: ...

    def encode_documents(self, texts: Sequence[bytes]) -> list[Encoded]: ...


class _Plain:
    """What the tokenizers without a file share."""

    name: str
    eos: int | None = None

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": "", "eos": self.eos}

    def encode_document(self, text: bytes) -> Encoded:
        raise NotImplementedError

    def encode_documents(self, texts: Sequence[bytes]) -> list[Encoded]:
        return [self.encode_document(text) for text in texts]


class ByteTokenizer(_Plain):
    """The 256 bytes of UTF-8 text and an end of document (256)."""

    name = "bytes"
    vocab_size = 257
    eos: int | None = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_document(self, text: bytes) -> Encoded:
        ids = np.full(len(text) + 1 if text else 0, 256, np.int32)
        ids[: len(text)] = np.frombuffer(text, np.uint8)
        return ids, min(1, len(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Ids above 255 are dropped; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= int(i) < 256).decode("utf-8", errors="replace")


class LetterTokenizer(_Plain):
    """Space (0), `<unk>` (1), a to z (2 to 27): every run of anything else becomes one space, lower case.

    `encode` never gives `<unk>`; the id is there because the vocabulary of 28 is. A document has no end mark.
    A predicted token counts as one byte: bits per byte are bits per character of the reduced text.
    """

    name = "letters"
    vocab_size = 28
    _symbols = (" ", "<unk>", *"abcdefghijklmnopqrstuvwxyz")

    def encode(self, text: str | bytes) -> np.ndarray:
        text = text if isinstance(text, str) else text.decode("utf-8")
        reduced = re.sub("[^A-Za-z]+", " ", text).lower().encode("ascii")
        codes = np.frombuffer(reduced, np.uint8).astype(np.int32)
        return np.where(codes == ord(" "), 0, codes - (ord("a") - 2)).astype(np.int32)

    def encode_document(self, text: bytes) -> Encoded:
        ids = self.encode(text)
        return ids, len(text) - max(0, len(ids) - 1)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self._symbols[int(i)] for i in ids)


class FileTokenizer:
    """A JSON file of the `tokenizers` library.

    Text is text: a special token's name that stands in it is encoded as the characters it is made of, so no document
    can hold an eos. The file's own beginnings and ends of text, truncation, padding and dropout are left out.

    Args:
      path: the file.
      eos: the token that ends a document; "" finds one of END_MARKS.

    Raises ValueError: no such file, no tokenizer, no such eos, or none or several of the well-known ones.
    """

    def __init__(self, path: str | Path, eos: str = ""):
        try:
            content = Path(path).expanduser().read_bytes()
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"the tokenizer {show(str(path))} can't be read: {reason}") from error
        self._load(content, str(path))
        self.eos_token = eos or self._well_known(str(path))
        found = self._tokenizer.token_to_id(self.eos_token)
        if found is None:
            raise ValueError(f"data.eos={show(eos)} is no token of {path}{self._special()}{near(eos, self._names)}")
        self.eos: int | None = found

    def _load(self, content: bytes, where: str) -> None:
        # One thread: the library's own threads and a process that forks don't go together, and corpora are encoded
        # by one process a core. Whoever has set the variable keeps what it says.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        self.content = content
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
            settings = json.loads(content)
        except Exception as error:  # the library raises no narrower type
            raise ValueError(f"{where} is no file of the `tokenizers` library: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.post_processor = None
        tokenizer.encode_special_tokens = True
        if getattr(tokenizer.model, "dropout", None) is not None:
            tokenizer.model.dropout = None
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._names = [token.content for token in added if token.special]
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids) + 1
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.name = f"{settings['model'].get('type', 'tokenizer')}-{self.sha256[:8]}"
        self._token_bytes = self._byte_level(settings) if len(self._names) == len(added) else None

    def _byte_level(self, settings: dict[str, Any]) -> np.ndarray | None:
        """Bytes that each id stands for, where they are the token's letters: byte-level, with nothing normalised."""
        pre = settings.get("pre_tokenizer") or {}
        steps = [pre, *pre.get("pretokenizers", ())]
        level = [step for step in steps if step.get("type") == "ByteLevel"]
        marks = ("continuing_subword_prefix", "end_of_word_suffix")  # letters of a token that are none of the text
        if not level or level[0].get("add_prefix_space") or any(settings["model"].get(mark) for mark in marks):
            return None
        if settings.get("normalizer") is not None:
            return None
        sizes = np.zeros(self.vocab_size, np.int64)
        for token, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            sizes[number] = len(token)
        return sizes

    def _well_known(self, where: str) -> str:
        known = [name for name in END_MARKS if self._tokenizer.token_to_id(name) is not None]
        if len(known) == 1:
            return known[0]
        what = f"{len(known)} tokens that may end" if known else "no well-known token that ends"
        raise ValueError(f"{where} has {what} a document: name one with data.eos (--eos){self._special()}")

    def _special(self) -> str:
        return f"; its special tokens are {' '.join(self._names[:20])}" if self._names else "; it has no special token"

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": self.sha256, "eos": self.eos}

    def encode(self, text: str | bytes) -> np.ndarray:
        text = text if isinstance(text, str) else text.decode("utf-8")
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_document(self, text: bytes) -> Encoded:
        return self.encode_documents([text])[0]

    def encode_documents(self, texts: Sequence[bytes]) -> list[Encoded]:
        strings = [text.decode("utf-8") for text in texts]
        sizes, results = self._token_bytes, []
        # Offsets cost a third of the time, and a byte-level token's size is known without them.
        batch = self._tokenizer.encode_batch if sizes is None else self._tokenizer.encode_batch_fast
        for string, encoding in zip(strings, batch(strings, add_special_tokens=False), strict=True):
            ids = np.array([*encoding.ids, self.eos] if len(encoding) else [], np.int32)
            if not ids.size:
                first = 0
            elif sizes is not None:
                first = int(sizes[ids[0]])
            else:
                first = _first_bytes(string, encoding.offsets)
            results.append((ids, first))
        return results

    def decode(self, ids: Iterable[int]) -> str:
        kept = [i for i in map(int, ids) if 0 <= i < self.vocab_size and i != self.eos]
        return self._tokenizer.decode(kept, skip_special_tokens=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"content": self.content, "eos": self.eos, "eos_token": self.eos_token}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._load(state["content"], self.__class__.__name__)
        self.eos, self.eos_token = state["eos"], state["eos_token"]


def _first_bytes(text: str, offsets: Sequence[tuple[int, int]]) -> int:
    """Bytes up to the end of the first token, by the tokens' (start, end) in characters.

    A character may be cut into several tokens, each with the whole character as its place: it is shared equally,
    which is exact where each of them is a byte.
    """
    end = offsets[0][1]
    sharing = 1
    while sharing < len(offsets) and offsets[sharing][0] < end:
        sharing += 1
    size = len(text[:end].encode("utf-8"))
    return size if sharing == 1 else max(1, round(size / sharing))


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": ByteTokenizer, "letters": LetterTokenizer}


def get_tokenizer(name: str, eos: str = "") -> Tokenizer:
    """The tokenizer of that name, or of that JSON file; "auto", where no corpus brings its own, is bytes.

    Raises ValueError with one sentence: an unknown name (the nearest is told), an eos for a tokenizer without a file,
    and what `FileTokenizer` raises.
    """
    if name.endswith(".json"):
        return FileTokenizer(name, eos)
    if name == "auto":
        name = "bytes"
    if name not in TOKENIZERS and ("/" in name or "." in name):
        raise ValueError(f"data.tokenizer is {show(name)}: a file of the `tokenizers` library ends in .json")
    tokenizer = lookup(TOKENIZERS, name, "data.tokenizer")()
    if eos:
        end = "ends documents with its own id" if tokenizer.eos is not None else "has no end of document"
        raise ValueError(f"data.eos={show(eos)} names a token of a `tokenizers` file, but {name!r} {end}")
    return tokenizer
