"""Parameters apart from their run: exported, loaded, started from; and a sentence for whatever is none."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hyjax import config as configs
from hyjax import exit_codes
from hyjax.cli.convert import convert
from hyjax.cli.parser import UserError
from hyjax.config import base
from hyjax.data.tokenizers import FileTokenizer
from hyjax.models import HybridLM
from hyjax.train.checkpoint import Checkpointer, CheckpointError
from hyjax.train.export import export_params, load_params, load_run

SMALL = dict(layout="GA", width=16, heads=2, ffn_width=16)


def shapes_of(**model):
    config = base(model=SMALL | model)
    lm = HybridLM(config.model)
    tokens = jnp.zeros((1, 1, *([len(config.model.streams)] if config.model.streams else [])), jnp.int32)
    return config, jax.eval_shape(lm.init, jax.random.key(0), tokens)["params"]


def make_run(workdir, steps=(10, 20), data=None, sections=None, **model):
    """A workdir as training leaves it; a step's parameters are drawn from its number."""
    config, shapes = shapes_of(**model)
    config.update(sections or {})
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(configs.to_json(config))
    checkpointer = Checkpointer(workdir / "checkpoints", keep=9)
    for step in steps:
        params = params_of(shapes, step)
        state = {"step": jnp.int32(step), "params": params, "opt_state": {"mu": params}}
        checkpointer.save(step, state, {"data": {"tokenizer": "bytes"} if data is None else data})
    checkpointer.close()
    return workdir


def params_of(shapes, step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape).astype(leaf.dtype)), shapes)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def export(workdir, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "model"
    export_params(workdir, out)
    return out


def test_a_workdir_and_its_export_load_alike(workdir, export):
    from_run, from_export = load_run(workdir), load_run(export)
    assert_same(from_run.params, params_of(shapes_of()[1], 20))
    assert_same(from_export.params, from_run.params)
    for run in (from_run, from_export):
        assert (run.step, run.tokenizer.name, run.config.model.layout) == (20, "bytes", "GA")
    tokens = jnp.arange(6)[None]
    logits = [jax.jit(run.model.apply)({"params": run.params}, tokens).logits for run in (from_run, from_export)]
    np.testing.assert_array_equal(*logits)
    assert from_run.config == from_export.config
    assert sorted(path.name for path in export.iterdir()) == ["config.json", "meta.json", "params"]
    meta = json.loads((export / "meta.json").read_text())["manifest"]
    assert (meta["step"], meta["source"]) == (20, str(workdir))
    size = lambda folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert size(export / "params") < 0.75 * size(workdir / "checkpoints" / "20")
    assert not list(export.parent.glob("*unfinished*"))


def test_an_older_step(workdir, tmp_path):
    assert_same(load_run(workdir, 10).params, params_of(shapes_of()[1], 10))
    assert export_params(workdir, tmp_path / "model", step=10).step == 10
    assert load_run(tmp_path / "model").step == load_run(tmp_path / "model", 10).step == 10
    with pytest.raises(ValueError, match=r"no step 14 in .*; there are \[10, 20\]; the nearest is 10"):
        load_run(workdir, 14)
    with pytest.raises(ValueError, match=r"no step 20 in the export .*, which is of step 10"):
        load_run(tmp_path / "model", 20)


def test_parameters_are_loaded_strictly_and_onto_a_mesh(workdir, export):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
    target = jax.tree.map(placed, shapes_of()[1])
    for path in (workdir, export):
        params = load_params(path, target)
        assert_same(params, params_of(target, 20))
        assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {everywhere}
        with pytest.raises(ValueError, match=r"layers/G/.* has shape \(1, .* there and \(2, .* here"):
            load_params(path, shapes_of(layout="GGA")[1])
        with pytest.raises(ValueError, match=r"is not in it"):
            load_params(path, shapes_of(layout="GAW")[1])
        half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), target)
        with pytest.raises(ValueError, match=r"is float32 there and bfloat16 here"):
            load_params(path, half)
        unrolled = shapes_of(scan=False)[1]
        assert_same(load_params(path, unrolled), params_of(target, 20))


