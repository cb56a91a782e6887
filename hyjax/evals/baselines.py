"""What a model must beat on the same held-out documents: a trigram model and gzip, both in bits per byte.

The trigram model reads the training documents and predicts exactly the targets that the language model does (all
but each document's first token; an eos is predicted and stands for no byte), so the two figures compare. gzip knows
no training documents; it compresses the held-out text in one piece, first bytes included. Of a mixture, the documents
of all sources are read, whatever their weights.

Both are for corpora that fit into memory many times over. Of more held-out text than gzip reads in seconds, it reads
the beginning, and the figure's name says so; more tokens than can be counted in memory have no trigram figure.
"""

import gzip
import logging
from collections.abc import Sequence

import numpy as np

from hyjax.data.build import Data
from hyjax.data.corpus import TokenStream

log = logging.getLogger(__name__)

TRIGRAM_TOKENS = 2**25  # whose trigrams are counted: 8 bytes each, and about four times that to sort them
GZIP_BYTES = 2**25


def baselines(data: Data, *, trigram_tokens: int = TRIGRAM_TOKENS, gzip_bytes: int = GZIP_BYTES) -> dict[str, float]:
    """{"trigram", "gzip"}: bits per byte on the held-out documents; {} where the data is no text.

    "trigram" is left out, and a line of the log says so, where either side has more than trigram_tokens; "gzip" is
    "gzip of the first N bytes" where there is more held-out text than gzip_bytes.
    """
    train, heldout = data.train_corpora, data.heldout_corpora
    if not train:
        return {}
    result = {}
    most = max(sum(corpus.num_tokens for corpus in side) for side in (train, heldout))
    if most <= trigram_tokens:
        result["trigram"] = trigram_bits_per_byte(train, heldout)
    else:
        log.warning("no trigram baseline: it counts at most %s tokens, not %s", f"{trigram_tokens:,}", f"{most:,}")
    text, whole = _text(heldout, gzip_bytes)
    result["gzip" if whole else f"gzip of the first {len(text):,} bytes"] = gzip_bits_per_byte(text)
    return result


def trigram_bits_per_byte(train: Sequence[TokenStream], heldout: Sequence[TokenStream]) -> float:
    """Bits per byte of a trigram model: interpolated Kneser-Ney, one discount d an order, down to uniform.

        p(c | ab) = (max(n(abc) - d, 0) + d · kinds(ab) · p(c | b)) / n(ab),    p(c | ab) = p(c | b) if n(ab) = 0

    kinds(ab) is the number of different c seen after ab; below the trigrams n(bc) counts the different left
    neighbours of bc, not its occurrences; d = n1 / (n1 + 2 n2) from the n-grams seen once and twice (Chen and
    Goodman 1999, section 2.7). A mark stands before a document, so that its second token has a context of two.
    """
    vocab = train[0].tokenizer.vocab_size
    base = vocab + 1  # the mark is `vocab`
    if base**3 > 2**63:
        raise ValueError(f"a vocabulary of {vocab} is too large for trigram codes of 64 bits")
    seen, counts = np.unique(_trigrams(train, base), return_counts=True)
    orders = [(seen, counts)]
    for power in (2, 1):  # drop the oldest token: each different longer n-gram counts once
        orders.append(np.unique(orders[-1][0] % base**power, return_counts=True))
    asked = _trigrams(heldout, base)
    probability = np.full(len(asked), 1 / vocab)
    for order, (grams, counts) in zip((1, 2, 3), reversed(orders), strict=True):
        probability = _interpolate(grams, counts, asked % base**order, base, probability)
    return float(-np.log2(probability).sum() / sum(corpus.num_bytes for corpus in heldout))


def _interpolate(grams: np.ndarray, counts: np.ndarray, asked: np.ndarray, base: int, lower: np.ndarray) -> np.ndarray:
    """One order of the formula above; `grams` are sorted codes, the context is code // base."""
    once, twice = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    discount = once / (once + 2 * twice) if once and twice else 0.5
    contexts, first = np.unique(grams // base, return_index=True)
    total = _find(contexts, np.add.reduceat(counts, first), asked // base)
    kinds = _find(contexts, np.diff(np.append(first, len(grams))), asked // base)
    count = _find(grams, counts, asked)
    mixed = (np.maximum(count - discount, 0) + discount * kinds * lower) / np.maximum(total, 1)
    return np.where(total > 0, mixed, lower)


def _find(keys: np.ndarray, values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The value of each asked key, 0 where it is not among the sorted keys."""
    at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[at] == asked, values[at], 0)


def gzip_bits_per_byte(text: bytes) -> float:
    """`gzip -9` of it."""
    return 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)


def _text(corpora: Sequence[TokenStream], most: int) -> tuple[bytes, bool]:
    """(the documents' text end to end, eos left out, up to `most` bytes; whether that is all of it)."""
    parts, size = [], 0
    for corpus in corpora:
        for tokens in corpus.documents():
            if size > most:
                break
            parts.append(corpus.tokenizer.decode(tokens).encode("utf-8"))
            size += len(parts[-1])
    return b"".join(parts)[:most], size <= most


def _trigrams(corpora: Sequence[TokenStream], base: int) -> np.ndarray:
    """int64 [num_targets], the code (a · base + b) · base + c of each target c after its two predecessors."""
    codes = []
    for corpus in corpora:
        stream = np.concatenate(list(corpus.documents())).astype(np.int64)
        first = np.zeros(len(stream), bool)
        first[np.append(corpus.start, corpus.ends[:-1]) - corpus.start] = True
        before = np.roll(stream, 1)
        before[first] = base - 1
        before2 = np.roll(before, 1)
        codes.append(((before2 * base + before) * base + stream)[~first])
    return np.concatenate(codes)
