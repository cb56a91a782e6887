"""The one-program sampler that training shows its samples with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyjax.generate import make_sampler
from tests.models.common import build, tokens


@pytest.mark.parametrize("name", ["hybrid"])
def test_greedy_tokens_are_the_uncached_ones(name):
    """Every token is the most likely one after all that stands before it, and rows do not see each other."""
    model, variables, apply = build(name)
    prompt, new = tokens(2, 5), 7
    out = make_sampler(model, new, 0.0)(variables["params"], prompt, jax.random.key(0))
    assert out.shape == (2, new) and out.dtype == jnp.int32
    whole = np.concatenate([prompt, out], axis=1)
    expected = apply(variables, whole[:, :-1]).logits.argmax(axis=-1)[:, 4:]
    np.testing.assert_array_equal(out, expected)
    alone = make_sampler(model, new, 0.0)(variables["params"], prompt[1:], jax.random.key(0))
    np.testing.assert_array_equal(out[1:], alone)


def test_temperature_draws_from_the_softmax():
    """One token after one prompt, 4,000 times: frequencies within four standard errors of softmax(logits / t)."""
    model, variables, apply = build("attention")
    prompt, rows, temperature = tokens(1, 3), 4000, 0.7
    drawn = make_sampler(model, 1, temperature)(variables["params"], np.repeat(prompt, rows, 0), jax.random.key(1))
    logits = apply(variables, prompt).logits[0, -1] / temperature
    expected = np.asarray(jax.nn.softmax(logits))
    found = np.bincount(drawn[:, 0], minlength=len(expected)) / rows
    assert (np.abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / rows) + 1e-3).all()


def test_a_key_gives_one_text():
    model, variables, _ = build("attention")
    sample = make_sampler(model, 12, 1.0)
    first, again, other = (sample(variables["params"], tokens(1, 3), jax.random.key(k)) for k in (0, 0, 1))
    assert (first == again).all() and (first != other).any()


def test_any_temperature_of_a_config_will_do():
    """Values that float32 can't divide by are the limits that they are near to."""
    model, variables, _ = build("attention")
    greedy, cold, hot = (
        make_sampler(model, 6, t)(variables["params"], tokens(1, 1), jax.random.key(0)) for t in (0.0, 1e-300, 1e300)
    )
    np.testing.assert_array_equal(greedy, cold)
    assert ((hot >= 0) & (hot < 31)).all()
