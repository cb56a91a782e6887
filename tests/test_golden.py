"""Every named config resolves to the values, and builds the parameters, that were last looked at.

A change of a default, of a config or of the model fails here, and is accepted by writing the files anew.
"""

import difflib

import pytest

from tests.golden import make

ACCEPT = "If this is meant, run `python tests/golden/make.py` and look at the diff before you commit it."


@pytest.mark.parametrize("spec", make.specs())
def test_golden(spec):
    path = make.path_of(spec)
    assert path.exists(), f"configs/{spec} has no golden file. {ACCEPT}"
    old, new = path.read_text().splitlines(), make.text_of(spec).splitlines()
    changes = "\n".join(difflib.unified_diff(old, new, str(path), f"configs/{spec}", lineterm="", n=0))
    assert not changes, f"configs/{spec} is not what its golden file says. {ACCEPT}\n{changes}"


def test_no_golden_file_is_left_over():
    stale = set(make.GOLDEN.glob("*.txt")) - {make.path_of(spec) for spec in make.specs()}
    assert not stale, f"No config makes {sorted(path.name for path in stale)}. {ACCEPT}"


def test_a_config_without_a_golden_file_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "new.py").touch()
    monkeypatch.setattr(make, "CONFIGS", tmp_path)
    assert "recipes/new.py" in make.specs()
    assert make.path_of("recipes/new.py").name == "recipes-new.txt" and not make.path_of("recipes/new.py").exists()
