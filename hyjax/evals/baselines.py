"""What a model must beat on the same held-out documents: a trigram model and gzip, both in bits per byte.

The trigram model reads the training documents and predicts exactly the targets that the language model does (all
but each document's first token; an eos is predicted and stands for no byte), so the two figures compare. gzip knows
no training documents; it compresses the held-out text in one piece, first bytes included.
"""

import gzip

import numpy as np

from hyjax.data.build import Data
from hyjax.data.packing import Corpus


def baselines(data: Data) -> dict[str, float]:
    """{"trigram", "gzip"}: bits per byte on the held-out documents; {} where the data is no text."""
    train, heldout = data.train_corpus, data.heldout_corpus
    if train is None or heldout is None:
        return {}
    return {"trigram": trigram_bits_per_byte(train, heldout), "gzip": gzip_bits_per_byte(heldout)}


def trigram_bits_per_byte(train: Corpus, heldout: Corpus) -> float:
    """Bits per byte of a trigram model: interpolated Kneser-Ney, one discount d an order, down to uniform.

        p(c | ab) = (max(n(abc) - d, 0) + d · kinds(ab) · p(c | b)) / n(ab),    p(c | ab) = p(c | b) if n(ab) = 0

    kinds(ab) is the number of different c seen after ab; below the trigrams n(bc) counts the different left
    neighbours of bc, not its occurrences; d = n1 / (n1 + 2 n2) from the n-grams seen once and twice (Chen and
    Goodman 1999, section 2.7). A mark stands before a document, so that its second token has a context of two.
    """
    vocab = train.tokenizer.vocab_size
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
    return float(-np.log2(probability).sum() / heldout.num_bytes)


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


def gzip_bits_per_byte(corpus: Corpus) -> float:
    """`gzip -9` of the documents' text end to end, eos left out."""
    text = b"".join(corpus.tokenizer.decode(tokens).encode("utf-8") for tokens in corpus.documents())
    return 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)


def _trigrams(corpus: Corpus, base: int) -> np.ndarray:
    """int64 [num_targets], the code (a · base + b) · base + c of each target c after its two predecessors."""
    stream = corpus.stream.astype(np.int64)
    first = np.zeros(len(stream), bool)
    first[corpus.starts] = True
    before = np.roll(stream, 1)
    before[first] = base - 1
    before2 = np.roll(before, 1)
    return ((before2 * base + before) * base + stream)[~first]
