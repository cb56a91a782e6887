"""Documents as one stream of tokens, in memory or on disk: what packing reads.

A stream has places, counted from `start`; document d lies from where the one before it ends (the first from `start`)
up to ends[d], its eos included. What is read lies within one document. A corpus on disk keeps its documents in the
order in which they were written; its *stream* is in the order of the documents' digests, as `sources.split` sorts those
in memory. So one set of documents gives the same rows from both homes, and the held-out side is the head of the order.
"""

import hashlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import batched

import numpy as np

from hyjax.data.sources import Document, workable
from hyjax.data.store import Store
from hyjax.data.tokenizers import Tokenizer

BATCH = 256  # documents that are tokenized at a time
CHUNK = 2**20  # tokens that are widened at a time for a checksum


class TokenStream(ABC):
    """What a corpus in memory and a side of one on disk have in common.

    tokenizer   of its ids
    start       place of the first token
    ends        int64 [num_documents], the place behind each document's last token; perhaps mapped from a file
    num_bytes   bytes of text that the targets stand for: all but each document's first token; an eos stands for none
                (its loss does count in bits per byte, which so errs against the model, by under
                (bits of an eos) / (bytes of a document))
    checksum    sha256 in hex, of the tokens and the documents' edges
    """

    tokenizer: Tokenizer
    start: int
    ends: np.ndarray
    num_bytes: int

    @property
    @abstractmethod
    def checksum(self) -> str: ...

    @abstractmethod
    def read(self, start: int, length: int) -> np.ndarray:
        """The ids [length] from place `start` on, in any integer type; they lie within one document."""

    @property
    def num_documents(self) -> int:
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1]) - self.start

    @property
    def num_targets(self) -> int:
        """Sum of the weights of one pass."""
        return self.num_tokens - self.num_documents

    def documents(self) -> Iterator[np.ndarray]:
        """The ids of each document, eos included."""
        start = self.start
        for end in self.ends:
            yield self.read(start, int(end) - start)
            start = int(end)


class Corpus(TokenStream):
    """A stream in memory: `stream` [num_tokens], the tokenizer's ids in the narrowest unsigned type."""

    start = 0

    def __init__(self, documents: Iterable[Document], tokenizer: Tokenizer):
        dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        parts, self.num_bytes = [], 0
        for some in batched((document.text for document in documents), BATCH):
            for text, (ids, first_bytes) in zip(some, tokenizer.encode_documents(some), strict=True):
                if len(ids):
                    parts.append(ids.astype(dtype))
                    self.num_bytes += len(text) - first_bytes
        if not parts:
            raise ValueError(f"the {tokenizer.name!r} tokenizer finds no token in these documents")
        self.tokenizer = tokenizer
        self.stream = np.concatenate(parts)
        self.ends = np.cumsum([len(part) for part in parts])

    @cached_property
    def checksum(self) -> str:
        return checksum(self.stream, self.ends)

    def read(self, start: int, length: int) -> np.ndarray:
        return self.stream[start : start + length]


class StoredCorpus(TokenStream):
    """Documents `first` to `last` - 1, in order of the digest, of a corpus on disk; nothing of it is loaded.

    folder   of the corpus, where what is derived from it may be kept
    """

    def __init__(self, store: Store, first: int, last: int):
        self.tokenizer, self.folder, self.first = store.tokenizer, store.path, first
        # Plain arrays over the mapped files: a memmap makes every slice dear.
        self.ends = np.asarray(store.ends)[first:last]
        self._starts = np.asarray(store.starts)[first:last]
        self.start = int(store.ends[first - 1]) if first else 0
        self.num_bytes = int(store.byte_ends[last - 1]) - (int(store.byte_ends[first - 1]) if first else 0)
        self._store = store

    @property
    def checksum(self) -> str:
        """Of the whole corpus: with it, the side is told by the number of its documents."""
        return self._store.checksum

    def read(self, start: int, length: int) -> np.ndarray:
        document = int(np.searchsorted(self.ends, start, side="right"))
        begins = int(self.ends[document - 1]) if document else self.start
        return self._store.read(int(self._starts[document]) + start - begins, length)


def sides(store: Store, heldout: float) -> tuple[StoredCorpus, StoredCorpus]:
    """(train, heldout) of a corpus on disk, by the rule of `sources.split`: digest / 2**64 below `heldout`."""
    if not 0.0 < heldout < 1.0:
        raise ValueError(f"data.heldout={heldout} must be a fraction of the documents between 0 and 1")
    digests = np.asarray(store.digests)
    size = len(digests)
    count = bisect_left(range(size), True, key=lambda place: int(digests[place]) / 2**64 >= heldout)
    if count in (0, size):
        side = "to train on" if count else "to hold out"
        hint = workable([int(digests[place]) / 2**64 for place in (0, -1)])
        raise ValueError(f"data.heldout={heldout} leaves none of {size} documents {side}: {hint}")
    return StoredCorpus(store, count, size), StoredCorpus(store, 0, count)


def checksum(*arrays: np.ndarray) -> str:
    """sha256 of whole numbers, the same on every machine and for every width of them."""
    digest = hashlib.sha256()
    for array in arrays:
        flat = array.reshape(-1)
        for at in range(0, len(flat), CHUNK):
            digest.update(np.ascontiguousarray(flat[at : at + CHUNK].astype("<i8")).data)
    return digest.hexdigest()
