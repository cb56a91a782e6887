"""Checkpoints where the world is bad: processes killed with -9, full and read-only disks, damaged files, other devices.

Each fault is a real one, in a process of its own where that matters (checkpoint_process.py).
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_process import digest, mesh_of, random_bits, shard_largest, state_of, train_state_shapes

from hyjax.train import tree_io
from hyjax.train.checkpoint import Checkpointer, CheckpointError
from hyjax.train.step_folder import UNFINISHED

# What tensorstore and asyncio leave behind when a damaged file is read, or a write fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SCRIPT = Path(__file__).with_name("checkpoint_process.py")


def command(*words):
    return [sys.executable, str(SCRIPT), *map(str, words)]


def environment(devices=1):
    return os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}


def run(*words, devices=1, before=()):
    words = [*before, *command(*words)]
    done = subprocess.run(words, env=environment(devices), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "orbax" not in done.stderr  # its tracebacks, of what is raised as one sentence
    return json.loads(done.stdout)


# ------------------------------------------------------------------------------------------------ kill -9

MEGABYTES = 48  # enough that a save takes a while


def wait_for(condition, process):
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.001)


def names(folder, part=""):
    return [path.name for path in folder.iterdir() if part in path.name] if folder.exists() else []


def killed(folder, moment):
    """Starts training, kills it at that moment; returns the lines that it had printed."""
    words = command("train", folder, 10**6, MEGABYTES)
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as job:
        first = job.stdout.readline()
        moment(job)
        job.kill()
        return (first + job.stdout.read()).split("\n")


def whole(folder):
    """The step that a restart would go on from, whose every number is right; 0 where it starts anew."""
    found = Checkpointer(folder).restore_latest(jax.eval_shape(lambda: state_of(0, MEGABYTES)))
    if found is None:
        return 0
    jax.tree.map(np.testing.assert_array_equal, found.state, state_of(found.step, MEGABYTES))
    return found.step


def committed(folder, step):
    return lambda job: wait_for(lambda: str(step) in names(folder), job)


def at_random(job):
    """At some moment in the next saves; a start is paid for once, so a few."""
    time.sleep(random.uniform(0, 1))


def test_kill_9_during_the_first_save(tmp_path, caplog):
    folder = tmp_path / "checkpoints"
    lines = killed(folder, lambda job: wait_for(lambda: names(folder, UNFINISHED), job))
    assert lines[0] == "start 0"
    assert len(names(folder, UNFINISHED)) == len(names(folder)) == 1  # killed before it was finished
    assert whole(folder) == 0
    assert "this save was not finished; ignored" in caplog.text


def kill_and_go_on(folder, moments):
    before = 0
    for moment in moments:
        lines = killed(folder, moment)
        assert lines[0] == f"start {before}"
        now = whole(folder)
        copied = max([int(line.split()[1]) for line in lines if line.startswith("saved")], default=before)
        # Each save waits for the one before to be verified: no more is lost than the one under way.
        assert max(before, copied - 1) <= now <= copied + 1
        before = now
    words = command("train", folder, before + 2, MEGABYTES)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == [f"start {before}", f"saved {before + 1}"], done.stderr
    assert whole(folder) == before + 2
    assert names(folder) == [str(before + 2)]  # keep=1, and nothing unfinished is left


def test_kill_9_between_commit_and_verification_and_at_random(tmp_path):
    folder = tmp_path / "checkpoints"
    kill_and_go_on(folder, [committed(folder, 2), at_random])


@pytest.mark.slow
def test_kill_9_at_many_moments(tmp_path):
    kill_and_go_on(tmp_path / "checkpoints", [at_random] * 12)


# ------------------------------------------------------------------------------------------------ disks


def test_a_file_size_limit(tmp_path):
    """P19: the failure of a background write surfaces by itself, once; the step before stays though keep=1."""
    said = run("file_size_limit", tmp_path / "c")
    assert said["first"] == f"step 2 was not written to {tmp_path / 'c'}: File too large; step 1 is intact"
    assert said["again"] == ""
    assert (said["listing"], said["newest"]) == (["1"], [1, 1])
    assert said["after"] == [["3"], [3, 3]]


def test_a_full_disk_and_a_read_only_one(tmp_path):
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs "$0" && exec "$@"', str(tmp_path)]
    possible = subprocess.run([*mount, "true"], capture_output=True, text=True) if shutil.which("unshare") else None
    if possible is None or possible.returncode:
        pytest.skip(f"no file system can be mounted here: {possible.stderr.strip() if possible else 'no unshare'}")
    said = run("small_disk", tmp_path, before=mount)
    place = tmp_path / "run"
    assert said["at start"] == f"2 checkpoints (those kept and one more) need 21.3 MB in {place} and 16.8 MB are free"
    message, listing = said["before"]
    assert message == f"a checkpoint needs 5.3 MB in {place} and 3.1 MB are free"
    assert listing == ["1"]  # nothing was written
    message, listing, newest = said["during"]
    assert message == f"step 2 was not written to {place}: No space left on device; step 1 is intact"
    assert (listing, newest) == (["1"], [1, 1])
    assert said["after"] == [["3"], [3, 3]]
    assert said["read-only"] == [
        f"checkpoints can't be written to {place}: Read-only file system",
        f"checkpoints can't be written to {tmp_path / 'other'}: Read-only file system",
        f"step 4 was not written to {place}: Read-only file system; step 3 is intact",
        [3, 3],  # reading needs no writing
    ]


def test_a_folder_that_is_a_file_or_forbidden(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"can't be written to .*/file/c: .*/file is a file$"):
        Checkpointer(tmp_path / "file" / "c").check_writable()
    with pytest.raises(CheckpointError, match=r"/file is a file$"):
        Checkpointer(tmp_path / "file").check_writable()

    locked = tmp_path / "locked"
    locked.mkdir()
    Checkpointer(locked).check_writable()
    assert not list(locked.iterdir())
    locked.chmod(0)
    root = os.geteuid() == 0  # whom no permission stops: be nobody for a moment
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"can't be written to .*/locked: Permission denied$"):
            Checkpointer(locked).check_writable()
        with pytest.raises(CheckpointError, match=r"/locked can't be read: Permission denied$"):
            Checkpointer(locked).restore_latest({})
    finally:
        if root:
            os.seteuid(0)
        locked.chmod(0o755)


# ------------------------------------------------------------------------------------------------ damage


def tiny(step):
    numbers = jnp.arange(1024, dtype=jnp.float32).reshape(32, 32) * (1 + step)
    return {"params": {"kernel": numbers, "half": numbers.astype(jnp.bfloat16)}, "step": jnp.int32(step)}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with steps 3 and 7, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("two") / "c"
    checkpointer = Checkpointer(folder)
    for step in (3, 7):
        checkpointer.save(step, tiny(step), {"config": {"width": 16}, "at": step})
    checkpointer.close()
    return folder


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def check_newest(folder):
    """Whatever is chosen is right to the last bit; returns (step, reason that a newer one was skipped)."""
    found = Checkpointer(folder).restore_latest(tiny(0))
    jax.tree.map(np.testing.assert_array_equal, found.state, tiny(found.step))
    assert found.extra == {"config": {"width": 16}, "at": found.step}
    return found.step, "".join(skip.reason for skip in found.skipped)


def test_any_file_missing_truncated_or_with_one_byte_changed(two_steps, tmp_path):
    """Either the step is whole all the same, or it is skipped with a reason and the step before is used."""
    rng = random.Random(0)
    chosen = {}
    for name in files_of(two_steps / "7"):
        for fault in ("missing", "empty", "half", "byte", "byte", "byte"):
            folder = tmp_path / "c"
            shutil.copytree(two_steps, folder)
            file = folder / "7" / name
            content = bytearray(file.read_bytes())
            if fault == "missing":
                file.unlink()
            elif fault == "byte" and content:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
                file.write_bytes(content)
            else:
                file.write_bytes(content[: len(content) // 2 if fault == "half" else 0])
            step, why = check_newest(folder)
            assert (step, bool(why)) in [(7, False), (3, True)]
            chosen.setdefault(step, set()).add((fault, name.split("/")[-1]))
            shutil.rmtree(folder)
    assert {("missing", "_CHECKPOINT_METADATA"), ("missing", "_METADATA"), ("half", "metadata")} <= chosen[3]
    assert ("missing", "VERIFIED") in chosen[7]


def flip(folder, array):
    """Changes one bit of the array's bytes where they lie on disk."""
    needle = np.asarray(array).tobytes()
    for path in folder.rglob("*"):
        if path.is_file() and (place := path.read_bytes().find(needle)) >= 0:
            content = bytearray(path.read_bytes())
            content[place + 5] ^= 1
            path.write_bytes(content)
            return
    raise AssertionError("not found: is it compressed?")


