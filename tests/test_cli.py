"""The command: what it prints, what it passes on, and how it refuses."""

import importlib
import inspect
import json
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import hyjax
import hyjax.cli.plot
import hyjax.train
from hyjax import cli, exit_codes
from hyjax.config import ConfigError
from hyjax.train.checkpoint import CheckpointError
from hyjax.train.signals import Stopped

CONFIG = '''"""A small model."""
from hyjax.config import base

def get_config(arg=""):
    return base(model=dict(layout=arg or "GGAG", width=32, heads=4), data=dict(seq_len=96))
'''


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def calls(monkeypatch):
    """Stands in for the training loop; what it was called with."""
    seen: list = []
    loop = types.SimpleNamespace(
        train=lambda config, workdir, **options: seen.append((config, workdir, options)),
        NonFiniteError=type("NonFiniteError", (RuntimeError,), {}),
    )
    monkeypatch.setitem(sys.modules, "hyjax.train.loop", loop)
    monkeypatch.setattr(hyjax.train, "loop", loop, raising=False)
    return seen


def refusal(capsys, *argv) -> str:
    """The one line on stderr of a command that exits with 2."""
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hyjax: error: ") and err.count("\n") == 1
    return err


# ------------------------------------------------------------------------------------------------ the command itself


def test_help_loads_no_framework():
    code = (
        "import sys, hyjax.cli; hyjax.cli.main(['--help']);"
        "sys.exit(any(m in sys.modules for m in ('jax', 'numpy', 'flax', 'rich', 'ml_collections')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert f"\n  {name} " in done.stdout


def explained(argv) -> int:
    """The exit code of a command that prints help; argparse leaves by itself."""
    try:
        return cli.main(argv)
    except SystemExit as end:
        return end.code


WITHIN = ["data tokenize", "data inspect", "data train_tokenizer"]


@pytest.mark.parametrize("command", [*cli.COMMANDS, *WITHIN])
def test_every_sub_command_explains_itself(command, capsys):
    assert explained([*command.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert f"usage: hyjax {command}" in out and err == ""


def test_every_sub_command_is_a_file_with_its_function():
    """What COMMANDS promises, for every file: else it would be found only when somebody runs it."""
    files = {path.stem for path in Path(cli.__file__).parent.glob("*.py")} - {"__init__", "__main__", "parser"}
    assert files == cli.COMMANDS.keys()
    for name in files:
        function = getattr(importlib.import_module(f"hyjax.cli.{name}"), name)
        assert list(inspect.signature(function).parameters) == ["argv"] and function.__doc__


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_imports_its_own_file_only(command):
    """`hyjax plot` must not wait for what `hyjax train` needs."""
    code = (
        f"import sys, hyjax.cli\ntry: hyjax.cli.main([{command!r}, '--help'])\nexcept SystemExit: pass\n"
        "loaded = {m.removeprefix('hyjax.cli.') for m in sys.modules if m.startswith('hyjax.cli.')}\n"
        f"assert loaded == {{'parser', {command!r}}}, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_python_m(tmp_path):
    command = [sys.executable, "-m", "hyjax.cli"]
    for argv, code, said in [(["--version"], 0, hyjax.__version__), (["trian"], 2, "did you mean train?")]:
        done = subprocess.run([*command, *argv], capture_output=True, text=True)
        assert done.returncode == code and said in done.stdout + done.stderr


def test_version_and_nothing(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hyjax {hyjax.__version__}\n"
    assert cli.main([]) == 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plna"], "did you mean plan?"),
        (["--confg=x"], "no flag of hyjax"),
        (["plan"], "required: --config"),
        (["plan", "--confg=FILE"], "no flag --confg; did you mean --config?"),
        (["plan", "--config=FILE", "--contxt", "8"], "no flag --contxt; did you mean --context?"),
        (["plan", "--config=FILE", "--con=8"], "no flag --con"),  # no abbreviations
        (["plan", "--config=FILE", "--context=0"], "--context: must be a whole number"),
        (["plan", "--config=FILE", "--batch=x"], "--batch: must be a whole number"),
        (["plan", "--config=FILE", "extra"], "unrecognized arguments: extra"),
        (["plan", "--config=nope.py"], "nope.py"),
        (["plan", "--config=FILE", "--config.model.layuot=G"], "did you mean model.layout?"),
        (["plan", "--config=FILE", "--config.model.width=33"], "model.width=33"),
        (["plan", "--config=FILE", "--config.model.layout=GG)"], "closes a bracket"),
        (["plan", "--config=FILE", "--config.model.legend.A.kv_head=2"], "model.legend.A.kv_head"),
        (["plan", "--config=FILE", "--config.model.legend.G.mixer=atention"], "did you mean attention"),
        (["train", "--config=FILE"], "required: --workdir"),
        (["train", "--config=FILE", "--workdir=W", "--profile=9:3"], "START < STOP"),
        (["train", "--config=FILE", "--workdir=W", "--config.model.legend.A.gated=3"], "model.legend.A.gated"),
        (["bench", "stpe"], "did you mean step?"),
        (["data", "tokenise"], "did you mean tokenize?"),
        (["data", "tokenize", "--inptu=x"], "no flag --inptu; did you mean --input?"),
        (["generate", "--workdri=x"], "no flag --workdri; did you mean --workdir?"),
        (["generate"], "required: "),
        (["plot"], "required: --workdir"),
        (["convert", "parms"], "did you mean params?"),
        (["bench", "decod"], "did you mean decode?"),
    ],
)
def test_refusals(argv, said, config, capsys, calls):
    assert said in refusal(capsys, *(word.replace("FILE", config) for word in argv))
    assert not calls


# ------------------------------------------------------------------------------------------------ sub-commands


def test_plan_as_json(config, capsys):
    argv = ["plan", f"--config={config}:GA", "--config.model.vocab_size", "64", "--json", "--context=500", "--batch=3"]
    assert cli.main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["layout"] == "GA" and result["attention_layers"] == [2]
    assert result["params"]["by_kind"]["embedding"] == 64 * 32
    assert result["flops_per_token"]["context"] == 500
    assert result["decode_state_bytes"]["kv_per_token"] == 3 * 2 * 32 * 4
    assert set(result["decode_state_bytes"]["at"]) == {"4096", "32768", "131072", "500"}


def test_plan_as_tables(config, capsys):
    assert cli.main(["plan", "--config", config]) == 0
    text = capsys.readouterr().out
    assert "GGAG: 4 layers, attention at 3" in text
    assert "context 96" in text  # the length that the config trains on
    assert "Decode state of one row" in text


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {"profile": None, "accept_data_change": False}),
        (["--profile"], {"profile": (5, 10), "accept_data_change": False}),
        (["--profile=3:7", "--accept_data_change"], {"profile": (3, 7), "accept_data_change": True}),
        (["--profile", "0:2"], {"profile": (0, 2), "accept_data_change": False}),
    ],
)
def test_train_passes_on_what_it_is_given(flags, options, config, calls):
    argv = ["train", f"--config={config}", "--config.train.steps=7", "--workdir=W", *flags, "--noconfig.model.scan"]
    assert cli.main(argv) == 0
    [(given, workdir, passed)] = calls
    assert (given.train.steps, given.model.scan, given.model.layout) == (7, False, "GGAG")
    assert (workdir, passed) == ("W", options)


