"""Recall and MQAR: an oracle that reads the pairs scores 1.0; every draw has the law that the docstring states."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.data.synthetic import mqar, recall
from hyjax.data.synthetic.sampling import distinct, weighted_distinct


def solve_recall(tokens):
    """The rule, told by reading: look up each asked key among the bound ones."""
    reserved = tokens[..., 1].max()
    answers = np.full(tokens.shape[:2], -1)
    for i, row in enumerate(tokens):
        bound = {}
        for t, (key, value) in enumerate(row.tolist()):
            if value == reserved:
                answers[i, t] = bound[key]
            else:
                bound[key] = value
    return answers


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 40), st.integers(0, 2**31))
def test_recall_oracle_scores_one(pairs, more_keys, values, seed):
    tokens, targets = recall(5, pairs, num_keys=pairs + more_keys, num_values=values, seed=seed)
    assert tokens.shape == (5, 2 * pairs, 2) and targets.shape == (5, 2 * pairs)
    assert tokens.dtype == targets.dtype == np.int32
    keys = tokens[..., 0]
    assert keys.min() >= 0 and keys.max() < pairs + more_keys
    assert (np.diff(np.sort(keys[:, :pairs])) > 0).all() and (
        np.sort(keys[:, pairs:]) == np.sort(keys[:, :pairs])
    ).all()
    assert (tokens[:, pairs:, 1] == values).all() and (tokens[:, :pairs, 1] < values).all()
    assert (targets[:, :pairs] == -1).all()
    np.testing.assert_array_equal(solve_recall(tokens), targets)


def test_recall_seeds_and_chance():
    first, again, other = recall(2000, 16, seed=7), recall(2000, 16, seed=7), recall(2000, 16, seed=8)
    assert all((a == b).all() for a, b in zip(first, again, strict=True)) and (first[0] != other[0]).any()
    assert not {row.tobytes() for row in first[0]} & {row.tobytes() for row in other[0]}
    values = np.bincount(first[1][:, 16:].ravel(), minlength=32) / 32000
    assert abs(values - 1 / 32).max() < 5 * np.sqrt(1 / 32 / 32000)  # chance is 1 / 32, 5 standard errors
    keys = np.bincount(first[0][:, :16, 0].ravel(), minlength=64) / 32000
    assert abs(keys - 1 / 64).max() < 5 * np.sqrt(1 / 64 / 32000)
    # The order of the questions is a new one: the pair asked first is any pair.
    asked = (first[0][:, :16, 0] == first[0][:, 16:17, 0]).argmax(axis=1)
    assert abs(np.bincount(asked, minlength=16) - 125).max() < 5 * np.sqrt(125)


def test_recall_refusals():
    with pytest.raises(ValueError, match="num_pairs=65 different keys can't be drawn from num_keys=64"):
        recall(1, 65)
    with pytest.raises(ValueError, match="num_pairs=0"):
        recall(1, 0)
    assert recall(3, 64)[0].shape == (3, 128, 2)


def solve_mqar(inputs, pairs, labelled):
    answers = np.full(inputs.shape, -100)
    for i, row in enumerate(inputs.tolist()):
        bound = dict(zip(row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        for t in np.flatnonzero(labelled[i]):
            answers[i, t] = bound[row[t]]
    return answers


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(0, 20), st.integers(0, 60), st.booleans(), st.integers(0, 2**31))
def test_mqar_oracle_scores_one(pairs, slack, more_vocab, random_non_queries, seed):
    seq_len, vocab = 4 * pairs + 2 * slack, 2 * (pairs + 1) + more_vocab
    inputs, labels = mqar(
        6,
        vocab_size=vocab,
        seq_len=seq_len,
        num_kv_pairs=pairs,
        random_non_queries=random_non_queries,
        seed=seed,
    )
    assert inputs.shape == labels.shape == (6, seq_len) and inputs.dtype == labels.dtype == np.int32
    keys, values = inputs[:, 0 : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2]
    assert keys.min() >= 1 and keys.max() < vocab // 2 <= values.min() and values.max() < vocab
    for drawn in (keys, values):
        assert (np.diff(np.sort(drawn)) > 0).all()
    asked = labels != -100
    assert (asked.sum(axis=1) == pairs).all() and not asked[:, : 2 * pairs].any() and not asked[:, 1::2].any()
    assert (np.sort(inputs[asked].reshape(6, pairs)) == np.sort(keys)).all()
    np.testing.assert_array_equal(solve_mqar(inputs, pairs, asked), labels)
    assert inputs.min() >= 0 and inputs.max() < vocab
    if not random_non_queries:
        assert (inputs[:, 2 * pairs :][~asked[:, 2 * pairs :]] == 0).all()


def test_mqar_fillers_are_random_only_when_asked():
    arguments = dict(vocab_size=64, seq_len=64, num_kv_pairs=4, seed=1)
    filled, _ = mqar(200, **arguments)
    plain, labels = mqar(200, **arguments, random_non_queries=False)
    fillers = labels == -100
    fillers[:, :8] = False
    assert (plain[fillers] == 0).all()
    assert len(np.unique(filled[fillers])) == 64
    assert (mqar(200, **arguments)[0] == filled).all() and (mqar(200, **{**arguments, "seed": 2})[0] != filled).any()


def test_mqar_gaps_follow_the_power_law():
    """With one pair the slot is one draw of p_i ~ i^(a-1)."""
    n = 40000
    for power in (0.01, 0.5, 1.0):
        _, labels = mqar(n, vocab_size=64, seq_len=34, num_kv_pairs=1, power_a=power, seed=0)
        slot = ((labels != -100).argmax(axis=1) - 2) // 2
        expected = np.arange(1, 17) ** (power - 1)
        expected /= expected.sum()
        found = np.bincount(slot, minlength=16) / n
        assert (abs(found - expected) < 5 * np.sqrt(expected / n)).all()


def test_successive_draws_without_replacement():
    """All ordered pairs of 3 weighted items against p_i · p_j / (1 - p_i); uniform draws likewise."""
    weights, n = np.array([5.0, 3.0, 2.0]), 60000
    p = weights / weights.sum()
    for drawn, law in [
        (weighted_distinct(np.random.default_rng(0), n, weights, 2), lambda i, j: p[i] * p[j] / (1 - p[i])),
        (distinct(np.random.default_rng(0), n, 3, 2), lambda i, j: 1 / 6),
    ]:
        for i in range(3):
            for j in range(3):
                share = ((drawn[:, 0] == i) & (drawn[:, 1] == j)).mean()
                expected = law(i, j) if i != j else 0
                assert abs(share - expected) <= 5 * np.sqrt(expected / n)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_kv_pairs=17), "needs a seq_len of at least 68, not 64"),
        (dict(num_kv_pairs=0), "num_kv_pairs=0"),
        (dict(seq_len=65), "must be even"),
        (dict(vocab_size=9), "vocab_size=9 is too small for 4 keys and values: 10 is enough"),
        (dict(power_a=0.0), "power_a=0.0"),
    ],
)
def test_mqar_refusals(change, message):
    arguments = dict(vocab_size=128, seq_len=64, num_kv_pairs=4, seed=0)
    with pytest.raises(ValueError, match=message):
        mqar(2, **{**arguments, **change})
