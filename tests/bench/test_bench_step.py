"""The benchmark compares forms that compute the same thing."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from hyjax.bench import step
from hyjax.config import load


def test_the_model_is_that_of_the_seed_experiment():
    """The benchmark's own copy of the stack says what the shipped config says."""
    shipped = load(f"{Path(__file__).parents[2]}/configs/recall.py:pairs=64,layout=GGGG").model
    assert {name: shipped[name] for name in step.MODEL} == step.MODEL
    assert shipped.max_positions == step.CASES[0].length


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(step, "CASES", (step.Case("small", 4, 24, 2),))
    monkeypatch.setattr(step, "MODEL", step.MODEL | {"layout": "G"})


def test_all_forms_take_the_same_step(small):
    """Two updates from the same parameters on the same batch: the same loss in every form."""
    losses = [step._prepare(options, step.CASES[0])() for options in step.FORMS.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_the_report(small, capsys):
    step.main(json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == jax.devices()[0].device_kind
    case = report["cases"][0]
    assert case["seconds"].keys() == step.FORMS.keys()
    assert case["ratio"]["quadratic"] == pytest.approx(case["seconds"]["quadratic"] / case["seconds"]["hyjax"])
    step.main()
    assert "quadratic" in capsys.readouterr().out
