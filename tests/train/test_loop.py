"""The training loop on a tiny model: what it leaves in its folder, and how it goes on, stops and refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from hyjax import config as configs
from hyjax.config import ConfigError
from hyjax.train import loop
from hyjax.train.metrics import Logger, read_records
from tests.conftest import QUICK_TO_COMPILE

STEPS = 8


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of small documents of words; enough of each side for several batches."""
    rng = np.random.default_rng(0)
    words = ["recall", "state", "decay", "token", "window", "gate"]
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choice(words, 60)))
    return folder


def tiny(text, **sections):
    """A config whose training takes seconds on the tests' eight devices."""
    parts = dict(
        model=dict(layout="GA", width=16, heads=2, ffn_width=16),
        data=dict(source="text", path=str(text), seq_len=32, heldout=0.2),
        optimizer=dict(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1),
        train=dict(steps=STEPS, batch_size=8, log_every=1, checkpoint_every=3),
        eval=dict(every=4, batches=2, sample_tokens=8, prompt="the "),
    )
    config = configs.base(**{name: parts.get(name, {}) | sections.get(name, {}) for name in {*parts, *sections}})
    return configs.from_json(configs.to_json(config))


def losses(workdir):
    """Everything that must not differ between a run and the same run in pieces."""
    names = ("step", "loss", "grad_norm", "learning_rate", "accuracy")
    return [[record[name] for name in names] for record in read_records(workdir, "train")]


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """(workdir, result) of a run from start to end."""
    workdir = tmp_path_factory.mktemp("straight")
    return workdir, loop.train(tiny(text), workdir)


def test_a_run_learns_and_leaves_its_record(straight, text):
    workdir, result = straight
    rows = losses(workdir)
    assert [row[0] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1][1] < rows[0][1] - 0.5
    assert [r["step"] for r in read_records(workdir, "heldout")] == [4, 8]
    assert len(read_records(workdir, "text")) == 2 and read_records(workdir, "text")[0]["text"].startswith("the ")
    assert configs.from_json((workdir / "config.json").read_text()) == tiny(text)
    assert json.loads((workdir / "result.json").read_text())["heldout"] == result["heldout"]
    assert (workdir / "loss.png").stat().st_size > 10_000
    assert set(result["baselines"]) == {"trigram", "gzip"}
    assert any((workdir / "compilation_cache").iterdir())


