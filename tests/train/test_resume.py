"""A run that is stopped, in every way, and started again, against the same run from start to end: real processes.

Equal means: every record of every attempt (losses, learning rates, gradient norms, checksums of the batches) is the
straight run's for that step, bit for bit, and so is every array of the last checkpoint, Adam's count among them.
"""

import random
import signal
import time

import numpy as np
import pytest

from hyjax.train.metrics import read_records
from hyjax.train.step_folder import read_lists
from tests.train.process import Process, config_file, held, lines, reasons, run, slow

NAMES = ("loss", "grad_norm", "learning_rate", "accuracy", "weight", "batch_crc32")

# What MAKE makes says "called" and then does BODY whenever it is called.
REPLACED = """
from hyjax.train import loop
plain = loop.{make}
def make(*arguments):
    function = plain(*arguments)
    def call(*arguments):
        print("called", flush=True)
        {body}
        return function(*arguments)
    return call
loop.{make} = make
"""
STUCK_EVALUATION = REPLACED.format(make="make_eval_step", body="stuck()")
SLOW_EVALUATION = REPLACED.format(make="make_eval_step", body="time.sleep(0.7)")
STUCK_COMPILATION = REPLACED.format(make="make_train_step", body="stuck()")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two folders of small documents of words."""
    rng = np.random.default_rng(0)
    folders = [tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("text")]
    for folder, words in zip(folders, (["recall", "state", "decay"], ["window", "gate", "token", "key"]), strict=True):
        for i in range(30):
            (folder / f"{i:02}.txt").write_text(" ".join(rng.choice(words, rng.integers(5, 60))))
    return folders


def assert_same_run(workdir, straight):
    expected = {r["step"]: {name: r[name] for name in NAMES} for r in lines(straight) if r["split"] == "train"}
    found = [r for r in lines(workdir) if r["split"] == "train"]
    assert {r["step"] for r in found} == set(expected) == set(range(1, max(expected) + 1))
    for record in found:
        assert {name: record[name] for name in NAMES} == expected[record["step"]], record
    for split in ("heldout", "end"):
        ours, theirs = (
            [_plain(r) for r in read_records(w, split) if r["step"] == max(expected)] for w in (workdir, straight)
        )
        assert ours == theirs
    mine, other = (read_lists(w / "checkpoints" / str(max(expected)))[0] for w in (workdir, straight))
    assert mine == other  # shapes, dtypes and checksums
    assert any(path.endswith("count") for path in mine) and all(leaf.checksum for leaf in mine.values())


def _plain(record):
    return {key: value for key, value in record.items() if key not in ("time", "attempt")}


# ------------------------------------------------------------------------------------------------ one of each, quickly


def test_stopped_in_every_way_it_is_the_same_run(texts, tmp_path):
    """Fourteen steps, saved after 5, 10 and 14, evaluated after 6 and 12; with two workers now and then."""
    train = dict(steps=14, checkpoint_every=5, grace_seconds=12)
    data = dict(packing="best_fit")
    config = config_file(tmp_path / "config.py", texts[0], data=data, train=train, eval=dict(every=6))
    run(config, tmp_path / "straight")
    workdir, go = tmp_path / "run", tmp_path / "go"

    # A signal in a step: it is finished and saved. Meanwhile a second process is refused.
    with Process(config, workdir, "--config.data.workers=2", patch=held(2, go)) as process:
        process.wait_for("holding")
        with Process(config, workdir) as second:
            assert second.code() == 2
            assert "is in use by process" in second.output and "choose another --workdir" in second.output
        sent = process.send(signal.SIGTERM)
        go.touch()
        assert process.code() == 75 and time.monotonic() - sent < 12
    assert "hyjax: stopped: SIGTERM after step 3; the same command goes on from there" in process.output

    # A source of batches that hangs: the watchdog ends the process.
    with Process(config, workdir, "--config.train.stall_seconds=3", patch=held(1, tmp_path / "never")) as process:
        assert process.code() == 76, process.output
    assert "resume   from step 3\n" in process.output
    first, _, stacks = (workdir / "stall-2.txt").read_text().partition("\n")
    assert first.startswith("stalled: phase 'training step', step 4, ") and "(train.stall_seconds is 3)" in first
    assert "in a_slow_source" in stacks and "in a_slow_source" in process.output

    # In an evaluation's compilation: the loop never answers, and the state of step 6 is saved by another thread.
    with Process(config, workdir, patch=STUCK_EVALUATION) as process:
        process.wait_for("called")
        sent = process.send(signal.SIGTERM)
        assert process.code() == 75 and 3.3 < time.monotonic() - sent < 12
    assert "resume   from step 3\n" in process.output and "saved while the loop did not answer" in process.output

    # It was saved before its evaluation, which the run now begins with; between two batches it is stopped again.
    with Process(config, workdir, patch=SLOW_EVALUATION) as process:
        process.wait_for("called\ncalled")  # the first is compiled
        sent = process.send(signal.SIGINT)
        assert process.code() == 130 and time.monotonic() - sent < 12
    assert "resume   from step 6\n" in process.output and "stopped: Ctrl-C after step 6;" in process.output
    assert not read_records(workdir, "heldout")

    # While the training step compiles there is nothing to save: it ends at once.
    with Process(config, workdir, patch=STUCK_COMPILATION) as process:
        process.wait_for("called")
        sent = process.send(signal.SIGTERM)
        assert process.code() == 75 and time.monotonic() - sent < 4
    assert "there was nothing new to save" in process.output
    assert [r["step"] for r in read_records(workdir, "heldout")] == [6]

    # Killed without a word.
    with Process(config, workdir, "--config.data.workers=2", patch=held(5, tmp_path / "never")) as process:
        process.wait_for("holding")
        process.wait_for(workdir / "checkpoints" / "10" / "VERIFIED")
        process.send(signal.SIGKILL)
        assert process.code() == -signal.SIGKILL
    assert "resume   from step 6\n" in process.output and "step 11/14" in process.output

    said = run(config, workdir, "--config.train.resume=must")
    assert "resume   from step 10\n" in said and ", which is gone, is taken over" in said
    assert reasons(workdir) == ["preempted", "stalled", "preempted", "interrupted", "preempted", "done"]
    assert [r["step"] for r in read_records(workdir, "heldout")] == [6, 12, 14]
    assert_same_run(workdir, tmp_path / "straight")


# ------------------------------------------------------------------------------------------------ the long ones


@pytest.fixture(scope="module", params=["windows of one text", "best fit of a mixture", "windows of a mixture"])
def long(request, texts, tmp_path_factory):
    """(config, straight run): forty steps, 0.1 s apart in all that follow, evaluations and checkpoints between."""
    root = tmp_path_factory.mktemp("long")
    data = dict(packing="best_fit" if "best fit" in request.param else "windows")
    if "mixture" in request.param:
        mixture = tuple(f"text:{folder}" for folder in texts)
        data |= dict(source="mixture", path="", mixture=mixture, weights=(0.7, 0.3))
    train = dict(steps=40, checkpoint_every=3, keep_every=10)
    config = config_file(root / "config.py", texts[0], data=data, train=train, eval=dict(every=7))
    run(config, root / "straight")
    return config, root / "straight"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_twenty_steps_a_kill_and_twenty_more(long, workers, tmp_path):
    config, straight = long
    workdir, flag = tmp_path / "run", f"--config.data.workers={workers}"
    with Process(config, workdir, flag, patch=slow(0.1)) as process:
        process.wait_for("step 20/40")
        process.send(signal.SIGKILL)
    run(config, workdir, flag)
    assert_same_run(workdir, straight)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_three_kills_at_random_moments(long, workers, tmp_path):
    """One early, in imports or compilation, two somewhere in the steps, saves and evaluations."""
    config, straight = long
    workdir, flag = tmp_path / "run", f"--config.data.workers={workers}"
    for steps in (0, random.randint(1, 12), random.randint(1, 12)):
        with Process(config, workdir, flag, patch=slow(0.1)) as process:
            killed_after(process, steps, random.uniform(0, 0.4) if steps else random.uniform(0.5, 8))
    run(config, workdir, flag)
    assert_same_run(workdir, straight)


def killed_after(process, steps, seconds):
    """Kills it so long after it has logged so many steps; both are printed, for when the test fails."""
    print(f"killed {seconds:.2f} s after {steps} steps")
    process.wait_for(lambda output: output.count("  train  ") >= steps)
    time.sleep(seconds)
    process.send(signal.SIGKILL)


@pytest.mark.slow
def test_signals_at_random_moments(long, tmp_path):
    """SIGTERM at any moment of a process's life: its code is 75, or 0 if it was done, and nothing is lost."""
    config, straight = long
    workdir = tmp_path / "run"
    for moment in (0.1, *(random.uniform(1, 20) for _ in range(4))):
        with Process(config, workdir, patch=slow(0.1)) as process:
            process.wait_for("begun")
            time.sleep(moment)
            sent = process.send(signal.SIGTERM)
            assert process.code() in (75, 0), (moment, process.output)
            assert time.monotonic() - sent < 20
    run(config, workdir)
    assert_same_run(workdir, straight)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["training step", "evaluation"])
def test_a_real_compilation(phase, texts, tmp_path):
    """Sixteen layers, unrolled, which XLA takes long over: SIGTERM reaches the process inside."""
    model = dict(layout="GAGAGAGAGAGAGAGA", scan=False)
    train = dict(grace_seconds=12)
    config = config_file(tmp_path / "config.py", texts[0], model=model, train=train, eval=dict(every=2))
    which = "make_train_step" if phase == "training step" else "make_eval_step"
    workdir = tmp_path / "run"
    with Process(config, workdir, patch=REPLACED.format(make=which, body="pass"), xla_flags="") as process:
        process.wait_for("called", 600)
        time.sleep(0.5)
        sent = process.send(signal.SIGTERM)
        assert process.code() == 75, process.output
        assert time.monotonic() - sent < 12
    saved = [p.name for p in (workdir / "checkpoints").iterdir()]
    if phase == "training step":
        assert "there was nothing new to save" in process.output and saved == []
    else:
        assert "saved while the loop did not answer" in process.output and saved == ["2"]
