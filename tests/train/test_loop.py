"""The training loop on a tiny model: what it leaves in its folder, and how it goes on, stops and refuses."""

import json
import os
import shutil
import signal
import time
import zlib

import jax
import numpy as np
import pytest
import tokenizers

from hyjax import cli
from hyjax import config as configs
from hyjax.config import ConfigError
from hyjax.data import build
from hyjax.models import HybridLM
from hyjax.train import loop, setup
from hyjax.train.checkpoint import Checkpointer, CheckpointError
from hyjax.train.export import load_params
from hyjax.train.metrics import Logger, read_records
from hyjax.train.signals import Stopped
from hyjax.train.step_folder import read_lists
from tests.train.process import lines

STEPS = 8
WORDS = ["recall", "state", "decay", "token", "window", "gate"]
CORNERS = dict(optimizer=dict(schedule="wsd", decay_steps=3))  # after warm-up's step 2 and before decay, from step 5 on
QUICK = dict(eval=dict(every=0, final=False, sample_tokens=0))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of small documents of words; enough of each side for several batches."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choice(WORDS, 60)))
    return folder


def tiny(text, seed=0, **sections):
    """A config whose training takes seconds on the tests' eight devices."""
    parts = dict(
        model=dict(layout="GA", width=16, heads=2, ffn_width=16),
        data=dict(source="text", path=str(text), tokenizer="bytes", seq_len=32, heldout=0.2),
        optimizer=dict(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1),
        train=dict(steps=STEPS, batch_size=8, log_every=1, checkpoint_every=3),
        eval=dict(every=4, batches=2, sample_tokens=8, prompt="the "),
    )
    parts = {name: part | sections.get(name, {}) for name, part in parts.items()}
    config = configs.base(seed=seed, **parts)
    return configs.from_json(configs.to_json(config))


def losses(workdir):
    """Everything that must not differ between a run and the same run in pieces."""
    names = ("step", "loss", "grad_norm", "learning_rate", "accuracy", "batch_crc32")
    return [[record[name] for name in names] for record in read_records(workdir, "train")]


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """(workdir, result) of a run from start to end."""
    workdir = tmp_path_factory.mktemp("straight")
    return workdir, loop.train(tiny(text, **CORNERS), workdir)


def test_a_run_learns_and_leaves_its_record(straight, text):
    workdir, result = straight
    rows = losses(workdir)
    assert [row[0] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1][1] < rows[0][1] - 0.5
    assert [r["step"] for r in read_records(workdir, "heldout")] == [4, 8]
    assert len(read_records(workdir, "text")) == 2 and read_records(workdir, "text")[0]["text"].startswith("the ")
    assert configs.from_json((workdir / "config.json").read_text()) == tiny(text, **CORNERS)
    assert json.loads((workdir / "result.json").read_text())["heldout"] == result["heldout"]
    assert (workdir / "loss.png").stat().st_size > 10_000
    assert set(result["baselines"]) == {"trigram", "gzip"}
    assert any((workdir / "compilation_cache").iterdir())


def test_the_final_evaluation_is_over_every_held_out_byte(straight, text):
    """Bits per byte by hand: the restored parameters, each held-out row once, nats over bytes."""
    workdir, result = straight
    config = tiny(text)
    model, data = HybridLM(config.model), build(config.data, batch_size=8, seed=0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    params = Checkpointer(workdir / "checkpoints").restore_latest({"params": shapes}, partial=True).state["params"]
    loss = jax.jit(lambda batch: model.loss({"params": params}, batch)[0])
    nats = sum(float(loss(batch)) for batch in data.heldout.batches())
    assert result["heldout"]["bits_per_byte"] == pytest.approx(nats / data.heldout.num_bytes / np.log(2), rel=1e-5)


def test_stopped_and_started_again_it_is_the_same_run(straight, text, tmp_path, monkeypatch):
    """SIGTERM at the corners of warm-up and decay, before the last step and after it, and a stop without a save
    after step 4 (the last checkpoint is of step 3): the same numbers, bit for bit."""
    plain = Logger.log
    for stop, saved in ((2, 2), (4, 3), (5, 5), (7, 7), (8, 8)):

        def log(self, step, metrics, split="train", stop=stop, saved=saved):
            plain(self, step, metrics, split)
            if (step, split) == (stop, "train"):
                if saved != stop:
                    raise RuntimeError("a fault")
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)  # a thread hears of it

        monkeypatch.setattr(Logger, "log", log)
        with pytest.raises(RuntimeError if saved != stop else Stopped) as stopped:
            loop.train(tiny(text, **CORNERS), tmp_path)
        if saved == stop:
            assert (stopped.value.code, stopped.value.step) == (75, stop)
        assert newest(tmp_path) == saved
    monkeypatch.setattr(Logger, "log", plain)
    result = loop.train(tiny(text, **CORNERS), tmp_path)
    assert losses(tmp_path) == losses(straight[0])
    assert arrays(tmp_path) == arrays(straight[0])
    assert result == straight[1]
    again = loop.train(tiny(text, **CORNERS), tmp_path)  # a run that is complete is evaluated, not trained
    assert again == result
    reasons = [record["reason"] for record in lines(tmp_path) if record["split"] == "end"]
    assert reasons == ["preempted", "RuntimeError", "preempted", "preempted", "preempted", "done", "done"]


