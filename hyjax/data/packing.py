"""From documents to rows of a fixed length: one stream of tokens, an index of pieces, one function for a row.

Every document is its tokens and, where the tokenizer has one, an eos. A *piece* is a run of consecutive tokens of
one document; a row is a few pieces side by side, then padding. In both packings a token of a document that has
a predecessor is a target with weight 1 exactly once a pass, and nothing else is: the weights of one pass sum to

    tokens - documents      (the first token of a document is given, not predicted; its eos is predicted)

* `windows`: the documents one after the other, cut every seq_len tokens wherever that falls. Inputs are
  stream[i T : (i+1) T] and targets one further, so that windows share one token: the last target of a window is
  the first input of the next. A document's last token is an input whose target has weight 0.
* `best_fit`: only a document longer than a row is cut. Pieces, longest first, go to the row with the least room
  that still holds them (best-fit decreasing). A document's last token is a target only, never an input.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np

from hyjax.config.errors import lookup
from hyjax.data.sources import Document
from hyjax.data.tokenizers import Tokenizer

Row = dict[str, np.ndarray]


class Corpus:
    """Documents as one stream of tokens.

    stream  [num_tokens], the tokenizer's ids in the narrowest unsigned type
    ends    int64 [num_documents], where each document ends in the stream (exclusive)
    """

    def __init__(self, documents: Iterable[Document], tokenizer: Tokenizer):
        dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        end_mark = np.array([] if tokenizer.eos is None else [tokenizer.eos], dtype)
        parts = [tokenizer.encode(document.text).astype(dtype) for document in documents]
        parts = [np.concatenate([part, end_mark]) for part in parts if part.size]
        if not parts:
            raise ValueError(f"the {tokenizer.name!r} tokenizer finds no token in these documents")
        self.tokenizer = tokenizer
        self.stream = np.concatenate(parts)
        self.ends = np.cumsum([len(part) for part in parts])

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], self.ends[:-1]])

    @property
    def num_documents(self) -> int:
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        return len(self.stream)

    @property
    def num_targets(self) -> int:
        """Sum of the weights of one pass."""
        return self.num_tokens - self.num_documents

    @property
    def num_bytes(self) -> int:
        """Bytes of text that the targets stand for: all but each document's first token; an eos stands for none.

        The loss of an eos does count in bits per byte, so that the figure errs against the model, by under
        (bits of an eos) / (bytes of a document).
        """
        size = self.tokenizer.token_bytes
        counts = np.bincount(self.stream, minlength=len(size))
        return int(counts @ size - size[self.stream[self.starts]].sum())

    def documents(self) -> list[np.ndarray]:
        """The tokens of each document, eos included."""
        return np.split(self.stream, self.ends[:-1])


class PackIndex:
    """Which pieces make which row: row r has the pieces first[r] to first[r+1], each (start, length) in the stream."""

    def __init__(self, rows: Sequence[Sequence[tuple[int, int]]]):
        self.first = np.cumsum([0] + [len(row) for row in rows])
        self.pieces = np.array([piece for row in rows for piece in row], np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.pieces[self.first[row] : self.first[row + 1]]


def windows(corpus: Corpus, seq_len: int) -> PackIndex:
    """Every window of seq_len inputs over the stream; the last one is shorter."""
    inputs = corpus.num_tokens - 1  # the last token of all has nothing to predict
    edges = np.union1d(np.arange(0, inputs, seq_len), corpus.starts[corpus.starts < inputs])
    lengths = np.diff(np.append(edges, inputs))
    rows: list[list[tuple[int, int]]] = [[] for _ in range(-(-inputs // seq_len))]
    for start, length in zip(edges.tolist(), lengths.tolist(), strict=True):
        rows[start // seq_len].append((start, length))
    return PackIndex(rows)


def best_fit(corpus: Corpus, seq_len: int) -> PackIndex:
    """Pieces of at most seq_len inputs in as few rows as best-fit decreasing finds."""
    pieces = [
        (start, min(seq_len, end - 1 - start))
        for first, end in zip(corpus.starts.tolist(), corpus.ends.tolist(), strict=True)
        for start in range(first, end - 1, seq_len)
    ]
    rows: list[list[tuple[int, int]]] = []
    room: list[tuple[int, int]] = []  # (free places, row), sorted
    for start, length in sorted(pieces, key=lambda piece: -piece[1]):
        at = bisect_left(room, (length, -1))
        if at < len(room):
            free, row = room.pop(at)
        else:
            free, row = seq_len, len(rows)
            rows.append([])
        rows[row].append((start, length))
        if free > length:
            insort(room, (free - length, row))
    return PackIndex(rows)


PACKINGS = {"windows": windows, "best_fit": best_fit}


def build_row(corpus: Corpus, pieces: np.ndarray, seq_len: int) -> Row:
    """The one place where positions, segment ids and the loss mask are made, from the same pieces.

    Args: pieces int64 [n, 2], (start, length) in the stream, no piece across a document's edge.

    Returns tokens, targets, positions, segment_ids int32 [T] and weights float32 [T]. Positions count from 0 in
    every piece (what came before it is not visible), segments are 1, 2, ...; padding is 0 everywhere. The weight is
    1 where the target is the next token of the same document.
    """
    starts, lengths = pieces[:, 0], pieces[:, 1]
    used = int(lengths.sum())
    within = np.arange(used) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    at = np.repeat(starts, lengths) + within
    document_end = corpus.ends[np.searchsorted(corpus.ends, starts, side="right")]
    has_next = at + 1 < np.repeat(document_end, lengths)
    row = {key: np.zeros(seq_len, np.int32) for key in ("tokens", "targets", "positions", "segment_ids")}
    row["weights"] = np.zeros(seq_len, np.float32)
    row["tokens"][:used] = corpus.stream[at]
    row["targets"][:used] = np.where(has_next, corpus.stream[np.where(has_next, at + 1, at)], 0)
    row["weights"][:used] = has_next
    row["positions"][:used] = within
    row["segment_ids"][:used] = np.repeat(np.arange(1, len(pieces) + 1), lengths)
    return row


class PackedText:
    """Rows of a corpus by number: what the loader shuffles."""

    def __init__(self, corpus: Corpus, packing: str, seq_len: int):
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
    def content(self) -> tuple[np.ndarray, ...]:
        return self.corpus.stream, self.corpus.ends
