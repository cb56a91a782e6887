"""Checkpoints: exact round trips, damaged and unfinished steps, differences that must raise, verification, retention.

What needs a process, a disk or other devices of its own is in test_checkpoint_faults.py.
"""

import functools
import random
import shutil
import threading
import time
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_process import train_state_shapes
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax import checkpoint as ocp
from orbax.checkpoint import JsonCheckpointHandler
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals
from stand_in import BASE, Bigram, make_batch

from hyjax.train import optimizer as optimizers
from hyjax.train import tree_io
from hyjax.train.checkpoint import Checkpointer, CheckpointError
from hyjax.train.optimizer import require_float32
from hyjax.train.retention import kept
from hyjax.train.step import create_state, make_train_step

# What tensorstore and asyncio leave behind when a damaged file is read, or a write fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
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


def test_the_newest_step_that_loads_counts_and_later_saves_happen(tmp_path):
    directory = tmp_path / "c"
    save(directory, [1, 2, 3, 4, 5])
    truncate(directory / "3")
    (directory / "4" / "state" / "_METADATA").unlink()
    (directory / "5" / "extra" / "metadata").write_text('{"config"')
    (directory / "6").mkdir()
    (directory / "7.orbax-checkpoint-tmp").mkdir()

    checkpointer = Checkpointer(directory, keep=2)
    found = checkpointer.restore_latest(small())
    assert found.step == 2
    assert [skip.step for skip in found.skipped] == [6, 5, 4, 3]
    reasons = [skip.reason for skip in found.skipped]
    assert reasons[:2] == ["6/_CHECKPOINT_METADATA is missing", "extra/metadata is not JSON"]
    assert reasons[2].startswith("state/_METADATA can't be read: ")
    assert reasons[3].startswith("params/kernel can't be read: ")
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
    (tmp_path / "c" / "1" / "VERIFIED").unlink()
    checkpointer = Checkpointer(tmp_path / "c")
    found = checkpointer.restore_latest({"params": jax.eval_shape(small)["params"]}, partial=True)
    assert_same(found.state, {"params": small(1)["params"]})
    assert not checkpointer.is_verified(1)  # not all of it was compared
    checkpointer.restore_latest(small())
    assert checkpointer.is_verified(1)
    with pytest.raises(ValueError, match="it holds step, which is not wanted"):
        Checkpointer(tmp_path / "c").restore_latest({"params": small()["params"]})


def test_a_save_that_would_be_dropped_raises(tmp_path):
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(5, small(), EXTRA)
    for step in (5, 4):
        with pytest.raises(CheckpointError, match=f"step {step} was not saved to .*: step 5 is already there"):
            checkpointer.save(step, small(), EXTRA)
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpointer.save(6, small(), {"path": tmp_path})
    checkpointer.close()
    assert Checkpointer(tmp_path / "c").restore_latest(small()).step == 5


def poll_until_done(checkpointer):
    """As a loop does after every step."""
    end = time.monotonic() + 30
    while checkpointer._job is not None and time.monotonic() < end:
        checkpointer.poll()
        time.sleep(0.005)