def test_one_silent_bit_is_found_and_named(two_steps, tmp_path):
    """In the numbers themselves, where neither a file system nor Orbax would notice."""
    shutil.copytree(two_steps, tmp_path / "c")
    flip(tmp_path / "c" / "7", tiny(7)["params"]["kernel"])
    step, why = check_newest(tmp_path / "c")
    assert (step, why) == (3, "params/kernel differs from what was saved")
    with pytest.raises(ValueError, match=r"step 7 in .* can't be read: params/kernel differs"):
        Checkpointer(tmp_path / "c").restore(7, tiny(0))
    part = {"params": {"half": tiny(0)["params"]["half"]}}  # only what is read is compared, names and all
    with pytest.raises(ValueError, match="it holds params/kernel, which is not wanted"):
        Checkpointer(tmp_path / "c").restore(7, part, partial=True)


def test_a_bit_that_changes_on_its_way_to_the_disk(tmp_path, monkeypatch):
    """Reading back finds it, while training goes on; the step does not count, and the one before stays."""
    checkpointer = Checkpointer(tmp_path / "c", keep=1)
    checkpointer.save(1, tiny(1), {})
    checkpointer.wait()
    monkeypatch.setattr(tree_io, "drop_from_cache", lambda folder: flip(folder, tiny(2)["params"]["half"]))
    checkpointer.save(2, tiny(2), {})
    message = r"^step 2 was written but can't be read back from .*/c: params/half differs from .*; step 1 is intact$"
    with pytest.raises(CheckpointError, match=message):
        checkpointer.wait()
    assert checkpointer.steps() == [1, 2]
    assert not checkpointer.is_verified(2)
    assert Checkpointer(tmp_path / "c").restore_latest(tiny(0)).step == 1


