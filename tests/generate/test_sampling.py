"""Each filter against a plain walk over the sorted ids, in float64; draws against the distribution; what is refused."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.generate import Sampling
from hyjax.generate.sampling import Rule, draw, filtered

V = 23
OFF = Sampling(temperature=1.0)


def plain(logits, sampling: Sampling) -> np.ndarray:
    """Probabilities [V] as the module's docstring has them: filter after filter, each renormalised."""
    weights = np.exp((np.float64(logits) - np.max(logits)) / sampling.temperature)
    order = sorted(range(V), key=lambda i: -weights[i])
    if sampling.top_k:
        kth = weights[order[min(sampling.top_k, V) - 1]]
        weights = np.where(weights >= kth, weights, 0)
    p = weights / weights.sum()
    if sampling.top_p < 1:
        total, least = 0.0, None
        for i in order:
            least, total = p[i], total + p[i]
            if total >= sampling.top_p:
                break
        p = np.where(p >= least, p, 0)
        p /= p.sum()
    p = np.where(p >= sampling.min_p * p.max(), p, 0)
    return p / p.sum()


@jax.jit
def probabilities(logits, rule):
    return jax.nn.softmax(filtered(logits, rule), axis=-1)


def random_logits(seed: int, rows: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, V)).astype(np.float32)


