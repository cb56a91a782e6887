"""Rows: positions, segments and the loss mask against a token-by-token account of the documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.data.packing import PACKINGS, Corpus, PackedText
from hyjax.data.sources import Document
from hyjax.data.tokenizers import get_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def corpus_of(texts: list[str], tokenizer: str = "bytes") -> Corpus:
    return Corpus([Document(str(i), text.encode()) for i, text in enumerate(texts)], get_tokenizer(tokenizer))


def rows_of(texts: list[str], packing: str, seq_len: int, tokenizer: str = "bytes"):
    packed = PackedText(corpus_of(texts, tokenizer), packing, seq_len)
    return packed, [packed[i] for i in range(len(packed))]


texts_strategy = st.lists(st.text(LETTERS, min_size=1, max_size=40), min_size=1, max_size=12)


@pytest.mark.parametrize("tokenizer", ["bytes", "letters"])
@pytest.mark.parametrize("packing", list(PACKINGS))
@settings(deadline=None, max_examples=60)
@given(texts=texts_strategy, seq_len=st.integers(1, 20))
def test_every_target_once_and_nothing_across_documents(packing, tokenizer, texts, seq_len):
    # Letter i of document d is unlike the same letter elsewhere only by where it stands: count (document, place).
    corpus = corpus_of(texts, tokenizer)
    if corpus.num_targets == 0:
        return
    packed, rows = rows_of(texts, packing, seq_len, tokenizer)
    places = np.concatenate([[(d, i) for i in range(len(doc))] for d, doc in enumerate(corpus.documents())])
    predicted = []
    for number, row in enumerate(rows):
        at = np.concatenate([np.arange(s, s + n) for s, n in packed.index[number]])
        used = len(at)
        assert (row["segment_ids"][used:] == 0).all() and (row["segment_ids"][:used] > 0).all()
        for key in ("tokens", "targets", "weights", "positions"):
            assert row[key].shape == (seq_len,) and (row[key][used:] == 0).all()
        document, place = places[at].T
        np.testing.assert_array_equal(row["tokens"][:used], corpus.stream[at])
        # A segment is one document, read on without a gap; segments count 1, 2, ... and positions restart in each.
        new = np.append(True, (np.diff(document) != 0) | (np.diff(place) != 1))
        np.testing.assert_array_equal(row["segment_ids"][:used], np.cumsum(new))
        np.testing.assert_array_equal(row["positions"][:used] == 0, new)
        same = ~new[1:]
        assert (np.diff(row["positions"][:used])[same] == 1).all()
        for i in range(used):
            if row["weights"][i]:
                target = (int(document[i]), int(place[i]) + 1)
                assert row["targets"][i] == corpus.documents()[target[0]][target[1]]
                predicted.append(target)
            else:
                assert row["targets"][i] == 0
    expected = [(int(d), int(i)) for d, i in places if i > 0]
    assert sorted(predicted) == expected
    assert sum(row["weights"].sum() for row in rows) == packed.num_targets == len(places) - len(texts)


def test_windows_share_one_token():
    corpus = corpus_of(["abcdefg", "hi", "jklm"])
    _, rows = rows_of(["abcdefg", "hi", "jklm"], "windows", 4)
    stream = corpus.stream
    assert len(rows) == 4  # 16 tokens, 15 of them inputs
    np.testing.assert_array_equal(np.concatenate([row["tokens"] for row in rows])[:15], stream[:15])
    np.testing.assert_array_equal(rows[1]["tokens"], [*b"efg", 256])
    np.testing.assert_array_equal(rows[1]["weights"], [1, 1, 1, 0])
    np.testing.assert_array_equal(rows[2]["tokens"], [*b"hi", 256, *b"j"])
    np.testing.assert_array_equal(rows[2]["targets"], [*b"i", 256, 0, *b"k"])
    np.testing.assert_array_equal(rows[2]["weights"], [1, 1, 0, 1])
    np.testing.assert_array_equal(rows[2]["segment_ids"], [1, 1, 1, 2])
    np.testing.assert_array_equal(rows[2]["positions"], [0, 1, 2, 0])
    np.testing.assert_array_equal(rows[3]["segment_ids"], [1, 1, 1, 0])


def test_document_edges_mid_row_on_the_edge_and_of_length_one():
    """The three boundaries at which recurrences leaked elsewhere: each starts a segment at position 0."""
    for texts, starts in [(["abcde", "fgh"], [0, 6]), (["abc", "fgh"], [0, 4]), (["abc", "f", "g"], [0, 4, 6])]:
        _, rows = rows_of(texts, "windows", 4)
        flat = {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
        for start in starts:
            assert flat["positions"][start] == 0
            if start % 4:
                assert flat["segment_ids"][start] == flat["segment_ids"][start - 1] + 1
                assert flat["weights"][start - 1] == 0


def test_best_fit_splits_only_long_documents_and_fills_rows():
    rng = np.random.default_rng(0)
    texts = ["x" * n for n in rng.integers(1, 60, 300)] + ["y" * 150]
    packed, rows = rows_of(texts, "best_fit", 64)
    lengths = packed.index.pieces[:, 1]
    # n letters and an eos are n inputs: whole documents, and the long one as 64 + 64 + 22.
    assert sorted(lengths) == sorted([len(text) for text in texts[:-1]] + [64, 64, 22])
    filled = sum(row["weights"].sum() for row in rows) / (64 * len(rows))
    assert len(rows) <= -(-lengths.sum() // 64) * 1.05 and filled > 0.95


def test_bytes_that_targets_stand_for():
    assert corpus_of(["abc", "de"]).num_bytes == 3  # b, c and e; an eos stands for nothing
    assert corpus_of(["é"]).num_bytes == 1
    assert corpus_of(["abc", "d, e"], "letters").num_bytes == 4


def test_refusals():
    with pytest.raises(ValueError, match="did you mean best_fit"):
        PackedText(corpus_of(["ab"]), "bestfit", 4)
    with pytest.raises(ValueError, match="seq_len=0"):
        PackedText(corpus_of(["ab"]), "windows", 0)
    with pytest.raises(ValueError, match="nothing to predict"):
        PackedText(corpus_of(["a", "b"], "letters"), "best_fit", 4)