def newest(workdir):
    return max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal())


def arrays(workdir):
    """Shape, dtype and checksum of every array of the newest checkpoint: parameters, moments, counts, keys."""
    leaves = read_lists(workdir / "checkpoints" / str(newest(workdir)))[0]
    assert any(path.endswith("/count") for path in leaves)
    return leaves


def test_microbatches_and_devices_change_nothing(text, tmp_path, monkeypatch):
    """G1, G2: the same rows on eight devices, in two microbatches there, and on one device give the same numbers."""
    model = dict(layout="G")
    whole, split = (
        tiny(text, model=model, train=dict(batch_size=16, steps=2, microbatches=n), **QUICK) for n in (1, 2)
    )
    loop.train(whole, tmp_path / "eight")
    loop.train(split, tmp_path / "microbatches")
    monkeypatch.setattr(setup, "data_mesh", lambda *sizes: None)
    loop.train(whole, tmp_path / "one")
    *expected, batches = zip(*losses(tmp_path / "one"), strict=True)
    for other in ("eight", "microbatches"):
        *found, same_batches = zip(*losses(tmp_path / other), strict=True)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert same_batches == batches


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path):
    optimizer = dict(learning_rate=1e30, warmup_steps=0, clip_norm=0.0)
    config = tiny(text, model=dict(layout="-"), optimizer=optimizer, train=dict(log_every=2), **QUICK)
    with pytest.raises(loop.NonFiniteError, match=r"step \d is not finite; the first bad tensor is \S+"):
        loop.train(config, tmp_path)
    assert [record["reason"] for record in lines(tmp_path) if record["split"] == "end"] == ["not finite"]


