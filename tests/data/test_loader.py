"""Batches by step: the same whatever was read before, by however many threads and hosts; every row once an epoch."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.data import Loader
from hyjax.data.mixing import Rows, Turns
from hyjax.data.sources import read_documents, split
from tests.data.settings import SMALL, make, write_corpus, write_texts


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> dict[str, dict]:
    """Settings of every kind of data."""
    root = tmp_path_factory.mktemp("texts")
    corpus = write_corpus(root / "corpus", write_texts(root / "texts"))
    mixture = ("topics", f"text:{root / 'texts'}", f"corpus:{corpus}")
    return {
        "topics": dict(),
        "best_fit": dict(packing="best_fit"),
        "recall": dict(source="recall", seq_len=8),
        "corpus": dict(source="corpus", path=str(corpus)),
        "corpus best_fit": dict(source="corpus", path=str(corpus), packing="best_fit"),
        "mixture": dict(source="mixture", mixture=mixture, weights=(0.5, 0.3, 0.2)),
        "mixture best_fit": dict(source="mixture", mixture=mixture, weights=(1.0, 2.0, 4.0), packing="best_fit"),
    }


KINDS = ["topics", "best_fit", "recall", "corpus", "corpus best_fit", "mixture", "mixture best_fit"]


class Numbers:
    """Rows that are their own number."""

    num_targets = num_bytes = 0

    def __init__(self, size, first=0):
        self.size, self.first = size, first

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        assert 0 <= row < self.size
        return {"tokens": np.array([self.first + row]), "segment_ids": np.array([1])}


def ids(batches):
    return np.concatenate([batch["tokens"][:, 0] for batch in batches])


def equal(a, b):
    return a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a)


@pytest.mark.parametrize("batch_size", [1, 4, 7, 16, 50])
def test_each_row_once_an_epoch_and_each_epoch_another_order(batch_size):
    loader = Loader(Numbers(37), batch_size, seed=3)
    steps = -(-5 * 37 // batch_size)
    stream = ids(loader.batch(step) for step in range(steps))
    epochs = stream[: 5 * 37].reshape(5, 37)
    assert (np.sort(epochs) == np.arange(37)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 5
    # The stream of rows does not depend on the batch.
    pairs = Loader(Numbers(37), 2, seed=3)
    assert (stream[: 4 * 37] == ids(pairs.batch(step) for step in range(2 * 37))).all()
    assert (stream[:37] != ids([Loader(Numbers(37), 37, seed=4).batch(0)])).any()


# ------------------------------------------------------------------------------------------------ by step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_gives_the_straight_sequence(kind, workers, kinds):
    loader = make(**kinds[kind]).train
    straight = [loader.batch(step) for step in range(40)]
    resumed, read = [], []
    for start, count in [(0, 20), (20, 10), (30, 10)]:
        # A new loader each time, read further than was used, as a prefetch does.
        loader = make(**kinds[kind], workers=workers).train
        resumed += list(itertools.islice(loader.batches(start), count + 3))[:count]
        read += [loader.row_numbers(step).tolist() for step in range(start, start + count)]
    assert all(equal(a, b) for a, b in zip(straight, resumed, strict=True))
    assert read == [make(**kinds[kind]).train.row_numbers(step).tolist() for step in range(40)]


@pytest.mark.parametrize("kind", ["topics", "recall", "corpus", "mixture"])
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_values_do_not_depend_on_workers(kind, workers, kinds):
    threaded, alone = make(**kinds[kind], workers=workers), make(**kinds[kind])
    assert threaded.train._options.num_threads == workers
    for step, batch in zip(range(30), threaded.train.batches(), strict=False):
        assert equal(batch, alone.train.batch(step))
    held = list(threaded.heldout.batches())
    assert len(held) == alone.heldout.num_batches
    assert all(equal(a, b) for a, b in zip(held, alone.heldout.batches(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_far_steps_need_no_reading_before(kind, kinds):
    one, other = make(**kinds[kind]), make(**kinds[kind])
    other.train.batch(0)
    for step in (10**6, 10**9):
        assert equal(one.train.batch(step), other.train.batch(step))
    assert equal(next(one.train.batches(10**6)), other.train.batch(10**6))


@pytest.mark.parametrize("kind", KINDS)
def test_row_numbers_are_the_rows_of_the_batch(kind, kinds):
    data = make(**kinds[kind])
    for loader, steps in ((data.train, (0, 1, 77)), (data.heldout, range(data.heldout.num_batches))):
        for step in steps:
            numbers, batch = loader.row_numbers(step), loader.batch(step)
            assert numbers.shape == (8,) and numbers.dtype == np.int64
            for at, number in enumerate(numbers.tolist()):
                if number < 0:
                    assert not batch["weights"][at].any()
                else:
                    assert equal(loader.rows[number], {key: value[at] for key, value in batch.items()})


# ------------------------------------------------------------------------------------------------ hosts


@pytest.mark.parametrize("kind", KINDS)
def test_hosts_one_after_the_other_are_the_batch(kind, kinds):
    whole = make(**kinds[kind])
    for hosts in (1, 2, 4, 8):
        shares = [make(**kinds[kind], host=(host, hosts)) for host in range(hosts)]
        for side, steps in (("train", (0, 1, 40)), ("heldout", (0, whole.heldout.num_batches - 1))):
            loader = getattr(whole, side)
            for step in steps:
                parts = [getattr(share, side).batch(step) for share in shares]
                assert {len(part["tokens"]) for part in parts} == {8 // hosts}
                joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
                assert equal(joined, loader.batch(step))
                numbers = [getattr(share, side).row_numbers(step) for share in shares]
                assert (np.concatenate(numbers) == loader.row_numbers(step)).all()


@pytest.mark.parametrize("kind", ["recall", "mixture"])
def test_resuming_on_other_numbers_of_hosts_and_workers(kind, kinds):
    """Steps 0 to 9 on 4 hosts, 10 to 14 on 8, 15 to 19 on 2, 20 to 24 on 1: no row lost, none twice."""
    whole = make(**kinds[kind]).train
    straight = np.concatenate([whole.row_numbers(step) for step in range(25)])
    step, seen = 0, []
    for steps, hosts, workers in ((10, 4, 0), (5, 8, 2), (5, 2, 1), (5, 1, 0)):
        loaders = [make(**kinds[kind], workers=workers, host=(host, hosts)).train for host in range(hosts)]
        streams = [loader.batches(step) for loader in loaders]
        for _ in range(steps):
            parts = [next(stream) for stream in streams]
            joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            assert equal(joined, whole.batch(step))
            seen += [loader.row_numbers(step) for loader in loaders]
            step += 1
    assert (np.concatenate(seen) == straight).all()


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(150, 400), min_size=1, max_size=4),
    share=st.integers(1, 5),
    hosts=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    start=st.integers(0, 500),
    workers=st.sampled_from([0, 2]),
)
def test_random_access_is_iteration_is_the_hosts_together(sizes, share, hosts, seed, start, workers):
    rows = Rows([Numbers(size, first=sum(sizes[:i])) for i, size in enumerate(sizes)])
    turns = Turns([i + 1 for i in range(len(sizes))]) if len(sizes) > 1 else None
    loader = Loader(rows, share * hosts, seed=seed, turns=turns)
    steps = range(start, start + 4)
    asked = ids(loader.batch(step) for step in reversed(steps)).reshape(4, -1)[::-1]
    assert (asked == [loader.row_numbers(step) for step in steps]).all()
    parts = [
        Loader(rows, share * hosts, seed=seed, turns=turns, workers=workers, host=(host, hosts)).batches(start)
        for host in range(hosts)
    ]
    walked = np.array([ids(next(part) for part in parts) for _ in steps])
    assert (walked == asked).all()


# ------------------------------------------------------------------------------------------------ held out


def test_heldout_is_one_pass_in_order_and_padded():
    loader = Loader(Numbers(10), 4, seed=None)
    batches = list(loader.batches())
    assert [len(batch["tokens"]) for batch in batches] == [4, 4, 4] and loader.num_batches == 3
    segments = np.concatenate([batch["segment_ids"][:, 0] for batch in batches])
    assert ids(batches).tolist() == [*range(10), 0, 0] and segments.tolist() == [1] * 10 + [0, 0]
    assert loader.row_numbers(2).tolist() == [8, 9, -1, -1]
    assert equal(next(loader.batches(2)), batches[2]) and list(loader.batches(3)) == []
    for step in (-1, 3):
        with pytest.raises(IndexError):
            loader.batch(step)
        with pytest.raises(IndexError):
            loader.row_numbers(step)


def test_heldout_text_never_reaches_training():
    """Not even in later epochs, where a slice after a shuffle would leak."""
    data = make(batch_size=64)
    train, heldout = split(read_documents("topics"), SMALL["heldout"])
    seen = [data.train.batch(step) for step in range(3 * data.train.num_batches)]
    # Windows of 24 bytes that occur in held-out documents alone.
    text = b"\0".join(document.text for document in train)
    probes = {d.text[i : i + 24] for d in heldout for i in range(0, len(d.text) - 24, 24)}
    probes = {probe for probe in probes if probe not in text}
    assert len(probes) > 100
    rows = b"\0".join(row.astype(np.uint8).tobytes() for batch in seen for row in batch["tokens"])
    assert not any(probe in rows for probe in probes)
    held = b"\0".join(row.astype(np.uint8).tobytes() for batch in data.heldout.batches() for row in batch["tokens"])
    assert any(probe in held for probe in probes)


def test_heldout_counts():
    data = make(batch_size=16)
    batches = list(data.heldout.batches())
    heldout = split(read_documents("topics"), SMALL["heldout"])[1]
    assert sum(batch["weights"].sum() for batch in batches) == data.heldout.num_targets
    assert data.heldout.num_targets == sum(len(d.text) for d in heldout)  # an eos more, a first byte less
    assert data.heldout.num_bytes == sum(len(d.text) - 1 for d in heldout)
    # The seed shuffles the training rows; it does not touch what is held out.
    other = make(batch_size=16, seed=5)
    assert all(equal(a, b) for a, b in zip(batches, other.heldout.batches(), strict=True))
    assert not equal(data.train.batch(0), other.train.batch(0))
    assert data.heldout_by_source == {}


# ------------------------------------------------------------------------------------------------ corpora on disk


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_a_corpus_gives_the_batches_of_its_texts(packing, tmp_path):
    texts = write_texts(tmp_path / "texts", seed=1)
    corpus = write_corpus(tmp_path / "corpus", texts)
    one = make(source="text", path=str(texts), packing=packing)
    two = make(source="corpus", path=str(corpus), packing=packing, workers=2)
    assert (one.vocab_size, one.description.split(":")[1]) == (two.vocab_size, two.description.split(":")[1])
    for side in ("train", "heldout"):
        memory, disk = getattr(one, side), getattr(two, side)
        for name in ("num_examples", "num_batches", "num_targets", "num_bytes"):
            assert getattr(memory, name) == getattr(disk, name), name
        for step, batch in zip(range(memory.num_batches), disk.batches(), strict=False):
            assert equal(batch, memory.batch(step))


def test_a_corpus_brings_its_tokenizer(tmp_path):
    texts = write_texts(tmp_path / "texts")
    letters = str(write_corpus(tmp_path / "letters", texts, "letters"))
    both = ("corpus:" + str(write_corpus(tmp_path / "bytes", texts)), "corpus:" + letters)
    for tokenizer in ("auto", "letters"):
        assert make(source="corpus", path=letters, tokenizer=tokenizer).tokenizer.name == "letters"
    mixture = make(source="mixture", mixture=("topics", f"corpus:{letters}"), weights=(1, 1))
    assert mixture.vocab_size == 28 and {
        loader.rows.corpus.tokenizer.name for loader in mixture.heldout_by_source.values()
    } == {"letters"}
    assert make().tokenizer.name == "bytes"
    with pytest.raises(ValueError, match=r"data.tokenizer='bytes' is the tokenizer bytes of 257 .*letters.*auto"):
        make(source="corpus", path=letters, tokenizer="bytes")
    with pytest.raises(
        ValueError, match=r"the corpus .*bytes was made with the tokenizer bytes .* was made with .*letters"
    ):
        make(source="mixture", mixture=both, weights=(1, 1))


def test_a_moved_corpus_is_the_same_data(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", write_texts(tmp_path / "texts"))
    settings = dict(source="corpus", packing="best_fit")
    before = make(**settings, path=str(corpus))
    batch = before.train.batch(3)
    corpus.rename(tmp_path / "elsewhere")
    after = make(**settings, path=str(tmp_path / "elsewhere"))
    assert after.fingerprint == before.fingerprint and equal(after.train.batch(3), batch)


# ------------------------------------------------------------------------------------------------ shapes, refusals


def test_batch_shapes_and_types(kinds):
    for kind in KINDS:
        shape = (8, 8, 2) if kind == "recall" else (8, 64)
        batch = make(**kinds[kind]).train.batch(0)
        assert batch["tokens"].shape == shape
        for key in ("tokens", "targets", "positions", "segment_ids"):
            assert batch[key].dtype == np.int32 and batch[key].shape[:2] == shape[:2]
        assert batch["weights"].dtype == np.float32 and set(np.unique(batch["weights"])) <= {0, 1}


def test_recall_as_data():
    data = make(source="recall", seq_len=8)
    assert (data.vocab_size, data.streams, data.num_streams, data.tokenizer) == (32, (64, 33), 2, None)
    assert data.train_corpora == data.heldout_corpora == []
    batch = data.train.batch(0)
    assert (batch["weights"] == [0, 0, 0, 0, 1, 1, 1, 1]).all() and (batch["targets"][:, :4] == 0).all()
    assert (batch["positions"] == np.arange(8)).all() and (batch["segment_ids"] == 1).all()
    for row in range(8):
        bound = dict(batch["tokens"][row, :4].tolist())
        assert [bound[key] for key in batch["tokens"][row, 4:, 0].tolist()] == batch["targets"][row, 4:].tolist()
    train, heldout = (
        {row.tobytes() for batch in itertools.islice(loader.batches(), n) for row in batch["tokens"]}
        for loader, n in ((data.train, data.train.num_batches), (data.heldout, data.heldout.num_batches))
    )
    assert len(train) == 50 and not train & heldout
    assert (data.heldout.num_bytes, data.heldout.num_targets) == (0, 80)
    assert not equal(make(source="recall", seq_len=8, seed=1).train.batch(0), batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(source="recal"), "data.source is 'recal', .* did you mean recall"),
        (dict(source="recall"), "data.seq_len=64, but recall sequences of num_pairs=4 have 8 tokens"),
        (dict(source="recall", seq_len=8, train_sequences=0), "at least 1"),
        (dict(source="corpus", path="nowhere"), "nowhere is no corpus"),
        (dict(batch_size=0), "batch_size=0"),
        (dict(workers=-1), "data.workers=-1"),
        (dict(seed=-1), "seed=-1"),
        (dict(host=(0, 3)), "train.batch_size=8 can't be shared equally by 3 hosts: use 6 or 9"),
        (dict(host=(2, 2)), r"host=\(2, 2\)"),
        (dict(batch_size=3, host=(0, 4)), "by 4 hosts: use 4"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        make(**change)


def test_synthetic_tasks_load_without_grain_or_jax():
    code = (
        "import sys; sys.modules['grain'] = None; from hyjax.data.synthetic import mqar, recall; recall(1, 1);"
        "assert not {'flax', 'ml_collections', 'array_record', 'tokenizers', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_batches_of_one_row():
    loader = make(batch_size=1).train
    first = next(loader.batches(3))
    assert all((first[key] == loader.batch(3)[key]).all() for key in first)