def test_the_final_evaluation_is_over_every_held_out_byte(straight, text):
    """Bits per byte by hand: the restored parameters, each held-out row once, nats over bytes."""
    from hyjax.data import build
    from hyjax.models import HybridLM
    from hyjax.train.checkpoint import Checkpointer

    workdir, result = straight
    config = tiny(text)
    model, data = HybridLM(config.model), build(config.data, batch_size=8, seed=0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    params = Checkpointer(workdir / "checkpoints").restore_latest({"params": shapes}, partial=True).state["params"]
    loss = jax.jit(lambda batch: model.loss({"params": params}, batch)[0])
    nats = sum(float(loss(batch)) for batch in data.heldout.batches())
    assert result["heldout"]["bits_per_byte"] == pytest.approx(nats / data.heldout.num_bytes / np.log(2), rel=1e-5)


def test_stopped_and_started_again_it_is_the_same_run(straight, text, tmp_path, monkeypatch):
    """Stopped after step 5 (the last checkpoint is of step 3) and again after 7: the same numbers, bit for bit."""
    plain = Logger.log
    for stop in (5, 7):

        def log(self, step, metrics, split="train", stop=stop):
            if step > stop:
                raise KeyboardInterrupt
            plain(self, step, metrics, split)

        monkeypatch.setattr(Logger, "log", log)
        with pytest.raises(KeyboardInterrupt):
            loop.train(tiny(text), tmp_path)
    monkeypatch.setattr(Logger, "log", plain)
    result = loop.train(tiny(text), tmp_path)
    assert losses(tmp_path) == losses(straight[0])
    assert result == straight[1]
    again = loop.train(tiny(text), tmp_path)  # a run that is complete is evaluated, not trained
    assert again == result


def test_kill_9(text, tmp_path):
    """A real process, killed at some moment after its first checkpoint, and started again."""
    file = tmp_path / "config.py"
    file.write_text(
        "from hyjax.config import base\n\ndef get_config(arg=''):\n    return base(\n"
        "        model=dict(layout='G', width=16, heads=2, ffn_width=16),\n"
        f"        data=dict(source='text', path={str(text)!r}, seq_len=32, heldout=0.2),\n"
        "        train=dict(steps=400, batch_size=8, log_every=20, checkpoint_every=20),\n"
        "        eval=dict(every=0, sample_tokens=0))\n"
    )
    workdir = tmp_path / "run"
    command = [sys.executable, "-m", "hyjax.cli", "train", f"--config={file}", f"--workdir={workdir}"]
    environment = os.environ | {"XLA_FLAGS": QUICK_TO_COMPILE}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not _has_checkpoint(workdir) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "resume   from step" in done.stdout
    steps = [record["step"] for record in read_records(workdir, "train")]
    assert {*range(20, 401, 20)} <= set(steps)
    assert json.loads((workdir / "result.json").read_text())["step"] == 400


def _has_checkpoint(workdir: Path) -> bool:
    folder = workdir / "checkpoints"
    return folder.exists() and any(p.name.isdecimal() for p in folder.iterdir())


def test_microbatches_and_devices_change_nothing(text, tmp_path, monkeypatch):
    """G1, G2: the same rows on eight devices, in two microbatches there, and on one device give the same numbers."""
    quick = dict(eval=dict(every=0, final=False, sample_tokens=0))
    whole, split = (tiny(text, train=dict(batch_size=16, steps=2, microbatches=n), **quick) for n in (1, 2))
    loop.train(whole, tmp_path / "eight")
    loop.train(split, tmp_path / "microbatches")
    monkeypatch.setattr(loop, "_data_mesh", lambda *sizes: None)
    loop.train(whole, tmp_path / "one")
    expected = losses(tmp_path / "one")
    np.testing.assert_allclose(losses(tmp_path / "eight"), expected, rtol=1e-5)
    np.testing.assert_allclose(losses(tmp_path / "microbatches"), expected, rtol=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path):
    config = tiny(text, optimizer=dict(learning_rate=1e30, warmup_steps=0, clip_norm=0.0), train=dict(log_every=2))
    with pytest.raises(loop.NonFiniteError, match=r"step \d is not finite; the first bad tensor is \S+"):
        loop.train(config, tmp_path)


def test_what_does_not_fit_is_refused(straight, text, tmp_path):
    for sections, message in [
        (dict(model=dict(vocab_size=100)), "model.vocab_size is 100; the data has 257 ids"),
        (dict(model=dict(streams=(3, 4))), "model.streams is (3, 4); the data has streams ()"),
        (dict(train=dict(batch_size=12)), "train.batch_size is 12; 8 devices with 1 microbatches need 8 or 16"),
        (dict(data=dict(path=str(text / "nothing"))), "nothing"),
        (dict(model=dict(implementation="pallas")), "no Pallas kernel serves this operator"),
    ]:
        with pytest.raises(ConfigError) as error:
            loop.train(tiny(text, **sections), tmp_path)
        assert message in str(error.value)
    with pytest.raises(ConfigError, match="'kernls', which no parameter is called"):
        loop.train(tiny(text, optimizer=dict(decay=("kernls",))), tmp_path)
    learned = dict(position="learned", max_positions=40)
    with pytest.raises(ConfigError, match="sample_tokens and the prompt need 54 positions"):
        loop.train(tiny(text, model=learned, eval=dict(sample_tokens=50)), tmp_path)
    with pytest.raises(ConfigError, match=r"Not a directory|File exists"):
        loop.train(tiny(text), text / "00.txt")
    with pytest.raises(ConfigError, match=r"model.layout='GA', not 'AG': choose another --workdir"):
        loop.train(tiny(text, model=dict(layout="AG")), straight[0])
    with pytest.raises(ConfigError, match=r"run on other data: data seq_len was 32 and is 16"):
        loop.train(tiny(text, data=dict(seq_len=16)), straight[0])
    with pytest.raises(ConfigError, match="is at step 8"):
        loop.train(tiny(text, train=dict(steps=5)), straight[0])


def test_what_only_changes_how_it_is_computed_may_change(text, tmp_path):
    """A run goes on with another remat policy, says so, and its damaged last checkpoint is no fault of the code."""
    quick = dict(eval=dict(every=0, final=False, sample_tokens=0))
    loop.train(tiny(text, train=dict(steps=2), **quick), tmp_path)
    loop.train(tiny(text, train=dict(steps=3), model=dict(remat="full", scan=False), **quick), tmp_path)
    assert [row[0] for row in losses(tmp_path)] == [1, 2, 3]
    for folder in (tmp_path / "checkpoints").iterdir():
        for file in folder.rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no checkpoint in .* can be read"):
        loop.train(tiny(text, train=dict(steps=4), **quick), tmp_path)


def test_profile_writes_a_trace(text, tmp_path):
    quick = tiny(text, train=dict(steps=4), eval=dict(every=0, final=False, sample_tokens=0))
    loop.train(quick, tmp_path, profile=(1, 3))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
