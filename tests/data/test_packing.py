"""Rows: positions, segments and the loss mask against a token-by-token account of the documents, from both homes."""

import json
import logging
import os
import time
from bisect import bisect_left, insort
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hyjax.data import best_fit as best_fit_module
from hyjax.data.best_fit import PackIndex, best_fit
from hyjax.data.corpus import Corpus, StoredCorpus, TokenStream, sides
from hyjax.data.packing import PACKINGS, PackedText
from hyjax.data.sources import Document, split
from hyjax.data.tokenizers import get_tokenizer
from tests.data.fake_store import FakeStore

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def corpus_of(texts: list[str], tokenizer: str = "bytes") -> Corpus:
    return Corpus([Document(str(i), text.encode()) for i, text in enumerate(texts)], get_tokenizer(tokenizer))


def stored(texts: list[str], tokenizer: str = "bytes", path: Path | None = None) -> StoredCorpus:
    """All documents of a corpus on disk; one that can't be written to, unless `path` is a folder."""
    store = FakeStore(texts, get_tokenizer(tokenizer), path or Path("/dev/null"))
    return StoredCorpus(store, 0, len(texts))


def rows_of(texts: list[str], packing: str, seq_len: int, tokenizer: str = "bytes"):
    packed = PackedText(corpus_of(texts, tokenizer), packing, seq_len)
    return packed, [packed[i] for i in range(len(packed))]


texts_strategy = st.lists(st.text(LETTERS, min_size=1, max_size=40), min_size=1, max_size=12)


@pytest.mark.parametrize("home", [corpus_of, stored])
@pytest.mark.parametrize("tokenizer", ["bytes", "letters"])
@pytest.mark.parametrize("packing", list(PACKINGS))
@settings(deadline=None, max_examples=40)
@given(texts=texts_strategy, seq_len=st.integers(1, 20))
def test_every_target_once_and_nothing_across_documents(packing, tokenizer, home, texts, seq_len):
    # Letter i of document d is unlike the same letter elsewhere only by where it stands: count (document, place).
    corpus: TokenStream = home(texts, tokenizer)
    assume(corpus.num_targets)
    packed = PackedText(corpus, packing, seq_len)
    documents = list(corpus.documents())
    stream = np.concatenate(documents)
    places = np.concatenate([[(d, i) for i in range(len(doc))] for d, doc in enumerate(documents)])
    predicted = []
    for number in range(len(packed)):
        row = packed[number]
        at = np.concatenate([np.arange(s, s + n) for s, n in packed.index[number]])
        used = len(at)
        assert (row["segment_ids"][used:] == 0).all() and (row["segment_ids"][:used] > 0).all()
        for key in ("tokens", "targets", "weights", "positions"):
            assert row[key].shape == (seq_len,) and (row[key][used:] == 0).all()
        document, place = places[at].T
        np.testing.assert_array_equal(row["tokens"][:used], stream[at])
        # A segment is one document, read on without a gap; segments count 1, 2, ... and positions restart in each.
        new = np.append(True, (np.diff(document) != 0) | (np.diff(place) != 1))
        np.testing.assert_array_equal(row["segment_ids"][:used], np.cumsum(new))
        np.testing.assert_array_equal(row["positions"][:used] == 0, new)
        same = ~new[1:]
        assert (np.diff(row["positions"][:used])[same] == 1).all()
        for i in range(used):
            if row["weights"][i]:
                target = (int(document[i]), int(place[i]) + 1)
                assert row["targets"][i] == documents[target[0]][target[1]]
                predicted.append(target)
            else:
                assert row["targets"][i] == 0
    expected = [(int(d), int(i)) for d, i in places if i > 0]
    assert sorted(predicted) == expected
    assert len(predicted) == packed.num_targets == len(places) - len(texts)


