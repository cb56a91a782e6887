"""The trigram model and gzip, against slow forms and known answers."""

import gzip
import logging
from collections import Counter

import numpy as np
import pytest

from hyjax.data.corpus import Corpus
from hyjax.data.sources import Document, read_documents, split
from hyjax.data.tokenizers import get_tokenizer
from hyjax.evals import baselines as module
from hyjax.evals.baselines import baselines, gzip_bits_per_byte, trigram_bits_per_byte
from tests.data.settings import make, write_corpus, write_texts


def corpus_of(*texts, tokenizer="bytes"):
    return Corpus([Document(str(i), text.encode()) for i, text in enumerate(texts)], get_tokenizer(tokenizer))


def trigram(train, heldout):
    return trigram_bits_per_byte([train], [heldout])


def slow_probability(train, vocab):
    """The same model from dictionaries, a probability at a time: p(a, b) is the vector over the vocabulary."""
    grams = {3: Counter()}
    for document in train.documents():
        padded = [vocab, vocab, *document.tolist()]
        grams[3].update(tuple(padded[i - 2 : i + 1]) for i in range(3, len(padded)))
    for order in (2, 1):
        grams[order] = Counter(gram[1:] for gram in grams[order + 1])

    def p(context):
        lower = p(context[1:]) if context else np.full(vocab, 1 / vocab)
        order = len(context) + 1
        spectrum = Counter(grams[order].values())
        d = spectrum[1] / (spectrum[1] + 2 * spectrum[2]) if spectrum[1] and spectrum[2] else 0.5
        counts = np.array([grams[order][(*context, c)] for c in range(vocab)])
        if not counts.sum():
            return lower
        return (np.maximum(counts - d, 0) + d * (counts > 0).sum() * lower) / counts.sum()

    return p


def test_trigram_equals_the_slow_form_and_sums_to_one():
    documents = read_documents("topics")
    train = corpus_of(*(d.text[:300].decode(errors="ignore") for d in documents[:12]), tokenizer="letters")
    heldout = corpus_of(*(d.text[:80].decode(errors="ignore") for d in documents[12:16]), tokenizer="letters")
    p = slow_probability(train, 28)
    bits = 0.0
    for document in heldout.documents():
        padded = [28, *document.tolist()]
        for i in range(2, len(padded)):
            distribution = p((padded[i - 2], padded[i - 1]))
            assert abs(distribution.sum() - 1) < 1e-12
            bits -= np.log2(distribution[padded[i]])
    assert trigram(train, heldout) == pytest.approx(bits / heldout.num_bytes, rel=1e-12)


def test_trigram_of_text_it_knows_nothing_about():
    rng = np.random.default_rng(0)
    heldout = corpus_of("".join(rng.choice(list("qrst"), 4000)))
    learnt = trigram(corpus_of("".join(rng.choice(list("qrst"), 40000))), heldout)
    assert 1.99 < learnt < 2.05  # four letters at random: two bits
    assert trigram(corpus_of("a" * 1000), heldout) > 8


def test_trigram_counts_the_eos_in_bits_and_not_in_bytes():
    train = corpus_of(*["ab"] * 50)
    # Per document: b after a is all but certain, so is the end; one byte (b) is counted.
    assert trigram(train, corpus_of("ab")) == pytest.approx(trigram(train, corpus_of("ab", "ab")))
    assert trigram(train, corpus_of("ab")) < 0.2
    assert trigram(train, corpus_of("abb")) > 2


def test_gzip_is_of_the_text_without_eos():
    heldout = [corpus_of("the text " * 30, "another é text"), corpus_of("a third")]
    text = ("the text " * 30 + "another é text" + "a third").encode()
    assert module._text(heldout, 1000) == (text, True)
    assert module._text(heldout, len(text)) == (text, True)
    assert module._text(heldout, 280) == (text[:280], False)
    assert gzip_bits_per_byte(text) == 8 * len(gzip.compress(text, 9)) / len(text)


def test_of_topics_they_are_in_the_known_range():
    found = baselines(make(seq_len=256))
    assert set(found) == {"trigram", "gzip"}
    assert 2.3 < found["trigram"] < 3.1 and 2.2 < found["gzip"] < 2.9
    train, heldout = split(read_documents("topics"), 0.2)
    tokenizer = get_tokenizer("bytes")
    assert found["trigram"] == trigram(Corpus(train, tokenizer), Corpus(heldout, tokenizer))


def test_of_a_corpus_on_disk_they_are_those_of_its_texts(tmp_path):
    texts = write_texts(tmp_path / "texts")
    corpus = write_corpus(tmp_path / "corpus", texts)
    found = baselines(make(source="corpus", path=str(corpus)))
    assert found == baselines(make(source="text", path=str(texts))) and set(found) == {"trigram", "gzip"}


def test_of_a_mixture_all_sources_count(tmp_path):
    texts = write_texts(tmp_path / "texts")
    mixed = make(source="mixture", mixture=("topics", f"text:{texts}"), weights=(1, 1))
    topics, words = make(), make(source="text", path=str(texts))
    train, heldout = ([*getattr(topics, side), *getattr(words, side)] for side in ("train_corpora", "heldout_corpora"))
    # The documents as one corpus: n-grams never cross documents, so where they lie doesn't matter.
    joined = []
    for corpora in (train, heldout):
        texts = [corpus.tokenizer.decode(ids) for corpus in corpora for ids in corpus.documents()]
        joined.append(corpus_of(*texts))
    assert baselines(mixed)["trigram"] == pytest.approx(trigram(*joined), rel=1e-12)


def test_large_corpora_have_fewer_and_say_so(caplog):
    with caplog.at_level(logging.WARNING):
        found = baselines(make(), trigram_tokens=300_000, gzip_bytes=10_000)
    assert "no trigram baseline: it counts at most 300,000 tokens, not 3" in caplog.text
    assert list(found) == ["gzip of the first 10,000 bytes"] and 2 < found["gzip of the first 10,000 bytes"] < 4
    assert set(baselines(make(), gzip_bytes=10_000)) == {"trigram", "gzip of the first 10,000 bytes"}


def test_no_baselines_where_there_is_no_text():
    assert baselines(make(source="recall", seq_len=8)) == {}
