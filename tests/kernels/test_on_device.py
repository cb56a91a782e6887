"""The script for an accelerator, on what is here: it finds right kernels right, and wrong ones wrong."""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import pytest

from hyjax import kernels

FILE = Path(__file__).parents[2] / "experiments" / "kernels_on_device.py"
SHORT = ["--no-times", "--length=24", "--operators=short_conv"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("kernels_on_device", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_right(script, capsys):
    assert script.main([*SHORT, "--implementation=xla"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "short_conv bfloat16: " in lines[1] and "WRONG" not in "".join(lines)


@pytest.mark.parametrize("spoil", [lambda y: y * 1.1, lambda y: y.at[0, 3].set(jnp.nan)], ids=["scaled", "NaN"])
def test_what_is_wrong(script, capsys, monkeypatch, spoil):
    def wrong(*args, implementation, **options):
        y, state = right(*args, implementation=implementation, **options)
        return (spoil(y) if implementation == "xla" else y), state

    right = kernels.short_conv
    monkeypatch.setattr(kernels, "short_conv", wrong)
    assert script.main([*SHORT, "--implementation=xla"]) == 1
    assert capsys.readouterr().out.count("WRONG") == 2


def test_what_is_refused_is_said(script, capsys):
    assert script.main([*SHORT, "--implementation=pallas"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("no Pallas kernel serves this operator") == 2 and "nothing was checked" in printed


@pytest.mark.parametrize("word", ["--operators=convolution", "--implementation=triton", "--length=3"])
def test_what_is_mistaken_is_one_sentence(script, capsys, word):
    with pytest.raises(SystemExit) as stop:
        script.main([*SHORT, word])
    assert stop.value.code == 2 and "error: " in capsys.readouterr().err.splitlines()[-1]


def test_published_shapes_are_timed_beside_the_figures(script, monkeypatch):
    """The chip's own figures where it has some, and all where it has none."""
    seen = []

    def measured(case, chip):
        seen.append((case.operator, case.settings.length))
        times = dict(forward=1e-3, backward=2e-3, forward_backward=3e-3)
        return {"results": [{"implementation": "pallas", "seconds": times}]}

    monkeypatch.setattr(script, "measure_case", measured)
    lines = list(script.compare("pallas", "h200"))
    assert seen == [("delta_scan", 8192), ("delta_scan", 32768)]
    assert lines[0] == "delta_scan T 8192 forward, pallas: 1.000 ms, 0.47 of Triton's speed on H200 (0.472 ms)"
    assert len(list(script.compare("pallas", ""))) == len(script.PUBLISHED)