@pytest.mark.parametrize(
    "change",
    [
        dict(),
        dict(temperature=0.3),
        dict(temperature=4.0),
        dict(top_k=1),
        dict(top_k=5),
        dict(top_k=1000),
        dict(top_p=0.01),
        dict(top_p=0.5),
        dict(top_p=0.97),
        dict(min_p=0.05),
        dict(min_p=1.0),
        dict(top_k=9, top_p=0.6),  # top-p sums what top-k has left and renormalised
        dict(temperature=1.7, top_k=12, top_p=0.9, min_p=0.2),
    ],
    ids=str,
)
def test_each_filter_is_the_plain_one(change):
    """The same ids are left, with the same probabilities."""
    sampling = dataclasses.replace(OFF, **change)
    logits = random_logits(1)
    found = probabilities(logits, Rule.of(sampling, V, None))
    expected = np.stack([plain(row, sampling) for row in logits])
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 5), st.integers(0, V + 3), st.floats(0.01, 1), st.floats(0, 1))
def test_all_filters_together(seed, temperature, top_k, top_p, min_p):
    """But for an id that stands within rounding of a filter's edge, the plain distribution."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(seed)
    found = np.asarray(probabilities(logits, Rule.of(sampling, V, None)))
    for row, p in zip(logits, found, strict=True):
        edges = [
            plain(row, dataclasses.replace(sampling, top_p=min(1, top_p * (1 + e)), min_p=min(1, min_p * (1 + e))))
            for e in (-1e-5, 0, 1e-5)
        ]
        assert any(np.allclose(p, edge, rtol=1e-3, atol=1e-5) for edge in edges)


def test_equal_logits_stay_or_go_together():
    logits = np.full((1, V), -3.0, np.float32)
    logits[0, [4, 9, 11]] = 2.0
    for change in (dict(top_k=1), dict(top_k=2), dict(top_p=0.4), dict(min_p=1.0)):
        found = probabilities(logits, Rule.of(dataclasses.replace(OFF, **change), V, None))
        assert np.flatnonzero(found[0]).tolist() == [4, 9, 11], change


def test_the_repetition_penalty_by_hand():
    """l / 2 above 0 and l · 2 below, for ids that were there; the others as they are. It sways greedy choices too."""
    logits = jnp.array([[3.0, 2.0, -1.0, -1.5, 0.0, 1.6]])
    seen = jnp.array([[True, False, True, False, True, False]])
    rule = Rule.of(Sampling(temperature=0.0, repetition_penalty=2.0), 6, None)
    assert draw(logits, seen, jax.random.split(jax.random.key(0), 1), rule).tolist() == [1]  # 2.0 against 3.0 / 2
    warm = Rule.of(Sampling(temperature=1.0, repetition_penalty=2.0), 6, None)
    rows = 40_000
    keys = jax.random.split(jax.random.key(1), rows)
    drawn = jax.jit(draw)(jnp.repeat(logits, rows, 0), jnp.repeat(seen, rows, 0), keys, warm)
    found = np.bincount(drawn, minlength=6) / rows
    expected = jax.nn.softmax(jnp.array([1.5, 2.0, -2.0, -1.5, 0.0, 1.6]))
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / rows**0.5)


def test_draws_follow_the_distribution():
    """Chi-square of 40,000 draws below its 99.99 % point, and not one id that the filters have left out."""
    sampling = Sampling(temperature=1.3, top_k=14, top_p=0.95, min_p=0.02)
    logits, rows = random_logits(5, 1), 40_000
    keys = jax.random.split(jax.random.key(7), rows)
    drawn = jax.jit(draw)(np.repeat(logits, rows, 0), np.zeros((rows, V), bool), keys, Rule.of(sampling, V, None))
    found, expected = np.bincount(drawn, minlength=V), rows * plain(logits[0], sampling)
    inside = expected > 0
    assert 4 <= inside.sum() < V and not found[~inside].any()
    chi_square = ((found - expected)[inside] ** 2 / expected[inside]).sum()
    freedom = inside.sum() - 1
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty


def test_greedy_looks_at_no_filter():
    logits = random_logits(6)
    rule = Rule.of(Sampling(temperature=0.0, top_k=3, top_p=0.1), V, None)
    drawn = draw(logits, np.zeros(logits.shape, bool), jax.random.split(jax.random.key(0), 8), rule)
    np.testing.assert_array_equal(drawn, logits.argmax(-1))


def test_extreme_logits_and_temperatures():
    """Neither overflows: the smallest temperature takes the most likely id, and huge logits are only far apart."""
    logits = random_logits(8) * 1e30
    for change in (dict(temperature=1e-6), dict(temperature=1e-300), dict(temperature=1.0), dict(top_p=0.5)):
        rule = Rule.of(Sampling(**change), V, None)
        drawn = draw(logits, np.zeros(logits.shape, bool), jax.random.split(jax.random.key(0), 8), rule)
        np.testing.assert_array_equal(drawn, logits.argmax(-1))


def test_which_ids_end_a_text():
    ends = lambda **kw: np.flatnonzero(Rule.of(Sampling(**kw), V, 7).ends).tolist()
    assert ends() == [7]
    assert ends(stop_ids=(3, 7)) == [3, 7]
    assert ends(ignore_eos=True, stop_ids=(3,)) == [3]
    assert not np.any(Rule.of(Sampling(), V, None).ends)
    with pytest.raises(ValueError, match="stop id 23 is not in the vocabulary of 23"):
        Rule.of(Sampling(stop_ids=(V,)), V, None)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_new_tokens", 0, "max_new_tokens is 0; it must be at least 1"),
        ("max_new_tokens", 2.0, "max_new_tokens is 2.0; it must be a whole number"),
        ("max_new_tokens", True, "max_new_tokens is True; it must be a whole number"),
        ("temperature", -0.1, "temperature is -0.1; it must be at least 0"),
        ("temperature", math.nan, "temperature is nan; it must be at least 0"),
        ("temperature", "1", "temperature is '1'; it must be a number"),
        ("top_k", -1, "top_k is -1; it must be at least 1, or 0 for off"),
        ("top_p", 0.0, "top_p is 0.0; it must be above 0 and at most 1"),
        ("top_p", 1.01, "top_p is 1.01; it must be above 0 and at most 1"),
        ("min_p", -1e-9, "min_p is -1e-09; it must be at least 0"),
        ("min_p", 1.5, "min_p is 1.5"),
        ("repetition_penalty", 0.0, "repetition_penalty is 0.0; it must be from 0.01 to 100"),
        ("repetition_penalty", math.inf, "repetition_penalty is inf"),
        ("seed", -1, r"seed is -1; it must be from 0 to 2\*\*32 - 1"),
        ("seed", 2**32, "seed is 4294967296"),
        ("stop", ("a", ""), "stop is .*; it must be a tuple of texts, none of them empty"),
        ("stop", "ab", "stop is 'ab'; it must be a tuple"),
        ("stop_ids", (-1,), "stop_ids is .*; it must be a tuple of ids"),
        ("stop_ids", [3], "stop_ids is .*; it must be a tuple of ids"),
    ],
)  # fmt: skip
def test_values_that_mean_nothing(name, value, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{name: value})


def test_every_seed_is_a_key():
    for seed in (0, 2**31, 2**32 - 1):
        jax.random.key(Sampling(seed=seed).seed)
