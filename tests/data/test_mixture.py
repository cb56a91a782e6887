"""Mixtures: exact shares at every row, each source shuffled by itself and never exhausted, held-out rows in order."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.data import Loader
from hyjax.data.mixing import LONGEST_PERIOD, Rows, Turns
from tests.data.settings import make, write_corpus, write_texts


class Numbers:
    """Rows that are their own number."""

    num_targets, num_bytes = 3, 2

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        assert 0 <= row < self.size
        return {"tokens": np.array([row])}


def loader_of(sizes, weights, seed=0, batch_size=1):
    return Loader(Rows([Numbers(size) for size in sizes]), batch_size, seed=seed, turns=Turns(weights))


def stream_of(loader, rows):
    """(source, row of it) of the first `rows` rows."""
    numbers = np.concatenate([loader.row_numbers(step) for step in range(-(-rows // loader.batch_size))])[:rows]
    source = np.searchsorted(loader.rows.edges, numbers, side="right") - 1
    return source, numbers - np.array(loader.rows.edges)[source]


# ------------------------------------------------------------------------------------------------ shares


def counts_after(turns, start, rows):
    """[rows + 1, sources]: the rows each source has had before `start`, `start` + 1, ..., seen from there alone."""
    before = np.zeros(len(turns.counts), int)
    found = [turns[row] for row in range(start, start + rows)]
    for source, number in reversed(found):
        before[source] = number  # the first one that is seen of a source
    seen = {source for source, _ in found}
    steps = np.array([[source == i for i in range(len(before))] for source, _ in found])
    return np.concatenate([before[None], before + np.cumsum(steps, axis=0)]), seen


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.integers(1, 60), min_size=2, max_size=7),
    start=st.sampled_from([0, 1, 1000, 10**9 + 7]),
)
def test_shares_are_exact_to_one_row_wherever_one_looks(weights, start):
    turns = Turns(weights)
    share = np.array(weights) / sum(weights)
    rows = 2 * sum(weights)  # each source is seen
    counts, seen = counts_after(turns, start, rows)
    assert len(seen) == len(weights)
    expected = (start + np.arange(rows + 1))[:, None] * share
    assert np.abs(counts - expected).max() < 1 + 1e-6
    assert (counts.sum(axis=1) == start + np.arange(rows + 1)).all()


@settings(deadline=None, max_examples=20)
@given(weights=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6))
def test_any_weights_come_within_a_hundred_thousandth(weights):
    turns = Turns(weights)
    share = np.array(weights) / sum(weights)
    assert turns.period <= LONGEST_PERIOD
    assert np.abs(np.array(turns.counts) / turns.period - share).max() < 1e-5
    had = np.cumsum([turns.order == i for i in range(len(weights))], axis=1)
    assert np.abs(had - share[:, None] * np.arange(1, turns.period + 1)).max() < 1 + 1e-5 * turns.period


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ((0.7, 0.3), [7, 3]),
        ((7, 3), [7, 3]),
        ((0.7, 0.2, 0.1), [7, 2, 1]),
        ((1.0, 2.0, 0.5), [2, 4, 1]),
        ((1 / 3, 2 / 3), [1, 2]),
        ((0.9999, 0.0001), [9999, 1]),
        ((1e300, 1e300), [1, 1]),
        ((5.0,), [1]),
    ],
)
def test_the_shortest_period_that_is_exact(weights, counts):
    turns = Turns(weights)
    assert turns.counts == counts and turns.period == sum(counts)
    assert Counter(turns.order.tolist()) == Counter(dict(enumerate(counts)))


def test_weights_that_can_not_be_served():
    with pytest.raises(ValueError, match=r"data.weights\[1\]=1e-07 is 1e-07 of the whole, less than 1/65536"):
        Turns([1, 1e-7])
    for weights in ((), (1, 0), (1, -1), (1, float("nan"))):
        with pytest.raises(ValueError, match="above 0"):
            Turns(weights)


# ------------------------------------------------------------------------------------------------ rows


@settings(deadline=None, max_examples=10)  # grain's shuffle of under a hundred rows takes milliseconds a row
@given(
    sizes=st.lists(st.sampled_from([9, 20, 40]), min_size=2, max_size=3),
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
    batch_size=st.integers(1, 9),
)
def test_every_source_goes_through_epochs_of_its_own(sizes, data, seed, batch_size):
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(sizes), max_size=len(sizes)))
    loader = loader_of(sizes, weights, seed, batch_size)
    source, row = stream_of(loader, 110)
    for number, size in enumerate(sizes):
        own = row[source == number]
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert (np.sort(epochs, axis=1) == np.arange(size)).all()  # a permutation, each and every one
        if size > 8 and len(epochs) > 1:
            assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    again = loader_of(sizes, weights, seed, batch_size)
    assert (again.row_numbers(17) == loader.row_numbers(17)).all()


def test_a_source_of_one_row_gives_it_again_and_again():
    source, row = stream_of(loader_of([1, 30], [1, 1]), 20)
    assert (source == 0).sum() == 10 and (row[source == 0] == 0).all()


def test_sources_of_one_size_are_shuffled_apart():
    """Neither the same order, nor one's epochs those of the other or of another seed, an epoch later."""
    orders = set()
    for seed in (0, 1, 2):
        source, row = stream_of(loader_of([20, 20], [1, 1], seed), 160)
        for number in (0, 1):
            orders |= {tuple(epoch) for epoch in row[source == number].reshape(-1, 20).tolist()}
    assert len(orders) == 3 * 2 * 4