def test_a_failed_background_save_surfaces_at_a_later_step_and_the_next_save_works(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    checkpointer.save(1, small(1), EXTRA)
    checkpointer.wait()

    async def disk_full():
        raise OSError("No space left on device")

    async def async_save(*args, **kwargs):
        return [CommitFutureAwaitingContractedSignals(disk_full(), name="extra")]

    message = r"^step 2 was not written to .*/c: No space left on device; step 1 is intact$"
    with monkeypatch.context() as patch:
        patch.setattr(JsonCheckpointHandler, "async_save", async_save)
        checkpointer.save(2, small(2), EXTRA)
        with pytest.raises(CheckpointError, match=message):
            poll_until_done(checkpointer)
        checkpointer.poll()  # it is told once
        checkpointer.save(2, small(2), EXTRA)
        with pytest.raises(CheckpointError, match=message):
            checkpointer.save(3, small(3), EXTRA)  # or by the next save
    assert Checkpointer(tmp_path / "c").restore_latest(small()).step == 1  # untouched, though keep=1
    checkpointer.save(3, small(3), EXTRA)
    checkpointer.close()
    assert Checkpointer(tmp_path / "c").restore_latest(small()).step == 3


def test_polling_does_not_wait(tmp_path, monkeypatch):
    """Nor is an older step deleted before the next one is verified, though keep=1."""
    directory, go = tmp_path / "c", threading.Event()
    checkpointer = Checkpointer(directory, keep=1)
    checkpointer.save(1, small(1), EXTRA)
    checkpointer.wait()
    compare = tree_io.compare
    monkeypatch.setattr(tree_io, "compare", lambda *args: (go.wait(30), compare(*args)))
    checkpointer.save(2, small(2), EXTRA)
    while not (directory / "2").exists():
        time.sleep(0.005)
    begin = time.monotonic()
    for _ in range(100):
        checkpointer.poll()
    assert time.monotonic() - begin < 1
    assert checkpointer.steps() == [1, 2]
    assert [checkpointer.is_verified(step) for step in (1, 2)] == [True, False]
    go.set()
    poll_until_done(checkpointer)
    assert checkpointer.steps() == [2]
    assert checkpointer.is_verified(2)
    checkpointer.close()


def test_what_was_written_wrongly_is_found_by_reading_it_back(tmp_path, monkeypatch):
    directory = tmp_path / "c"
    checkpointer = Checkpointer(directory, keep=1)
    checkpointer.save(1, small(1), EXTRA)
    checkpointer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(tree_io, "drop_from_cache", truncate)  # between writing and reading back
        checkpointer.save(2, small(2), EXTRA)
        with pytest.raises(
            CheckpointError, match=r"^step 2 was written but .* from .*/c: params/kernel .*step 1 is in"
        ):
            poll_until_done(checkpointer)
        unchecked = Checkpointer(tmp_path / "d", verify=False)
        unchecked.save(1, small(1), EXTRA)
        unchecked.close()
    assert not unchecked.is_verified(1)
    found = Checkpointer(directory).restore_latest(small())
    assert (found.step, [skip.step for skip in found.skipped]) == (1, [2])
    checkpointer.save(3, small(3), EXTRA)
    checkpointer.close()
    assert sorted(path.name for path in directory.iterdir()) == ["3", "unreadable-2-0"]
    for step in (1, 2, 3):
        unchecked.save(step + 1, small(step + 1), EXTRA)
    unchecked.close()
    assert unchecked.steps() == [3, 4]  # without verification the newest written count


# ------------------------------------------------------------------------------------------------ retention


def test_which_steps_are_kept():
    """Against the definition, step by step, over random runs."""
    rng = random.Random(0)
    for _ in range(300):
        steps = rng.sample(range(60), rng.randrange(1, 12))
        losses = {step: rng.choice([None, float("nan"), 1.0, 2.0, 3.0, rng.random()]) for step in steps}
        last, every, best = rng.randrange(1, 4), rng.choice([0, 5, 7]), rng.randrange(4)

        def better(a, b, losses=losses):  # a stands before b among the best
            return (losses[a], -a) < (losses[b], -b)

        measured = [step for step in steps if losses[step] is not None and losses[step] == losses[step]]
        expected = {
            step
            for step in steps
            if sum(other > step for other in steps) < last
            or (every and step % every == 0)
            or (step in measured and sum(better(other, step) for other in measured if other != step) < best)
        }
        assert kept(losses, last, every, best) == expected


def test_retention_across_restarts_and_around_damage(tmp_path):
    """Every line is a process: what it saves, with which loss, and which steps are there at its end."""
    directory = tmp_path / "c"

    def attempt(losses):
        checkpointer = Checkpointer(directory, keep=2, keep_every=10, keep_best=1)
        found = checkpointer.restore_latest(small())
        for step, loss in losses.items():
            checkpointer.save(step, small(step), EXTRA, {} if loss is None else {"loss": loss})
        checkpointer.close()
        return found and found.step, checkpointer.steps()

    assert attempt({3: 2.0, 4: 1.0, 5: 3.0, 6: None, 7: float("nan")}) == (None, [4, 6, 7])
    assert attempt({8: 0.5, 10: 4.0, 12: 4.0}) == (7, [8, 10, 12])
    assert attempt({14: None}) == (12, [8, 10, 12, 14])
    # 14 damaged: its place is taken by no good step, and what was moved aside counts for nothing.
    truncate(directory / "14")
    assert attempt({14: None}) == (12, [8, 10, 12, 14])
    assert attempt({16: None}) == (14, [8, 10, 14, 16])
    # A crash came between 18's commit and its verification: it is verified by the restore, and then marked.
    assert attempt({18: None}) == (16, [8, 10, 16, 18])
    (directory / "18" / "VERIFIED").unlink()
    assert attempt({19: None}) == (18, [8, 10, 18, 19])
    assert (directory / "18" / "VERIFIED").exists()
    assert attempt({20: 0.1, 21: 0.2, 22: None}) == (19, [10, 20, 21, 22])


def test_an_unverified_step_takes_no_place_of_a_verified_one(tmp_path):
    """A crash came before 2 was verified, and nobody has noticed, as 3 is whole."""
    save(tmp_path / "c", [1, 2, 3], keep=3)
    (tmp_path / "c" / "2" / "VERIFIED").unlink()
    save(tmp_path / "c", [4], keep=3)
    assert Checkpointer(tmp_path / "c").steps() == [1, 2, 3, 4]
    save(tmp_path / "c", [5], keep=3)
    assert Checkpointer(tmp_path / "c").steps() == [3, 4, 5]


# ------------------------------------------------------------------------------------------------ what a restart finds


def test_must_resume_and_folders_without_a_step(tmp_path, caplog):
    directory = tmp_path / "c"
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*/c to go on from"):
        Checkpointer(directory).restore_latest(small(), must=True)
    (directory / "1.orbax-checkpoint-tmp" / "state").mkdir(parents=True)  # killed during the very first save
    assert Checkpointer(directory).restore_latest(small()) is None
    assert "1.orbax-checkpoint-tmp: this save was not finished; ignored" in caplog.text
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*/c to go on from"):
        Checkpointer(directory).restore_latest(small(), must=True)
    save(directory, [1])  # and goes on from there
    assert Checkpointer(directory).restore_latest(small(), must=True).step == 1
    (directory / "1").rename(directory / "unreadable-1-0")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read \(unreadable-1-0 was moved aside\)"):
        Checkpointer(directory).restore_latest(small())


def test_a_checkpoint_from_before_there_were_checksums(tmp_path, caplog):
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(small(4)), extra=ocp.args.JsonSave(EXTRA))
    with ocp.CheckpointManager(tmp_path / "c") as manager:
        manager.save(4, args=items)
    found = Checkpointer(tmp_path / "c").restore_latest(small())
    assert (found.step, found.extra) == (4, EXTRA)
    assert_same(found.state, small(4))
    assert "has no checksums" in caplog.text
    save(tmp_path / "c", [5, 6], keep=2)
    assert Checkpointer(tmp_path / "c").steps() == [5, 6]