def test_faults_of_the_code_keep_their_traceback(config, monkeypatch, calls):
    def broken(*args, **options):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(hyjax.train.loop, "train", broken)
    with pytest.raises(ValueError, match="broadcast"):
        cli.main(["train", f"--config={config}", "--workdir=W"])


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        (lambda loop: loop.NonFiniteError("step 7 is not finite"), 3, "hyjax: stopped: step 7 is not finite"),
        (lambda loop: CheckpointError("step 7 can't be written"), 4, "hyjax: error: step 7 can't be written"),
        (lambda loop: Stopped(signal.SIGTERM, 7), 75, "hyjax: stopped: SIGTERM after step 7; the same command"),
        (lambda loop: Stopped(signal.SIGINT, 7), 130, "hyjax: stopped: Ctrl-C after step 7; the same command"),
        (lambda loop: ConfigError("the workdir holds another run"), 2, "hyjax: error: the workdir holds another run"),
    ],
)
def test_exit_codes_of_train(make, code, said, config, monkeypatch, calls, capsys):
    def broken(*args, **options):
        raise make(hyjax.train.loop)

    monkeypatch.setattr(hyjax.train.loop, "train", broken)
    assert cli.main(["train", f"--config={config}", "--workdir=W"]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(said) and err.count("\n") == 1


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("hyjax.cli.plot.plot", interrupted)
    assert cli.main(["plot"]) == exit_codes.INTERRUPTED
    assert capsys.readouterr() == ("", "hyjax: interrupted\n")


def test_what_to_try_next(config, calls, capsys):
    """A stack with attention names its twin without; its layout is one letter a layer, so the shell needs no quotes."""
    cli.main(["train", f"--config={config}", "--config.model.layout=(GGAW)*2 -", "--workdir=W/"])
    assert "--config.model.layout=GGGGGGGG- --workdir=W_recurrent" in capsys.readouterr().out
    cli.main(["train", f"--config={config}", "--config.model.layout=GG", "--workdir=W"])
    assert "_recurrent" not in capsys.readouterr().out


def test_bench_step(monkeypatch):
    seen: list = []
    step = types.SimpleNamespace(main=lambda **options: seen.append(options))
    monkeypatch.setitem(sys.modules, "hyjax.bench", types.SimpleNamespace(step=step))
    monkeypatch.setitem(sys.modules, "hyjax.bench.step", step)
    assert cli.main(["bench", "step", "--json"]) == 0
    assert cli.main(["bench", "step"]) == 0
    assert seen == [{"json": True}, {"json": False}]
