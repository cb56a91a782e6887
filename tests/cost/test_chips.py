"""Chips by the names that their devices give themselves."""

import pytest

from hyjax.cost import chips


@pytest.mark.parametrize(
    "kind,tflops",
    [
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v3", 61.5),
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 2080", None),
        ("cpu", None),
    ],
)
def test_peaks(kind, tflops):
    chip = chips.find(kind)
    assert (chip and chip.flops) == (None if tflops is None else tflops * 1e12)


@pytest.mark.parametrize(("kind", "ridge"), [("H100", 295), ("H200", 206), ("v5e", 240), ("v5p", 166), ("v6e", 560)])
def test_ridge_points(kind, ridge):
    """FLOP per byte above which the matrix unit, and not the memory, bounds a kernel: as the field quotes them."""
    chip = chips.find(kind if kind.startswith("H") else f"TPU {kind}")
    assert chip.flops / chip.bandwidth == pytest.approx(ridge, rel=0.01)
