"""Checkpoints: exact round trips, damaged and unfinished steps, differences that must raise."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import JsonCheckpointHandler
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals
from stand_in import BASE, Bigram, make_batch

from hyjax.train import optimizer as optimizers
from hyjax.train.checkpoint import Checkpointer
from hyjax.train.optimizer import require_float32
from hyjax.train.step import create_state, make_train_step

MODEL = Bigram()
CONFIG = BASE | dict(clip_norm=1.0, weight_decay=0.1, schedule="wsd", warmup_steps=4, decay_steps=4)
EXTRA = {"config": {"seed": 1, "decay": ["kernel"]}, "fingerprint": "abc"}


@functools.cache
def training():
    optimizer = optimizers.build(CONFIG, 12, MODEL.init())
    return optimizer, make_train_step(MODEL, optimizer, optimizers.schedule(CONFIG, 12))


def new_state():
    return create_state(MODEL.init(), training()[0], jax.random.key(5))


def small(scale=1.0):
    return {"params": {"kernel": jnp.full((2, 3), scale, jnp.float32)}, "step": jnp.int32(2**24 + 1)}


def save(directory, steps, keep=9):
    checkpointer = Checkpointer(directory, keep)
    for step in steps:
        checkpointer.save(step, small(step), EXTRA)
    checkpointer.close()


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_round_trip_is_exact_and_keeps_the_newest(tmp_path):
    save(tmp_path / "c", [1, 2, 3], keep=2)
    found = Checkpointer(tmp_path / "c").restore_latest(jax.eval_shape(small))
    assert (found.step, found.extra, found.skipped) == (3, EXTRA, [])
    assert_same(found.state, small(3))  # 2²⁴ + 1 included, which float32 cannot hold
    assert Checkpointer(tmp_path / "c").steps() == [2, 3]
    assert_same(Checkpointer(tmp_path / "c").restore(2, small()).state, small(2))
    with pytest.raises(ValueError, match=r"no step 1 in .*there are \[2, 3\]"):
        Checkpointer(tmp_path / "c").restore(1, small())


def test_nothing_saved_is_none_and_reading_writes_nothing(tmp_path):
    assert Checkpointer(tmp_path / "c").restore_latest(small()) is None
    assert not (tmp_path / "c").exists()


def truncate(step_directory):
    """Cut every data file of the arrays in half."""
    files = [path for path in step_directory.glob("state/**/d/*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tensorstore, at truncated files
def test_the_newest_step_that_loads_counts_and_later_saves_happen(tmp_path):
    directory = tmp_path / "c"
    save(directory, [1, 2])
    shutil.copytree(directory / "2", directory / "3")
    truncate(directory / "3")
    shutil.copytree(directory / "2", directory / "4")
    (directory / "4" / "state" / "_METADATA").unlink()
    shutil.copytree(directory / "2", directory / "5")
    (directory / "5" / "extra" / "metadata").write_text('{"config"')
    (directory / "6").mkdir()
    (directory / "7.orbax-checkpoint-tmp").mkdir()

    checkpointer = Checkpointer(directory, keep=2)
    found = checkpointer.restore_latest(small())
    assert found.step == 2
    assert [skip.step for skip in found.skipped] == [6, 5, 4, 3]
    assert all(skip.reason for skip in found.skipped)
    assert_same(found.state, small(2))
    assert checkpointer.steps() == [1, 2, 3, 4, 5, 6]  # reading moved nothing

    checkpointer.save(3, small(33), EXTRA)  # not above the damaged folders' numbers
    checkpointer.save(4, small(44), EXTRA)
    checkpointer.close()
    again = Checkpointer(directory)
    found = again.restore_latest(small())
    assert (found.step, found.skipped, again.steps()) == (4, [], [3, 4])
    assert_same(found.state, small(44))
    assert sorted(p.name for p in directory.glob("unreadable-*")) == [f"unreadable-{s}-0" for s in (3, 4, 5, 6)]
    assert not list(directory.glob("*tmp*"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tensorstore, at truncated files
def test_no_readable_step_raises_rather_than_starting_from_zero(tmp_path):
    save(tmp_path / "c", [1])
    truncate(tmp_path / "c" / "1")
    (tmp_path / "c" / "2").mkdir()
    with pytest.raises(RuntimeError, match=r"no checkpoint in .* can be read \(step 2: .*; step 1: "):
        Checkpointer(tmp_path / "c").restore_latest(small())
    with pytest.raises(ValueError, match=r"step 2 in .* can't be read"):
        Checkpointer(tmp_path / "c").restore(2, small())


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda s: s | {"step": jnp.float32(0)}, "step is int32 there and float32 here"),
        (
            lambda s: s | {"params": {"kernel": jnp.zeros((2, 3), jnp.bfloat16)}},
            "params/kernel is float32 there and bfloat16 here",
        ),
        (
            lambda s: s | {"params": {"kernel": jnp.zeros((4, 3))}},
            r"params/kernel has shape \(2, 3\) there and \(4, 3\) here",
        ),
        (
            lambda s: s | {"params": {"kernels": jnp.zeros((2, 3))}},
            "params/kernels is not in it; it holds params/kernel, which is not wanted",
        ),
        (lambda s: s | {"params": s["params"] | {"bias": jnp.zeros(3)}}, "params/bias is not in it"),
    ],
    ids=["int-to-float", "narrower", "shape", "key", "extra-key"],
)
def test_differences_raise_and_name_the_leaf(tmp_path, change, message):
    save(tmp_path / "c", [1])
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path / "c").restore_latest(change(small()))


def test_a_part_of_the_state_can_be_restored(tmp_path):
    save(tmp_path / "c", [1])
    found = Checkpointer(tmp_path / "c").restore_latest({"params": jax.eval_shape(small)["params"]}, partial=True)
    assert_same(found.state, {"params": small(1)["params"]})
    with pytest.raises(ValueError, match="it holds step, which is not wanted"):
        Checkpointer(tmp_path / "c").restore_latest({"params": small()["params"]})


def test_a_save_that_would_be_dropped_raises(tmp_path):
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(5, small(), EXTRA)
    for step in (5, 4):
        with pytest.raises((RuntimeError, ValueError), match=f"{step} .*already"):
            checkpointer.save(step, small(), EXTRA)
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpointer.save(6, small(), {"path": tmp_path})
    checkpointer.close()
    assert Checkpointer(tmp_path / "c").restore_latest(small()).step == 5


def test_a_failed_background_save_surfaces_and_the_next_one_works(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    checkpointer.save(1, small(1), EXTRA)
    checkpointer.wait()

    async def disk_full():
        raise OSError("No space left on device")

    async def async_save(*args, **kwargs):
        return [CommitFutureAwaitingContractedSignals(disk_full(), name="extra")]

    with monkeypatch.context() as patch:
        patch.setattr(JsonCheckpointHandler, "async_save", async_save)
        checkpointer.save(2, small(2), EXTRA)
        with pytest.raises(Exception, match="No space left"):
            checkpointer.wait()
    assert Checkpointer(tmp_path / "c").restore_latest(small()).step == 1  # untouched, though keep=1
    checkpointer.save(3, small(3), EXTRA)
    checkpointer.close()
    assert Checkpointer(tmp_path / "c").restore_latest(small()).step == 3


def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path):
    """Stopped at the corners of warm-up and decay and before the last step; saves race with donated updates."""
    _, step = training()
    batches = [make_batch([6, 5, 4, 3, 2, 1, 1, 6], seed) for seed in range(12)]

    def log(metrics):
        return {name: float(value) for name, value in metrics.items()}

    state, straight = new_state(), []
    for batch in batches:
        state, metrics = step(state, batch)
        straight.append(log(metrics))

    resumed, logs = new_state(), []
    for start, stop in [(0, 4), (4, 8), (8, 11), (11, 12)]:
        checkpointer = Checkpointer(tmp_path / "c")
        if found := checkpointer.restore_latest(jax.eval_shape(new_state)):
            assert found.step == int(found.state.step) == start
            resumed = found.state
            require_float32((resumed.params, resumed.opt_state), "restored")
        for batch in batches[start:stop]:
            resumed, metrics = step(resumed, batch)
            logs.append(log(metrics))
        checkpointer.save(stop, resumed, EXTRA)
        # Updates while the save is under way, in the very buffers it was given.
        for batch in batches[:3]:
            resumed, _ = step(resumed, batch)
        checkpointer.close()
    assert logs == straight
    assert_same(Checkpointer(tmp_path / "c").restore_latest(state).state, state)


def test_the_target_s_sharding_is_taken(tmp_path):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    save(tmp_path / "c", [1])
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data"))
    target = {"params": {"kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=sharding)}}
    kernel = Checkpointer(tmp_path / "c").restore_latest(target, partial=True).state["params"]["kernel"]
    assert kernel.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(kernel, np.ones((2, 3)))