@pytest.mark.parametrize("packing", list(PACKINGS))
@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.text(LETTERS, min_size=1, max_size=30), min_size=2, max_size=12, unique=True),
    heldout=st.floats(0.01, 0.99),
    seq_len=st.integers(1, 20),
)
def test_a_stored_corpus_gives_the_rows_of_the_same_documents_in_memory(packing, texts, heldout, seq_len):
    documents = [Document(str(i), text.encode()) for i, text in enumerate(texts)]
    store = FakeStore(texts, get_tokenizer("bytes"), Path("/dev/null"))
    try:
        in_memory = split(documents, heldout)
    except ValueError as error:
        with pytest.raises(ValueError) as found:
            sides(store, heldout)
        assert str(found.value) == str(error)
        return
    for side, other in zip(in_memory, sides(store, heldout), strict=True):
        corpus = Corpus(side, get_tokenizer("bytes"))
        for name in ("num_documents", "num_tokens", "num_targets", "num_bytes"):
            assert getattr(corpus, name) == getattr(other, name), name
        one, two = PackedText(corpus, packing, seq_len), PackedText(other, packing, seq_len)
        assert len(one) == len(two)
        for number in range(len(one)):
            for key, value in one[number].items():
                np.testing.assert_array_equal(value, two[number][key], key)


def test_a_stored_row_reads_its_own_tokens_alone():
    corpus = stored(["abcdefg" * 20, "hi" * 20, "jklm" * 20])
    packed = PackedText(corpus, "windows", 16)
    assert corpus._store.reads == []  # packing looked at the documents' ends only
    packed[3]
    assert sum(length for _, length in corpus._store.reads) <= 17 + 2


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


# ------------------------------------------------------------------------------------------------ best fit


def test_best_fit_splits_only_long_documents_and_fills_rows():
    rng = np.random.default_rng(0)
    texts = ["x" * n for n in rng.integers(1, 60, 300)] + ["y" * 150]
    packed, rows = rows_of(texts, "best_fit", 64)
    lengths = packed.index.pieces[:, 1]
    # n letters and an eos are n inputs: whole documents, and the long one as 64 + 64 + 22.
    assert sorted(lengths) == sorted([len(text) for text in texts[:-1]] + [64, 64, 22])
    filled = sum(row["weights"].sum() for row in rows) / (64 * len(rows))
    assert len(rows) <= -(-lengths.sum() // 64) * 1.05 and filled > 0.95


class Lengths(TokenStream):
    """Documents of which only the length is known."""

    checksum = ""
    start = 0

    def __init__(self, lengths):
        self.ends = np.cumsum(lengths)

    def read(self, start, length):
        raise AssertionError("packing reads no token")


def one_by_one(corpus: TokenStream, seq_len: int) -> list[list[tuple[int, int]]]:
    """Best-fit decreasing, a piece at a time."""
    starts = np.append(corpus.start, corpus.ends[:-1]).tolist()
    pieces = [
        (start, min(seq_len, end - 1 - start))
        for first, end in zip(starts, corpus.ends.tolist(), strict=True)
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
    return rows


@settings(deadline=None, max_examples=200)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=120), seq_len=st.integers(1, 64))
def test_best_fit_by_length_is_best_fit_piece_by_piece(lengths, seq_len):
    corpus = Lengths(lengths)
    index = best_fit(corpus, seq_len)
    found = [[tuple(piece) for piece in index[row].tolist()] for row in range(len(index))]
    assert found == one_by_one(corpus, seq_len)


def test_best_fit_of_a_million_documents_takes_seconds():
    rng = np.random.default_rng(0)
    corpus = Lengths(np.maximum(1, rng.lognormal(np.log(500), 1, 10**6)).astype(int))
    began = time.process_time()
    index = best_fit(corpus, 2048)
    assert time.process_time() - began < 5  # 0.3 s; piece by piece it is 8 s
    inputs = corpus.num_tokens - corpus.num_documents
    assert index.pieces[:, 1].sum() == inputs and inputs / (len(index) * 2048) > 0.999


def test_groups_of_documents_are_packed_apart(monkeypatch):
    monkeypatch.setattr(best_fit_module, "GROUP", 7)
    rng = np.random.default_rng(1)
    corpus = Lengths(rng.integers(1, 50, 20))
    index = best_fit(corpus, 16)
    edges = [0, corpus.ends[6], corpus.ends[13], corpus.ends[19]]
    rows = [np.searchsorted(edges, index[row][:, 0], side="right") for row in range(len(index))]
    assert all(len(set(row)) == 1 for row in rows) and len({row[0] for row in rows}) == 3
    assert index.pieces[:, 1].sum() == corpus.num_tokens - 20


