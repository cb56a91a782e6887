"""The benchmark of decoding: its report, what setting the clock back means, and (slow) what it must show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyjax import cli
from hyjax.bench import decode
from hyjax.cost import decode_state_bytes
from hyjax.generate import Sampling

SMALL = dict(width=16, heads=4, kv_heads=2, vocab_size=31)


def test_the_report(capsys):
    words = [f"--{name}={value}" for name, value in SMALL.items()]
    many = ("--contexts=24,8", "--layouts=GA,AA", "--tokens=3", "--rounds=2", "--batch=2", "--json")
    assert cli.main(["bench", "decode", *words, *many]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [result["layout"] for result in report["results"]] == ["GA", "AA"]
    for result in report["results"]:
        seconds = result["seconds_per_token"]
        assert seconds.keys() == result["ratio"].keys() == {"8", "24"} and min(seconds.values()) > 0
        assert result["ratio"]["8"] == 1 and result["ratio"]["24"] == pytest.approx(seconds["24"] / seconds["8"])
        plan = decode_state_bytes(SMALL | {"layout": result["layout"]}, 24, batch=2)["at"]
        assert result["state_bytes"]["24"] == plan["24"] > result["state_bytes"]["8"]
    decode._print_table(report)
    assert "24 tokens" in capsys.readouterr().out


def test_a_clock_set_back_is_a_shorter_prompt():
    """What an attention layer computes then is what it computes after a prompt of that length."""
    settings = decode.Settings(contexts=(9, 40), layouts=("AA",), tokens=5, rounds=1, **SMALL)
    run = decode.Run(settings, "AA")
    for context in (40, 9):
        run.time_per_token(context, 5)
        prompt = run.prompts[0, :context].tolist()
        (expected,) = run.generator.generate([prompt], Sampling(decode.WARM_UP + 5, 0.0))
        assert tuple(run.generation.ids[0]) == expected.ids


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("decode", "--contexts=8,x"), "argument --contexts: must be whole numbers with commas between"),
        (("decode", "--contexts=8,8"), "contexts is (8, 8); it must name at least one, and none twice"),
        (("decode", "--contexts=0"), "a context holds at least 1 token"),
        (("decode", "--layouts=GXA"), "'X'"),
        (("decode", "--kv_heads=5"), "model.kv_heads=5 must divide model.heads=12"),
        (("step", "--width=8"), "hyjax bench step has no flag --width"),
        (("decod",), "did you mean decode?"),
    ],
)  # fmt: skip
def test_refusals(words, message, capsys):
    assert cli.main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_long_context_costs_a_hybrid_little():
    """GGAG's token after 16,384 others takes at most 1.5 times as long as after 256; with an optimised program."""
    words = ["bench", "decode", "--layouts=GGAG,AAAA", "--contexts=256,16384", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "hyjax.cli", *words], cwd=root, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    ratio = {result["layout"]: result["ratio"]["16384"] for result in json.loads(done.stdout)["results"]}
    assert ratio["GGAG"] < 1.5 and ratio["GGAG"] < ratio["AAAA"]
