"""What makes a decoding step cheap: caches updated in place, and one query over no more keys than it needs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyjax.generate import Generator, Sampling
from hyjax.kernels import attention
from hyjax.kernels.attention import block_sizes, xla
from hyjax.models import HybridLM
from hyjax.models.cache import KVCache, WindowCache
from hyjax.models.context import Clock, Context, enter
from tests.generate.common import SMALL


def program(layout: str, room: int) -> tuple[jax.stages.Compiled, Generator]:
    """The compiled loop over one row, and its generator."""
    model = HybridLM(SMALL | dict(layout=layout, kv_heads=2, head_dim=8))
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    generator = Generator(model, params, room)
    generation = generator.start([[1]], Sampling(2, 0.0))
    return generator.decode.lower(generator.params, generation.rows, generation.rule, np.int32(1)).compile(), generator


def test_caches_are_updated_in_place():
    """No instruction of the compiled loop copies a cache, and what goes out lies where it came in."""
    room = 3000
    compiled, _ = program("GAA", room)
    cache = room * 2 * 8 * 4  # bytes of one layer's keys
    shape = rf"f32\[1,2,{room},8\]"
    text = compiled.as_text()
    assert re.search(rf"dynamic-update-slice[\w.]* = {shape}|= {shape}\S* dynamic-update-slice\(", text)
    assert not re.findall(rf"= {shape}\S* (?:copy|concatenate|scatter)\(", text)
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * cache


# ------------------------------------------------------------------------------------------------ one query


@pytest.fixture
def many_prefixes(monkeypatch):
    """Prefixes of 5, 21 and 85 keys, and all 341."""
    monkeypatch.setitem(block_sizes.ROW_PREFIX, "cpu", 5)
    monkeypatch.setitem(block_sizes.ROW_QUERIES, "cpu", 1)
    assert xla._prefixes(341) == [5, 21, 85, 341]


@pytest.mark.parametrize("kind", ["plain", "window", "by position", "sinks"])
def test_any_prefix_of_the_keys_gives_the_reference(many_prefixes, kind):
    """Every place of the query, through every prefix: what is left out was not to be seen."""
    batch, length = 2, 341
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(batch, n, h, 6)), jnp.float32) for n, h in ((1, 4), (length, 2), (length, 2))
    )
    options = dict(window=dict(window=30), sinks=dict(sinks=jnp.array([0.5, -1.0, 2.0, 0.0]))).get(kind, {})
    places = np.broadcast_to(np.arange(length), (batch, length))
    if kind == "by position":  # the keys of the second row lie the other way round, so that it needs the longest prefix
        places = np.stack([places[0], places[0][::-1]])

    @jax.jit
    def both(now):
        call = lambda name: attention(
            q, k, v, q_positions=now, kv_positions=jnp.asarray(places), implementation=name, **options
        )
        return call("xla"), call("reference")

    for now in ((0, 0), (4, 3), (5, 4), (20, 21), (84, 2), (85, 84), (340, 340), (-1, 7)):
        found, expected = both(jnp.array(now)[:, None])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_rest_of_the_keys_is_not_read(many_prefixes):
    """NaN in keys past the prefix would reach the output as 0 · NaN, were they read."""
    k = v = jnp.ones((1, 341, 1, 4)).at[:, 21:].set(jnp.nan)
    call = jax.jit(lambda now: attention(k[:, :1], k, v, q_positions=now, kv_positions=jnp.arange(341)[None]))
    assert jnp.isfinite(call(jnp.array([[20]]))).all()
    assert jnp.isnan(call(jnp.array([[21]]))).all()  # the next prefix, which holds what it must not weigh: a NaN


# ------------------------------------------------------------------------------------------------ caches


@pytest.mark.parametrize("cache", [KVCache, WindowCache], ids=["full", "ring"])
def test_a_step_sees_what_a_call_of_one_token_sees(cache):
    """`step` against `extend` on random rows with documents and padding: the same cache, the same visible keys."""
    batch, slots, heads, dim, window = 4, 12, 2, 3, 5
    state = cache.zeros(batch, window if cache is WindowCache else slots, heads, dim, dim, jnp.float32)
    rng = np.random.default_rng(2)
    clock = Clock.zeros(batch)
    options = dict(window=window) if cache is WindowCache else {}

    @jax.jit
    def both(state, clock, ids, q, k, v):
        ctx, after = enter(Context(jnp.zeros_like(ids), ids), clock, batch, 1)
        call, seen = state.extend(k, v, ctx)
        expected = attention(
            q, seen.k, seen.v, q_positions=ctx.time, kv_positions=seen.times, kv_segment_ids=seen.documents,
            segment_ids=ctx.segment_ids, **options,
        )  # fmt: skip
        step, seen = state.step(k, v, ctx)
        found = attention(q, seen.k, seen.v, q_positions=seen.now, kv_positions=seen.times, **options)
        return call, step, expected, found, after

    for _ in range(slots):
        ids = jnp.asarray(rng.choice([0, 1, 1, 1, 2], (batch, 1)), jnp.int32)
        q, k, v = (jnp.asarray(rng.normal(size=(batch, 1, heads, dim)), jnp.float32) for _ in range(3))
        call, state, expected, found, clock = both(state, clock, ids, q, k, v)
        jax.tree.map(np.testing.assert_array_equal, state, call)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert not np.any(np.asarray(found)[np.asarray(ids) == 0])
