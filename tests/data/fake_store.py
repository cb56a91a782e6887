"""What `hyjax.data.store.Store` offers, in memory: its documents lie in another order than their digests'."""

from pathlib import Path

import numpy as np

from hyjax.data.corpus import checksum
from hyjax.data.sources import Document
from hyjax.data.tokenizers import Tokenizer


class FakeStore:
    def __init__(self, texts: list[str], tokenizer: Tokenizer, path: Path = Path("nowhere")):
        written = [(Document("", text.encode()).digest, *tokenizer.encode_document(text.encode())) for text in texts]
        sizes = [len(text.encode()) for text in texts]
        lengths = np.array([len(ids) for _, ids, _ in written])
        order = sorted(range(len(texts)), key=lambda i: written[i][0])
        self.tokenizer, self.path, self.num_documents = tokenizer, path, len(texts)
        self.stream = np.concatenate([ids for _, ids, _ in written])
        self.digests = np.array([int.from_bytes(written[i][0][:8], "big") for i in order], np.uint64)
        self.starts = (np.cumsum(lengths) - lengths)[order]
        self.ends = np.cumsum(lengths[order])
        self.byte_ends = np.cumsum([sizes[i] - written[i][2] for i in order])
        self.checksum = checksum(self.stream, lengths)
        self.reads: list[tuple[int, int]] = []

    def read(self, start: int, length: int) -> np.ndarray:
        assert start >= 0 and length > 0 and start + length <= len(self.stream)
        self.reads.append((start, length))
        return self.stream[start : start + length]