def test_a_source_keeps_its_order_whatever_the_weights():
    one, two = (stream_of(loader_of([50, 30], weights), 200) for weights in ([1, 1], [3, 1]))
    for number in (0, 1):
        first, second = (row[source == number] for source, row in (one, two))
        shorter = min(len(first), len(second))
        assert (first[:shorter] == second[:shorter]).all()


def test_rows_of_all_sources_have_one_numbering():
    rows = Rows([Numbers(3), Numbers(1), Numbers(4)])
    assert [int(rows[i]["tokens"][0]) for i in range(len(rows))] == [0, 1, 2, 0, 0, 1, 2, 3]
    assert (rows.num_targets, rows.num_bytes) == (9, 6)


# ------------------------------------------------------------------------------------------------ as data


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixture")
    return write_texts(root / "texts"), write_corpus(root / "corpus", write_texts(root / "others", seed=1))


def equal(a, b):
    return all((a[key] == b[key]).all() for key in a)


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_a_mixture_is_made_of_its_sources(packing, folders):
    texts, corpus = folders
    mixture = ("topics", f"text:{texts}", f"corpus:{corpus}")
    data = make(source="mixture", mixture=mixture, weights=(0.5, 0.3, 0.2), packing=packing)
    alone = [
        make(packing=packing),
        make(source="text", path=str(texts), packing=packing),
        make(source="corpus", path=str(corpus), packing=packing),
    ]
    assert list(data.heldout_by_source) == ["topics", "text:texts", "corpus:corpus"]
    # Each source is packed as if it were alone.
    for part, single in zip(data.train.rows.parts, alone, strict=True):
        assert len(part) == len(single.train.rows) and equal(part[3], single.train.rows[3])
    # Rows are taken by weight: 5, 3 and 2 of every 10.
    source, _ = stream_of(data.train, 80)
    assert (np.bincount(source) == [40, 24, 16]).all()
    # Held out: all rows of all sources in order, together and by source.
    singles = [single.heldout.rows for single in alone]
    expected = [rows[i] for rows in singles for i in range(len(rows))]
    found = [{k: v[i] for k, v in b.items()} for b in data.heldout.batches() for i in range(8)][: len(expected)]
    assert len(data.heldout.rows) == len(expected)
    assert all(equal(a, b) for a, b in zip(expected, found, strict=True))
    for name, single in zip(data.heldout_by_source, alone, strict=True):
        for a, b in itertools.zip_longest(data.heldout_by_source[name].batches(), single.heldout.batches()):
            assert equal(a, b)
    assert data.heldout.num_targets == sum(single.heldout.num_targets for single in alone)
    assert data.heldout.num_bytes == sum(single.heldout.num_bytes for single in alone)
    assert [corpus.num_tokens for corpus in data.train_corpora] == [s.train_corpora[0].num_tokens for s in alone]
    lines = data.description.splitlines()
    assert len(lines) == 4 and "50.00% topics: 65 documents" in lines[1] and "corpus:corpus" in lines[3]


def test_sources_of_one_name_are_told_apart(folders, tmp_path):
    texts, _ = folders
    mixture = (f"text:{texts}", f"text:{write_texts(tmp_path / 'texts', seed=2)}", "topics")
    data = make(source="mixture", mixture=mixture, weights=(1, 1, 1))
    assert list(data.heldout_by_source) == ["text:texts#1", "text:texts#2", "topics"]


def test_what_is_wrong_with_a_source_names_it(folders, tmp_path):
    (tmp_path / "empty").mkdir()
    mixture = ("topics", f"text:{tmp_path / 'empty'}")
    with pytest.raises(ValueError, match=r"the source text:empty: data.path=.* has no file"):
        make(source="mixture", mixture=mixture, weights=(1, 1))
    with pytest.raises(ValueError, match=r"the source text:texts: data.heldout=1e-09 leaves none"):
        make(source="mixture", mixture=(f"text:{folders[0]}", "topics"), weights=(1, 1), heldout=1e-9)