def test_the_disk_s_room_is_checked(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    state = {"params": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}  # 4 MB; with the margin 5.13 MB
    checkpointer = Checkpointer(tmp_path / "c", keep=2, keep_best=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 20_500_000))
    with pytest.raises(CheckpointError, match=r"^4 checkpoints .* need 20\.5 MB in .*/c and 20\.5 MB are free$"):
        checkpointer.check_space(state)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 20_600_000))
    checkpointer.check_space(state)
    checkpointer.check_space(state, copies=1)
    save(tmp_path / "c", [1, 2])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 10_300_000))
    checkpointer.check_space(state)  # two of the four are there
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1_000_000))
    with pytest.raises(CheckpointError, match=r"^a checkpoint needs 1\.0 MB in .* and 1\.0 MB are free$"):
        checkpointer.save(3, small(), EXTRA)
    left = tmp_path / "c" / "9.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "data").write_bytes(bytes(100_000))
    checkpointer.check_space(small(), copies=1)  # what an unfinished save holds will be free
    checkpointer.save(3, small(), EXTRA)
    checkpointer.close()


# ------------------------------------------------------------------------------------------------ real states


def zeros(shapes):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def test_layers_controllers_and_scan(tmp_path):
    """A model of 16 layers takes no state of 12; a router's bias is in it; how a model is run changes nothing."""
    twelve = train_state_shapes(layout="(GGA)*4")
    state = zeros(twelve).replace(controllers={"router_bias": {"E": jnp.arange(16.0).reshape(2, 8)}})
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, state, EXTRA)
    checkpointer.close()
    with pytest.raises(ValueError, match=r"params/layers/A/.* has shape \(4, .* there and \(5, .* here"):
        checkpointer.restore_latest(train_state_shapes(layout="(GGA)*5G"))
    with pytest.raises(ValueError, match="it holds controllers/router_bias/E, which is not wanted"):
        checkpointer.restore_latest(twelve.replace(controllers={}))
    unrolled = train_state_shapes(layout="(GGA)*4", scan=False)
    assert_same(checkpointer.restore_latest(unrolled).state, state)


def test_donated_updates_do_not_reach_a_save_that_is_under_way(tmp_path):
    """P20: 32 MB, six rounds, each followed at once by five updates in the very buffers that were given."""

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state):
        return jax.tree.map(lambda x: x + 1, state)

    state = {"params": {name: jnp.arange(2**22, dtype=jnp.float32) for name in "ab"}, "step": jnp.int32(0)}
    checkpointer = Checkpointer(tmp_path / "c", keep=6)
    for step in range(0, 30, 5):
        checkpointer.save(step, state, EXTRA)
        for _ in range(5):
            state = update(state)
    checkpointer.close()
    for step in range(0, 30, 5):
        found = checkpointer.restore(step, state).state
        assert int(found["step"]) == step
        for leaf in found["params"].values():
            np.testing.assert_array_equal(leaf, np.arange(2**22, dtype=np.float32) + step)


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
