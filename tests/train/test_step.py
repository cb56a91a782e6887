"""The train step: exact token weighting however rows are split, sharding, refusal of non-finite updates."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from stand_in import BASE, LENGTH, Bigram, make_batch

from hyjax.train import optimizer as optimizers
from hyjax.train.step import (
    create_state,
    diagnose,
    first_bad_tensor,
    loss_and_grads,
    make_eval_step,
    make_train_step,
    replicate,
    split_rows,
)

CONFIG = BASE | dict(clip_norm=0.1, weight_decay=0.1, schedule="cosine", warmup_steps=2)
MODEL = Bigram()
RAGGED = make_batch([1, 2, 3, 4, 5, 6, 6, 1])


def new_state(config=CONFIG):
    params = MODEL.init()
    return create_state(params, optimizers.build(config, 10, params), jax.random.key(3))


@functools.cache
def step_function(microbatches=1, shards=0):
    config = CONFIG
    optimizer = optimizers.build(config, 10, MODEL.init())
    mesh = Mesh(np.array(jax.devices()[:shards]), ("data",)) if shards else None
    return make_train_step(MODEL, optimizer, optimizers.schedule(config, 10), microbatches, mesh), mesh


@jax.jit
def plain(params, batch):
    """The definition, on all rows at once: gradient of (sum of losses and z-losses) / (sum of weights)."""

    def mean(params):
        loss, aux = MODEL.loss({"params": params}, batch)
        return (loss + aux["z_loss"]) / aux["weight"], (loss / aux["weight"], aux)

    return jax.grad(mean, has_aux=True)(params)


def assert_trees_close(actual, expected, tolerance=1e-6):
    """Every leaf within `tolerance` of the expected leaf's largest value."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        error = np.max(np.abs(a.astype(np.float64) - b)) / max(np.max(np.abs(b)), 1e-12)
        assert error < tolerance, f"{jax.tree_util.keystr(path)}: {error}"


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("valid", [[1, 2, 3, 4, 5, 6, 6, 1], [0, 6, 0, 3, 0, 2, 0, 1]], ids=["ragged", "empty"])
def test_gradient_is_that_of_the_whole_batch_however_it_is_split(microbatches, valid):
    batch = make_batch(valid)  # "empty": with 2, 4 or 8 microbatches some hold no valid token
    params = MODEL.init()
    metrics, grads = jax.jit(functools.partial(loss_and_grads, MODEL, microbatches=microbatches))(params, batch)
    expected, (loss, aux) = plain(params, batch)
    assert_trees_close(grads, expected)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["z_loss"], aux["z_loss"] / sum(valid), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], aux["correct"] / sum(valid), rtol=1e-6)
    assert metrics["weight"] == sum(valid)


@pytest.mark.parametrize("shards,microbatches", [(1, 2), (2, 1), (4, 1), (4, 2)])
def test_data_shards_do_not_change_the_step(shards, microbatches):
    if jax.device_count() < shards:
        pytest.skip(f"needs {shards} devices")
    single, _ = step_function()
    sharded, mesh = step_function(microbatches, shards)
    one, many = new_state(), replicate(new_state(), mesh)
    for seed in (0, 1):  # two updates: the second sees the first one's moments and clipped parameters
        batch = make_batch([1, 2, 3, 4, 5, 6, 0, 1], seed)
        one, expected = single(one, batch)
        many, actual = sharded(many, batch)
    assert_trees_close(actual, expected)
    # Adam divides by the gradient's own size, which amplifies rounding where a gradient is near zero.
    assert_trees_close(many.params, one.params, 1e-5)
    assert_trees_close(many.opt_state, one.opt_state, 1e-5)
    assert expected["grad_norm"] > CONFIG["clip_norm"]


def test_batch_without_a_valid_token_has_gradient_zero():
    for microbatches in (1, 4):
        metrics, grads = jax.jit(functools.partial(loss_and_grads, MODEL, microbatches=microbatches))(
            MODEL.init(), make_batch([0] * 8)
        )
        assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))
        assert metrics == {"loss": 0, "z_loss": 0, "accuracy": 0, "weight": 0}


def test_microbatches_take_every_mth_row():
    split = split_rows({"tokens": np.arange(8)}, 2)
    np.testing.assert_array_equal(split["tokens"], [[0, 2, 4, 6], [1, 3, 5, 7]])
    with pytest.raises(ValueError, match=r"train.microbatches=3 must divide the batch's 8 rows"):
        split_rows({"tokens": np.arange(8)}, 3)
    if jax.device_count() >= 4:
        step, mesh = step_function(2, 4)
        with pytest.raises(ValueError, match=r"train.batch_size=12 must be a multiple of 8"):
            step(replicate(new_state(), mesh), make_batch([1] * 12))


