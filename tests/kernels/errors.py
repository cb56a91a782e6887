"""The largest errors that the operators' tests saw, which pytest prints at its end, whatever process saw them.

Ratios as `common.assert_close` measures them, by test file and tolerance, which tells float32 from bfloat16 and outputs
from gradients; differences too small to count, by the absolute tolerance, are left out.
"""

import os
from pathlib import Path

import pytest

seen: dict[str, dict[float, float]] = {}  # by test file, the largest by tolerance


def record(ratio: float, tolerance: float) -> None:
    file = Path(os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]).stem.removeprefix("test_")
    largest = seen.setdefault(file, {})
    largest[tolerance] = max(largest.get(tolerance, 0.0), ratio)


# ------------------------------------------------------------------------------------------------ hooks of pytest


def pytest_sessionfinish(session):
    """A worker of xdist hands over what it saw."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["largest_errors"] = [(f, t, r) for f, largest in seen.items() for t, r in largest.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    for file, tolerance, ratio in getattr(node, "workeroutput", {}).get("largest_errors", ()):
        largest = seen.setdefault(file, {})
        largest[tolerance] = max(largest.get(tolerance, 0.0), ratio)


def pytest_terminal_summary(terminalreporter):
    if seen:
        terminalreporter.section("largest errors of the operators: RMS of the difference over RMS")
    for file, largest in sorted(seen.items()):
        terminalreporter.write_line(f"{file}: " + ", ".join(f"{r:.1e} of {t:g}" for t, r in sorted(largest.items())))
