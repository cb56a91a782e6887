"""Every command of the README's bash blocks is run, in order: cut short where it trains, as it stands elsewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUICK_TO_COMPILE

ROOT = Path(__file__).parents[1]
# the flags that turn a run of minutes into one of seconds; everything else of the command stays
SHORT = [
    "--config.train.steps=2",
    "--config.optimizer.warmup_steps=0",
    "--config.model.width=16",
    "--config.model.heads=2",
    "--config.eval.every=0",
    "--config.eval.final=False",
    "--config.eval.batches=1",
    "--config.eval.sample_tokens=4",
]


def commands() -> list[str]:
    """The lines of the README's bash blocks, joined where they end in a backslash, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    return [line for line in (line.split("  #")[0].strip() for line in text.splitlines()) if line]


def test_the_readme_opens_with_its_two_commands():
    assert commands()[:3] == [
        "pip install uv",
        "uv run hyjax train --config=configs/quickstart.py --workdir=runs/quickstart",
        "uv run pytest",
    ]
    assert "pytest" in (ROOT / ".ci" / "run").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """What the README calls `runs`: a command may use what one before it made."""
    return tmp_path_factory.mktemp("readme") / "runs"


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("uv run hyjax ")])
def test_commands_run(command, runs):
    words = [re.sub(r"(^|=)runs/", rf"\1{runs}/", word) for word in shlex.split(command)[3:]]
    if words[0] == "bench":
        pytest.skip("minutes of measurement; tests/bench runs it on small cases")
    if words[0] == "train":
        words += SHORT
    done = subprocess.run(
        [sys.executable, "-m", "hyjax.cli", *words],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": QUICK_TO_COMPILE},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_map_names_what_is_there():
    """Every path that the README puts in backticks and that looks like one of the repository's exists."""
    named = re.findall(
        r"`((?:hyjax|configs|launch|experiments|tests|\.ci)/[\w./*-]*)`", (ROOT / "README.md").read_text()
    )
    assert len(named) > 10
    assert [path for path in named if not list(ROOT.glob(path.rstrip("/")))] == []
