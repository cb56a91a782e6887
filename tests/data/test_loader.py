"""Batches by step: the same whatever was read before, by however many threads; every row once an epoch."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from hyjax.data import Loader, build, fingerprint_diff
from hyjax.data.sources import read_documents, split

CONFIG = dict(
    source="topics",
    path="",
    checksum="",
    glob="*",
    tokenizer="bytes",
    seq_len=64,
    packing="windows",
    heldout=0.2,
    workers=0,
    num_pairs=4,
    num_keys=64,
    num_values=32,
    train_sequences=50,
    heldout_sequences=20,
)


def make(batch_size=8, seed=0, **changes):
    return build({**CONFIG, **changes}, batch_size=batch_size, seed=seed)


class Numbers:
    """Rows that are their own number."""

    num_targets = num_bytes = 0
    content = ()

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, row):
        return {"tokens": np.array([row]), "segment_ids": np.array([1])}


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
    assert (stream[: 4 * 37] == ids(Loader(Numbers(37), 2, seed=3).batch(step) for step in range(2 * 37))).all()
    assert (stream[:37] != ids(Loader(Numbers(37), 37, seed=4).batch(0) for _ in [0])).any()


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_gives_the_straight_sequence(packing, workers):
    straight = [make(packing=packing).train.batch(step) for step in range(40)]
    resumed = []
    for start, count in [(0, 20), (20, 10), (30, 10)]:
        # A new loader each time, read further than was used, as a prefetch does.
        batches = make(packing=packing, workers=workers).train.batches(start)
        resumed += list(itertools.islice(batches, count + 3))[:count]
    assert all(equal(a, b) for a, b in zip(straight, resumed, strict=True))


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_values_do_not_depend_on_workers(workers):
    for kind in (dict(), dict(source="recall", seq_len=8)):
        threaded = make(workers=workers, **kind)
        alone = make(**kind)
        for step, batch in zip(range(30), threaded.train.batches(), strict=False):
            assert equal(batch, alone.train.batch(step))
        held = list(threaded.heldout.batches())
        assert len(held) == alone.heldout.num_batches
        assert all(equal(a, b) for a, b in zip(held, alone.heldout.batches(), strict=True))


def test_far_steps_need_no_reading_before():
    one, other = make(), make()
    other.train.batch(0)
    assert equal(one.train.batch(10**6), other.train.batch(10**6))
    assert equal(next(one.train.batches(10**6)), other.train.batch(10**6))


def test_heldout_is_one_pass_in_order_and_padded():
    loader = Loader(Numbers(10), 4, seed=None)
    batches = list(loader.batches())
    assert [len(batch["tokens"]) for batch in batches] == [4, 4, 4] and loader.num_batches == 3
    segments = np.concatenate([batch["segment_ids"][:, 0] for batch in batches])
    assert ids(batches).tolist() == [*range(10), 0, 0] and segments.tolist() == [1] * 10 + [0, 0]
    assert equal(next(loader.batches(2)), batches[2]) and list(loader.batches(3)) == []
    for step in (-1, 3):
        with pytest.raises(IndexError):
            loader.batch(step)


def test_heldout_text_never_reaches_training():
    """Not even in later epochs, where a slice after a shuffle would leak."""
    data = make(batch_size=64)
    train, heldout = split(read_documents("topics"), CONFIG["heldout"])
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
    heldout = split(read_documents("topics"), CONFIG["heldout"])[1]
    assert sum(batch["weights"].sum() for batch in batches) == data.heldout.num_targets
    assert data.heldout.num_targets == sum(len(d.text) for d in heldout)  # an eos more, a first byte less
    assert data.heldout.num_bytes == sum(len(d.text) - 1 for d in heldout)
    # The seed shuffles the training rows; it does not touch what is held out.
    other = make(batch_size=16, seed=5)
    assert all(equal(a, b) for a, b in zip(batches, other.heldout.batches(), strict=True))
    assert not equal(data.train.batch(0), other.train.batch(0))


def test_batch_shapes_and_types():
    for data, shape in [(make(), (8, 64)), (make(source="recall", seq_len=8), (8, 8, 2))]:
        batch = data.train.batch(0)
        assert batch["tokens"].shape == shape
        for key in ("tokens", "targets", "positions", "segment_ids"):
            assert batch[key].dtype == np.int32 and batch[key].shape[:2] == shape[:2]
        assert batch["weights"].dtype == np.float32 and set(np.unique(batch["weights"])) <= {0, 1}


def test_recall_as_data():
    data = make(source="recall", seq_len=8)
    assert (data.vocab_size, data.streams, data.num_streams, data.tokenizer) == (32, (64, 33), 2, None)
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


CHANGES = [
    (dict(seed=1), {"seed"}),
    (dict(batch_size=4), {"batch_size"}),
    (dict(seq_len=32), {"seq_len", "train_rows", "heldout_rows"}),
    (dict(packing="best_fit"), {"packing"}),
    (dict(heldout=0.3), {"heldout", "train_sha256", "heldout_sha256", "train_documents"}),
    (dict(tokenizer="letters"), {"tokenizer", "train_sha256", "train_tokens"}),
    (dict(workers=2), set()),
]


@pytest.mark.parametrize(("change", "named"), CHANGES, ids=[str(*change) for change, _ in CHANGES])
def test_fingerprint_names_what_changed(change, named):
    old = json.loads(json.dumps(make().fingerprint))
    new = make(**change).fingerprint
    assert json.loads(json.dumps(new)) == new
    sentences = fingerprint_diff(old, new)
    told = {sentence.split()[1] for sentence in sentences}
    assert named <= told if named else not sentences
    for key in named:
        assert any(f"was {old[key]!r} and is {new[key]!r}" in sentence for sentence in sentences)


def test_fingerprint_of_recall_and_of_another_python():
    old, new = (make(source="recall", seq_len=8, seed=seed).fingerprint for seed in (0, 1))
    told = {sentence.split()[1] for sentence in fingerprint_diff(old, new)}
    assert told == {"seed", "train_sha256"}
    topics = make().fingerprint
    assert fingerprint_diff({**topics, "python": "3.11.0"}, topics) == []
    assert len(fingerprint_diff({**topics, "python": "3.11.0", "train_sha256": ""}, topics)) == 2
    assert "absent" in fingerprint_diff(topics, {**topics, "mixture": 2})[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(source="recal"), "data.source is 'recal', .* did you mean recall"),
        (dict(source="recall"), "data.seq_len=64, but recall sequences of num_pairs=4 have 8 tokens"),
        (dict(source="recall", seq_len=8, train_sequences=0), "at least 1"),
        (dict(batch_size=0), "batch_size=0"),
        (dict(workers=-1), "data.workers=-1"),
        (dict(seed=-1), "seed=-1"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        make(**change)


def test_synthetic_tasks_load_without_grain_or_jax():
    code = (
        "import sys; sys.modules['grain'] = None; from hyjax.data.synthetic import mqar, recall; recall(1, 1);"
        "assert 'flax' not in sys.modules and 'ml_collections' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_batches_of_one_row():
    loader = make(batch_size=1).train
    first = next(loader.batches(3))
    assert all((first[key] == loader.batch(3)[key]).all() for key in first)