def test_steps_metrics_and_schedule_units():
    """Steps, Adam's count and the learning rate advance once per update, whatever the number of microbatches."""
    for microbatches in (1, 4):
        step, _ = step_function(microbatches)
        state, rates = new_state(), []
        for _ in range(4):
            state, metrics = step(state, RAGGED)
            rates.append(float(metrics["learning_rate"]))
        expected = [float(optimizers.schedule(CONFIG, 10)(s)) for s in range(4)]
        np.testing.assert_allclose(rates, expected, rtol=1e-6)
        assert expected[0] == pytest.approx(CONFIG["learning_rate"] / 2) and expected[1] > expected[3]
        assert int(state.step) == 4 and int(state.skipped) == 0
        counts = [x for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32]
        assert counts and all(int(c) == 4 for c in counts)
        assert set(metrics) == {
            "loss",
            "z_loss",
            "accuracy",
            "weight",
            "grad_norm",
            "learning_rate",
            "non_finite",
        }
        assert all(m.shape == () for m in metrics.values()) and metrics["non_finite"] == 0
    # The update really used that rate: with no decay Adam's first update is -rate · sign(gradient).
    config = CONFIG | dict(weight_decay=0.0, clip_norm=0.0)
    params = MODEL.init()
    optimizer = optimizers.build(config, 10, params)
    step = make_train_step(MODEL, optimizer, optimizers.schedule(config, 10))
    state, metrics = step(create_state(params, optimizer, jax.random.key(0)), RAGGED)
    moved = np.abs(np.asarray(state.params["head"]["kernel"] - MODEL.init()["head"]["kernel"]))
    np.testing.assert_allclose(moved, metrics["learning_rate"], rtol=1e-3)


def test_loss_falls_and_grad_norm_is_before_clipping():
    step, _ = step_function()
    state, losses = new_state(), []
    _, grads = jax.jit(functools.partial(loss_and_grads, MODEL))(MODEL.init(), RAGGED)
    for _ in range(10):
        state, metrics = step(state, RAGGED)
        losses.append(float(metrics["loss"]))
        if len(losses) == 1:
            norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
            assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)
            assert norm > CONFIG["clip_norm"]
    assert losses[-1] < losses[0] - 0.1


def test_a_non_finite_step_changes_nothing_and_later_steps_neither():
    step, _ = step_function()
    state, _ = step(new_state(), RAGGED)
    before = jax.tree.map(np.array, state)
    poison = dict(RAGGED, weights=np.where(np.arange(LENGTH) == 2, np.float32(np.inf), RAGGED["weights"]))
    state, metrics = step(state, poison)
    assert int(metrics["non_finite"]) > 0
    state, metrics = step(state, RAGGED)  # a good batch after the fault: still refused
    assert int(metrics["non_finite"]) == 0
    assert int(state.skipped) == 2
    assert_trees_close(state.replace(skipped=before.skipped), before, 1e-30)
    assert diagnose(MODEL, state.params, RAGGED) is None
    assert diagnose(MODEL, state.params, poison) == "metrics/loss"


def test_the_first_bad_tensor_is_named():
    params = MODEL.init()
    assert first_bad_tensor(params) is None
    bad = jax.tree.map(lambda x: x, params)
    bad["layers"]["G"]["mixer"]["q"]["kernel"] = params["layers"]["G"]["mixer"]["q"]["kernel"].at[1, 2].set(jnp.nan)
    bad["layers"]["G"]["norm"]["scale"] = params["layers"]["G"]["norm"]["scale"].at[0].set(jnp.inf)
    assert first_bad_tensor({"grads": bad}) == "grads/layers/G/mixer/q/kernel"
    assert diagnose(MODEL, bad, RAGGED) == "params/layers/G/mixer/q/kernel"

    # Finite parameters whose logits overflow: infinity - infinity in the cross-entropy.
    huge = params | {"head": {"kernel": params["head"]["kernel"] * 1e38, "bias": params["head"]["bias"]}}
    huge["embed"] = {"embedding": params["embed"]["embedding"] * 1e3}
    assert re.match(
        r"metrics/loss \(nan generated by primitive: \w+, .*stand_in.py:\d+ \(.*loss\)\)",
        diagnose(MODEL, huge, RAGGED),
    )

    class BadGradient(Bigram):
        """Finite loss; the gradient of sqrt(x²) at x = 0, formed naively, is not."""

        def loss(self, variables, batch):
            total, aux = super().loss(variables, batch)
            return total + 0 * jnp.sqrt(jnp.sum((0 * variables["params"]["head"]["bias"]) ** 2)), aux

    assert diagnose(BadGradient(), params, RAGGED, microbatches=2) == "grads/head/bias"


def test_eval_sums_add_up_over_ragged_batches():
    eval_step = make_eval_step(MODEL)
    params = MODEL.init()
    valid = [1, 2, 3, 4, 5, 6, 6, 0]
    batch = make_batch(valid)
    halves = [{k: v[i : i + 4] for k, v in batch.items()} for i in (0, 4)]
    sums = [eval_step(params, half) for half in halves]
    _, (loss, aux) = plain(params, batch)
    assert sum(float(s["weight"]) for s in sums) == sum(valid)
    np.testing.assert_allclose(sum(float(s["loss"]) for s in sums) / sum(valid), loss, rtol=1e-6)
    np.testing.assert_allclose(sum(float(s["correct"]) for s in sums), aux["correct"])
    if jax.device_count() >= 4:
        mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
        whole = make_eval_step(MODEL, mesh)(replicate(params, mesh), batch)
        np.testing.assert_allclose(whole["loss"], loss * sum(valid), rtol=1e-6)
