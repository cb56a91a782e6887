"""What a chip can do at most: floating-point operations and bytes of its memory a second.

From the makers' data sheets, of one JAX device: a TPU v2 or v3 device is one of a chip's two cores, a TPU7x device one
of its two chiplets. Nothing here was measured.
"""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    flops: float  # dense bfloat16 peak, FLOP/s
    bandwidth: float  # of its high-bandwidth memory, bytes/s


# The longest name that a device's kind contains counts.
CHIPS = {
    "tpu v2": Chip(22.5e12, 350e9),
    "tpu v3": Chip(61.5e12, 450e9),
    "tpu v4": Chip(275e12, 1228e9),
    "tpu v5 lite": Chip(197e12, 819e9),
    "tpu v5e": Chip(197e12, 819e9),
    "tpu v5": Chip(459e12, 2765e9),
    "tpu v5p": Chip(459e12, 2765e9),
    "tpu v6 lite": Chip(918e12, 1640e9),
    "tpu v6e": Chip(918e12, 1640e9),
    "tpu7x": Chip(1153.5e12, 3690e9),
    "a100": Chip(312e12, 2039e9),
    "h100": Chip(989e12, 3350e9),
    "h100 pcie": Chip(756e12, 2000e9),
    "h100 nvl": Chip(835e12, 3900e9),
    "h200": Chip(989e12, 4800e9),
    "b200": Chip(2250e12, 8000e9),
    "l4": Chip(121e12, 300e9),
    "l40s": Chip(362e12, 864e9),
}


def find(device_kind: str) -> Chip | None:
    """The chip of a device by its `device_kind`, None where it isn't known (CPUs among them)."""
    words = f" {device_kind.lower().replace('-', ' ')} "
    known = [name for name in CHIPS if f" {name} " in words]
    return CHIPS[max(known, key=len)] if known else None