def test_a_step_under_another_number_is_not_that_step(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "c")
    shutil.copytree(two_steps / "3", tmp_path / "c" / "9")
    assert check_newest(tmp_path / "c") == (7, "it holds step 3")


# ------------------------------------------------------------------------------------------------ other devices


def test_saved_on_eight_devices_restored_on_one_two_and_eight(tmp_path):
    """P14. Each leaf sharded along its largest divisible dim; the 1 and 2 are real processes, which save in turn."""
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    folder = tmp_path / "c"
    mesh = mesh_of(data=2, fsdp=4)
    shapes = shard_largest(train_state_shapes(), mesh, "fsdp")
    assert sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(shapes)) > 20
    state = random_bits(shapes, seed=0)
    checkpointer = Checkpointer(folder, keep=9)
    checkpointer.save(1, state, {})
    checkpointer.close()
    same = {"digest": digest(state), "placed": True}
    assert run("reshard", folder, 1, 2, devices=1) == {"step": 1, **same}
    assert run("reshard", folder, 2, 3, devices=2) == {"step": 2, **same}
    for step, other in ((1, shard_largest(shapes, mesh_of(data=8), "data")), (2, shapes), (3, shapes)):
        found = Checkpointer(folder).restore(step, other)
        assert digest(found.state) == same["digest"]
        placed = [leaf.sharding for leaf in jax.tree.leaves(found.state)]
        assert placed == [leaf.sharding for leaf in jax.tree.leaves(other)]
