"""Optimizer: which leaves decay, dtypes, clipping, and the schedules at their corners."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from stand_in import BASE, Bigram

from hyjax.train.optimizer import build, decay_list, require_float32, schedule

KERNELS = ["head/kernel", "layers/G/mixer/q/kernel"]


def one_update(config, params, grads, state=None):
    """New parameters and state after one jitted update."""
    optimizer = build(config, 100, params)
    state = optimizer.init(params) if state is None else state

    @jax.jit
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update(params, state, grads)


@pytest.mark.parametrize(
    "names,expected",
    [
        (("kernel",), KERNELS),
        (("head/kernel", "embedding"), ["embed/embedding", "head/kernel"]),
        ((), []),
    ],
)
def test_zero_gradients_move_exactly_the_listed_leaves(names, expected):
    params = Bigram().init()
    moved, _ = one_update(BASE | dict(weight_decay=0.5, decay=names), params, jax.tree.map(jnp.zeros_like, params))
    changed = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, old), new in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(moved), strict=True)
        if not np.array_equal(old, new)
    ]
    assert changed == expected
    decayed, kept = decay_list(params, names)
    assert decayed == expected
    never = {"A_log", "D", "dt_bias", "conv/bias", "conv/weight"}
    assert {path.removeprefix("layers/G/mixer/") for path in kept} >= never
    assert set(decayed).isdisjoint(kept) and len(decayed + kept) == len(jax.tree.leaves(params))
    for path in expected:  # decoupled: w ← w (1 - lr · decay)
        old, new = params, moved
        for key in path.split("/"):
            old, new = old[key], new[key]
        np.testing.assert_allclose(new, old * (1 - 1e-2 * 0.5), rtol=1e-6)


def test_a_name_in_decay_that_no_leaf_has_is_refused_only_when_it_would_matter():
    params = Bigram().init()
    with pytest.raises(ValueError, match=r"'kernels'.*did you mean kernel"):
        build(BASE | dict(weight_decay=0.1, decay=("kernel", "kernels")), 10, params)
    build(BASE | dict(decay=("kernels",)), 10, params)
    assert decay_list(params, ("ernel",))[0] == []  # a name is a whole path component


def test_masters_are_float32_and_do_move():
    params = {"kernel": jnp.ones((3,), jnp.float32)}
    optimizer = build(BASE | dict(learning_rate=6e-4), 100, params)

    @jax.jit
    def run(params):
        def body(carry, _):
            params, state = carry
            grads = jax.tree.map(lambda p: jnp.ones_like(p, jnp.bfloat16).astype(jnp.float32), params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, optimizer.init(params)), None, length=100)[0]

    moved, state = run(params)
    # A constant gradient g has Adam's update lr · g / (|g| + eps) at every step.
    np.testing.assert_allclose(moved["kernel"], 1 - 100 * 6e-4, atol=1e-4)
    require_float32(state, "opt_state")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    with pytest.raises(ValueError, match="params/kernel is bfloat16"):
        build(BASE, 100, {"kernel": jnp.ones((3,), jnp.bfloat16)})


def test_clipping_scales_by_the_global_norm():
    params = {"a": jnp.zeros((2,)), "b": jnp.zeros((2,))}
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([0.0, 4.0])}  # norm 5
    # Adam's first moment after one step is (1 - b1) · clipped gradient.
    for clip, scale in [(1.0, 0.2), (10.0, 1.0), (0.0, 1.0)]:
        _, state = one_update(BASE | dict(clip_norm=clip), params, grads)
        moments = optax.tree_utils.tree_get(state, "mu")
        np.testing.assert_allclose(moments["a"], 0.1 * scale * grads["a"], rtol=1e-6)
        np.testing.assert_allclose(moments["b"], 0.1 * scale * grads["b"], rtol=1e-6)


def test_clipping_and_decay_do_not_change_the_state_tree():
    params = Bigram().init()
    trees = {
        jax.tree.structure([leaf for leaf in jax.tree.leaves_with_path(build(BASE | change, 10, params).init(params))])
        for change in [dict(), dict(clip_norm=1.0), dict(weight_decay=0.1)]
    }
    assert len(trees) == 1


def rate(step, steps=100, **change):
    return float(schedule(BASE | dict(learning_rate=2.0) | change, steps)(step))


def test_schedule_corners():
    assert [rate(s, warmup_steps=4) for s in (0, 1, 3, 4, 99)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    cosine = dict(schedule="cosine", warmup_steps=20)
    assert rate(0, **cosine) == pytest.approx(0.1)
    assert rate(19, **cosine) == rate(20, **cosine) == 2.0
    assert rate(60, **cosine) == pytest.approx(0.2 + 1.8 / 2)  # half way
    assert 0.2 < rate(99, **cosine) < 0.202
    assert rate(100, **cosine) == rate(1000, **cosine) == pytest.approx(0.2)
    assert rate(0, schedule="cosine") == 2.0
    wsd = dict(schedule="wsd", warmup_steps=10, decay_steps=40, final_fraction=0.0)
    assert rate(10, **wsd) == rate(60, **wsd) == 2.0
    assert rate(61, **wsd) == pytest.approx(2.0 * 39 / 40)
    assert rate(80, **wsd) == pytest.approx(1.0)
    assert rate(99, **wsd) == pytest.approx(2.0 / 40)
    assert rate(100, **wsd) == 0.0
    assert rate(80, schedule="wsd") == 2.0 > rate(81, schedule="wsd")  # a fifth of the run unless told


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(schedule="cosin"), "did you mean cosine"),
        (dict(warmup_steps=101), "warmup_steps=101"),
        (dict(schedule="wsd", warmup_steps=50, decay_steps=51), "51 steps of decay"),
        (dict(final_fraction=1.5), "final_fraction=1.5"),
        (dict(learning_rate=float("nan")), "learning_rate=nan"),
    ],
)
def test_schedule_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        schedule(BASE | change, 100)
