"""From documents to rows of a fixed length: which pieces make a row, and one function that makes it.

Every document is its tokens and, where the tokenizer has one, an eos. A *piece* is a run of consecutive tokens of
one document; a row is a few pieces side by side, then padding. In both packings a token of a document that has
a predecessor is a target with weight 1 exactly once a pass, and nothing else is: the weights of one pass sum to

    tokens - documents      (the first token of a document is given, not predicted; its eos is predicted)

* `windows`: the documents one after the other, cut every seq_len tokens wherever that falls. Inputs are
  stream[i T : (i+1) T] and targets one further, so that windows share one token: the last target of a window is
  the first input of the next. A document's last token is an input whose target has weight 0. Nothing is computed
  before a row is asked for.
* `best_fit`: only a document longer than a row is cut. Pieces, longest first, go to the row with the least room
  that still holds them (best-fit decreasing, `hyjax.data.best_fit`). A document's last token is a target only, never
  an input.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from hyjax.config.errors import lookup
from hyjax.data.best_fit import best_fit
from hyjax.data.corpus import TokenStream

Row = dict[str, np.ndarray]


class Index(Protocol):
    """The pieces of each row, int64 [n, 2]: (start, length) in the stream, none across a document's edge."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> np.ndarray: ...


class Windows:
    """Every window of seq_len inputs over the stream; the last one is shorter."""

    def __init__(self, corpus: TokenStream, seq_len: int):
        self.start, self.ends, self.seq_len = corpus.start, corpus.ends, seq_len
        self.stop = corpus.start + corpus.num_tokens - 1  # the last token of all has nothing to predict

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.seq_len)

    def __getitem__(self, row: int) -> np.ndarray:
        start = self.start + row * self.seq_len
        stop = min(start + self.seq_len, self.stop)
        first, last = np.searchsorted(self.ends, [start + 1, stop])  # documents that end inside
        edges = np.array([start, *self.ends[first:last], stop])
        return np.stack([edges[:-1], np.diff(edges)], axis=1)


PACKINGS: dict[str, Callable[[TokenStream, int], Index]] = {"windows": Windows, "best_fit": best_fit}


def build_row(corpus: TokenStream, pieces: np.ndarray, seq_len: int) -> Row:
    """The one place where positions, segment ids and the loss mask are made, from the same pieces.

    Args: pieces int64 [n, 2], (start, length) in the stream, no piece across a document's edge.

    Returns tokens, targets, positions, segment_ids int32 [T] and weights float32 [T]. Positions count from 0 in
    every piece (what came before it is not visible), segments are 1, 2, ...; padding is 0 everywhere. The weight is
    1 where the target is the next token of the same document.
    """
    row = {key: np.zeros(seq_len, np.int32) for key in ("tokens", "targets", "positions", "segment_ids")}
    row["weights"] = np.zeros(seq_len, np.float32)
    document_ends = corpus.ends[np.searchsorted(corpus.ends, pieces[:, 0], side="right")]
    at = 0
    for segment, ((start, length), end) in enumerate(zip(pieces.tolist(), document_ends.tolist(), strict=True), 1):
        ids = corpus.read(start, min(length + 1, end - start))
        stop, targets = at + length, len(ids) - 1  # all of the piece have one, but a document's last token
        row["tokens"][at:stop] = ids[:length]
        row["targets"][at : at + targets] = ids[1:]
        row["weights"][at : at + targets] = 1
        row["positions"][at:stop] = np.arange(length)
        row["segment_ids"][at:stop] = segment
        at = stop
    return row


class PackedText:
    """Rows of a stream by number: what the loader shuffles."""

    def __init__(self, corpus: TokenStream, packing: str, seq_len: int):
        if seq_len < 1:
            raise ValueError(f"data.seq_len={seq_len} must be at least 1")
        pack = lookup(PACKINGS, packing, "data.packing")
        self.corpus, self.seq_len = corpus, seq_len
        self.index = pack(corpus, seq_len)
        if not len(self.index):
            raise ValueError(f"{corpus.num_documents} documents of one token each hold nothing to predict")

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, row: int) -> Row:
        return build_row(self.corpus, self.index[row], self.seq_len)

    @property
    def num_targets(self) -> int:
        return self.corpus.num_targets

    @property
    def num_bytes(self) -> int:
        return self.corpus.num_bytes

    @property
    def checksum(self) -> str:
        return self.corpus.checksum