def test_a_damaged_step_is_passed_over_and_a_damaged_export_is_named(workdir, export, tmp_path):
    needle = np.asarray(params_of(shapes_of()[1], 20)["embed"]["embedding"]).tobytes()

    def flip(folder):
        for path in folder.rglob("*"):
            if path.is_file() and (place := path.read_bytes().find(needle)) >= 0:
                content = bytearray(path.read_bytes())
                content[place + 9] ^= 8
                path.write_bytes(content)

    shutil.copytree(workdir, tmp_path / "run")
    flip(tmp_path / "run" / "checkpoints" / "20")
    assert load_run(tmp_path / "run").step == 10
    with pytest.raises(ValueError, match=r"step 20 in .* can't be read: params/embed/embedding differs"):
        load_run(tmp_path / "run", 20)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "10")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read \(step 20: params/embed/embedding differs"):
        load_run(tmp_path / "run")

    shutil.copytree(export, tmp_path / "model")
    flip(tmp_path / "model")
    with pytest.raises(ValueError, match=r"export .* is damaged: embed/embedding differs"):
        load_run(tmp_path / "model")
    meta = tmp_path / "model" / "meta.json"
    meta.write_text(meta.read_text().replace('"step": 20', '"step": 21'))
    with pytest.raises(ValueError, match=r"export .* is damaged: its manifest differs"):
        load_run(tmp_path / "model")


def test_a_folder_that_is_no_model(workdir, export, tmp_path):
    for path, message in [
        (tmp_path / "nothing", "nothing is not there: give a workdir or an export"),
        (workdir / "config.json", "config.json is a file: give a workdir or an export"),
        (tmp_path, r"holds neither a run \(checkpoints/\) nor an export \(meta.json\)$"),
        (workdir / "checkpoints", r"holds neither .*; did you mean .*/run\?$"),
        (export / "params", r"holds neither .*; did you mean .*/model\?$"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_run(path)
        with pytest.raises(ValueError, match=message):
            export_params(path, tmp_path / "out")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"empty has no config.json"):
        load_run(tmp_path / "empty")
    shutil.copy(workdir / "config.json", tmp_path / "empty")
    with pytest.raises(ValueError, match=r"there is no checkpoint in .*/empty/checkpoints"):
        load_run(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model": {"width')
    with pytest.raises(ValueError, match=r"config.json: the stored config is not JSON"):
        load_run(tmp_path / "empty")


def test_an_export_appears_whole_or_not_at_all(workdir, tmp_path, monkeypatch):
    out = tmp_path / "models" / "a"
    with monkeypatch.context() as patch:
        patch.setattr(configs, "to_json", lambda config: 1 / 0)  # killed on the way, as good as
        with pytest.raises(ZeroDivisionError):
            export_params(workdir, out)
    assert not list(out.parent.iterdir())
    with monkeypatch.context() as patch:

        def full(*args, **kwargs):
            raise ValueError("RESOURCE_EXHAUSTED: Error writing 'd/12': No space left on device [os_error_code='28']")

        patch.setattr(ocp.Checkpointer, "save", full)
        with pytest.raises(CheckpointError, match=r"models/a can't be written: No space left on device$"):
            export_params(workdir, out)
    assert not list(out.parent.iterdir())
    out.mkdir()
    export_params(workdir, out)
    with pytest.raises(ValueError, match="holds something already"):
        export_params(workdir, out)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/b can't be written: Not a directory$"):
        export_params(workdir, tmp_path / "file" / "b")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 10))
    with pytest.raises(CheckpointError, match=r"models has 0.0 MB free; 1.1 MB are needed"):
        export_params(workdir, tmp_path / "models" / "c")
    assert [path.name for path in out.parent.iterdir()] == ["a"]


def test_models_without_text_and_with_a_tokenizer_s_file(tmp_path):
    from tokenizers import Tokenizer, models

    recall = make_run(tmp_path / "recall", data={"source": "recall"}, streams=(64, 33), vocab_size=32)
    assert load_run(recall).tokenizer is None
    export_params(recall, tmp_path / "recall_export")
    assert load_run(tmp_path / "recall_export").tokenizer is None

    file = tmp_path / "given.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1, "STOP": 2}, unk_token="a")).save(str(file))
    tokenizer = FileTokenizer(file, "STOP")
    data = {"tokenizer": f"sha256:{tokenizer.sha256}", "eos": 2}
    run = make_run(tmp_path / "text", data=data, sections={"data": {"tokenizer": str(file)}}, vocab_size=3)
    assert load_run(run).tokenizer.identity == tokenizer.identity
    shutil.copy(file, run / "tokenizer.json")
    file.write_text(file.read_text() + "\n")  # another file now: the run's own copy counts
    assert load_run(run).tokenizer.identity == tokenizer.identity
    export_params(run, tmp_path / "text_export")
    shutil.rmtree(run)
    assert load_run(tmp_path / "text_export").tokenizer.identity == tokenizer.identity
    (tmp_path / "text_export" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"the tokenizer of .* is gone: put its file, of sha256:\w{64}, at .*json$"):
        load_run(tmp_path / "text_export")


def test_the_command(workdir, tmp_path, capsys):
    out = tmp_path / "model"
    assert convert(["params", f"--workdir={workdir}", f"--out={out}", "--step=10"]) == exit_codes.OK
    assert capsys.readouterr().out.startswith(f"{out}: the parameters of step 10, ")
    assert load_run(out).step == 10
    for words, message in [
        ((f"--workdir={workdir}", f"--out={out}"), "holds something already"),
        ((f"--workdir={tmp_path}", f"--out={tmp_path / 'b'}"), "holds neither a run"),
        ((f"--workdir={workdir}", f"--out={tmp_path / 'b'}", "--step=11"), "the nearest is 10"),
        ((f"--workdir={workdir}",), "--out"),
    ]:
        with pytest.raises(UserError, match=message):
            convert(["params", *words])
    (tmp_path / "file").write_text("")
    words = [f"--workdir={workdir}", f"--out={tmp_path / 'file' / 'b'}"]
    assert convert(["params", *words]) == exit_codes.CHECKPOINT
    error = capsys.readouterr().err
    assert "can't be written" in error
    assert error.count("\n") == 1