def test_what_does_not_fit_is_refused(straight, text, tmp_path):
    for sections, message in [
        (dict(model=dict(vocab_size=100)), "model.vocab_size is 100; the data has 257 ids"),
        (dict(model=dict(streams=(3, 4))), "model.streams is (3, 4); the data has streams ()"),
        (dict(train=dict(batch_size=12)), "train.batch_size is 12; 8 devices with 1 microbatches need 8 or 16"),
        (dict(data=dict(path=str(text / "nothing"))), "nothing"),
        (dict(model=dict(implementation="pallas")), "implementation='pallas' can't serve this call"),
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
    loop.train(tiny(text, train=dict(steps=2), model=dict(layout="GG"), **QUICK), tmp_path)
    loop.train(tiny(text, train=dict(steps=3), model=dict(layout="GG", remat="full", scan=False), **QUICK), tmp_path)
    assert [row[0] for row in losses(tmp_path)] == [1, 2, 3]
    for folder in (tmp_path / "checkpoints").iterdir():
        for file in folder.rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"):
        loop.train(tiny(text, train=dict(steps=4), model=dict(layout="GG"), **QUICK), tmp_path)


def test_other_data_is_refused_or_accepted_aloud(straight, text, tmp_path):
    """What changed is named, with the flag; once accepted it is on record, in the metrics and in every checkpoint."""
    workdir = tmp_path / "run"
    shutil.copytree(straight[0], workdir)
    other = tiny(text, seed=1, train=dict(steps=10), **QUICK)
    sentence = "data seed (the seed of the shuffle) was 0 and is 1."
    with pytest.raises(ConfigError) as error:
        loop.train(other, workdir)
    assert f"{sentence} Choose another --workdir, or go on with the new data with --accept_data_change." in str(
        error.value
    )
    loop.train(other, workdir, accept_data_change=True)
    assert [r["accepted"] for r in lines(workdir) if r["split"] == "data_change"] == [[sentence]]
    loop.train(tiny(text, seed=1, train=dict(steps=11), **QUICK), workdir)  # it needs no acceptance again
    for step in (10, 11):
        extra = read_lists(workdir / "checkpoints" / str(step))[1]
        assert extra["data_changes"] == [{"step": 8, "changes": [sentence]}]
        assert extra["data"]["seed"] == 1
    assert "data_changes" in read_lists(straight[0] / "checkpoints" / "8")[1]


def test_batches_are_recorded_by_checksum(straight, text):
    data = build(tiny(text).data, batch_size=8, seed=0)
    expected = [f"{zlib.crc32(data.train.batch(step)['tokens'].tobytes()):08x}" for step in range(STEPS)]
    assert [row[-1] for row in losses(straight[0])] == expected and len(set(expected)) == STEPS


def test_the_best_checkpoints_by_held_out_loss_stay(text, tmp_path, monkeypatch):
    measured = {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5, 5: 4.0, 6: 9.0}
    monkeypatch.setattr(loop, "_make_evaluate", lambda *parts: lambda params, batches, step: {"loss": measured[step]})
    keep = dict(steps=6, checkpoint_every=1, keep=1, keep_best=2, keep_every=3)
    loop.train(tiny(text, model=dict(layout="-"), train=keep, **QUICK), tmp_path)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdecimal()) == [2, 3, 4, 6]


def test_a_run_may_start_from_the_parameters_of_another(straight, text, tmp_path, capsys):
    """Its first loss is what they give on the first batch; its step, moments and data are its own."""
    config = tiny(text, train=dict(steps=2, init_from=str(straight[0])), **QUICK)
    loop.train(config, tmp_path)
    assert f"params   from {straight[0]}\n" in capsys.readouterr().out
    model, batch = HybridLM(config.model), build(config.data, batch_size=8, seed=0).train.batch(0)
    params = load_params(straight[0], jax.eval_shape(model.init, jax.random.key(0), batch["tokens"])["params"])
    nats = jax.jit(lambda batch: model.loss({"params": params}, batch)[0])(batch)
    assert losses(tmp_path)[0][:2] == [1, pytest.approx(float(nats) / batch["weights"].sum(), rel=1e-5)]
    assert losses(tmp_path)[0][1] < losses(straight[0])[0][1] - 0.5
    with pytest.raises(ConfigError, match="layers/-/ffn/down/kernel is not in it"):
        loop.train(tiny(text, model=dict(layout="-"), train=dict(init_from=str(tmp_path))), tmp_path / "other")


def test_a_checkpoint_that_must_be_there(text, tmp_path, capsys):
    """Exit code 4 and one line; nothing is begun."""
    (tmp_path / "c.py").write_text(
        "from hyjax.config import from_json\n\ndef get_config(arg=''):\n"
        f"    return from_json({configs.to_json(tiny(text, train=dict(resume='must')))!r})\n"
    )
    assert cli.main(["train", f"--config={tmp_path / 'c.py'}", f"--workdir={tmp_path / 'run'}"]) == 4
    err = capsys.readouterr().err
    assert err == f"hyjax: error: there is no checkpoint in {tmp_path / 'run' / 'checkpoints'} to go on from\n"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_tokenizer_s_file_is_copied(text, tmp_path):
    vocabulary = {word: i for i, word in enumerate([*WORDS, "[UNK]", "</s>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    data = dict(tokenizer=str(tmp_path / "words.json"))
    model = dict(layout="-", vocab_size=len(vocabulary))
    loop.train(tiny(text, model=model, data=data, train=dict(steps=2), **QUICK), tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (tmp_path / "words.json").read_bytes()


def test_profile_writes_a_trace(text, tmp_path):
    loop.train(tiny(text, train=dict(steps=4), model=dict(layout="-"), **QUICK), tmp_path, profile=(1, 3))
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