@pytest.fixture
def kept(tmp_path):
    """`pack(texts=..., seq_len=...)` of a corpus in tmp_path, and the files that are there."""
    texts = [letter * n for n, letter in enumerate(LETTERS, 3)]

    def pack(texts=texts, seq_len=16, first=0, last=26):
        return best_fit(StoredCorpus(FakeStore(texts, get_tokenizer("bytes"), tmp_path), first, last), seq_len)

    return pack, lambda: sorted((tmp_path / "packing").iterdir())


def same(one, two):
    return (one.first == two.first).all() and (one.pieces == two.pieces).all()


def test_the_index_is_kept_beside_the_corpus_and_read_again(kept, monkeypatch):
    pack, files = kept
    made = pack()
    assert [file.suffix for file in files()] == [".first", ".json", ".pieces"]
    monkeypatch.setattr(best_fit_module, "_groups", None)  # it can't be made any more
    read = pack()
    assert same(made, read) and isinstance(read.pieces.base, np.memmap)
    monkeypatch.undo()
    before = len(files())
    # Another length, side or corpus, or another way to pack, is another index.
    monkeypatch.setattr(best_fit_module, "VERSION", 99)
    changes = [dict(seq_len=8), dict(last=13), dict(first=13), dict(texts=[letter * 9 for letter in LETTERS]), dict()]
    for number, change in enumerate(changes, 1):
        pack(**change)
        assert len(files()) == before + 3 * number
    assert not any(file.name.startswith(".") for file in files())


@pytest.mark.parametrize("damage", ["cut", "altered", "other", "no json", "json", "list"])
def test_a_damaged_index_is_made_anew_and_that_is_said(kept, damage, caplog):
    pack, files = kept
    made = PackIndex(*map(np.copy, (pack().first, pack().pieces)))
    _, description, pieces = files()
    if damage == "cut":
        os.truncate(pieces, 16)
    elif damage == "altered":
        pieces.write_bytes(bytes([pieces.read_bytes()[0] ^ 1]) + pieces.read_bytes()[1:])
    elif damage == "other":
        found = json.loads(description.read_text())
        description.write_text(json.dumps(found | {"identity": {"corpus": "another"}}))
    elif damage == "no json":
        description.unlink()  # as after a kill before the last rename
    else:
        description.write_text("{" if damage == "json" else "[]")
    with caplog.at_level(logging.WARNING):
        again = pack()
    assert same(made, again) and same(made, pack())
    assert damage == "no json" or "made anew" in caplog.text


def test_a_folder_that_can_not_be_written_is_said_and_the_index_stays_in_memory(kept, tmp_path, caplog):
    pack, _ = kept
    (tmp_path / "packing").write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING):
        index = pack()
    assert "can't be written" in caplog.text and "stays in memory" in caplog.text
    (tmp_path / "packing").unlink()
    assert same(index, pack())


# ------------------------------------------------------------------------------------------------ counts, refusals


def test_bytes_that_targets_stand_for():
    for home in (corpus_of, stored):
        assert home(["abc", "de"]).num_bytes == 3  # b, c and e; an eos stands for nothing
        assert home(["é"]).num_bytes == 1
        assert home(["abc", "d, e"], "letters").num_bytes == 4


def test_checksum_does_not_depend_on_the_width_of_numbers():
    corpus = corpus_of(["abc", "de"])
    assert corpus.checksum == corpus_of(["abc", "de"]).checksum != corpus_of(["ab", "cde"]).checksum
    assert corpus.checksum != corpus_of(["abcd", "e"]).checksum


def test_refusals():
    with pytest.raises(ValueError, match="did you mean best_fit"):
        PackedText(corpus_of(["ab"]), "bestfit", 4)
    with pytest.raises(ValueError, match="seq_len=0"):
        PackedText(corpus_of(["ab"]), "windows", 0)
    with pytest.raises(ValueError, match="nothing to predict"):
        PackedText(corpus_of(["a", "b"], "letters"), "best_fit", 4)
    with pytest.raises(ValueError, match="finds no token"):
        corpus_of([""])
    with pytest.raises(ValueError, match="heldout=1"):
        sides(FakeStore(["a", "b"], get_tokenizer("bytes")), 1.0)
