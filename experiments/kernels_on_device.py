"""The kernels on the accelerator at hand: right first, then how fast beside what others published.

    python experiments/kernels_on_device.py                  # a few minutes on one GPU or TPU device
    python experiments/kernels_on_device.py --implementation=xla --no-times

It needs jax and hyjax alone. Each operator and gate is run in bfloat16 and, where it is served, in float32, on ragged
rows with documents and padding, and its outputs and all gradients are compared with the token-by-token reference in
float32: RMS of the difference over RMS of the reference, at most 0.005 for outputs and 0.02 for gradients in bfloat16,
1e-4 and 1e-3 in float32 (matrix units round). What a kernel refuses is said. Then the shapes for which others published
milliseconds are timed, and the ratio printed: above 1 is faster than theirs. The exit code is 0 where something was
checked and all of it was right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hyjax import kernels
from hyjax.bench.kernels import GATES, Case, Settings, measure_case
from hyjax.cost import chips
from hyjax.kernels import dispatch

LIMITS = {"bfloat16": (5e-3, 2e-2), "float32": (1e-4, 1e-3)}  # of outputs, of gradients
LENGTH = 1000


class Published(NamedTuple):
    """Milliseconds that others reach, as collected by the authors of the kernels named."""

    chip: str
    who: str
    operator: str
    gate: str
    shape: dict[str, int]
    which: str  # a key of a result's "seconds"
    milliseconds: float


_GDN = dict(heads=32, key_heads=16, key_dim=128, value_dim=128)
_GLA = dict(batch=8, heads=32, key_heads=32, key_dim=128, value_dim=128)
PUBLISHED = [
    *(
        Published("h200", who, "delta_scan", "head", _GDN | dict(length=length), which, ms)
        for length, who, which, ms in (
            (8192, "Triton", "forward", 0.472),
            (8192, "best known", "forward", 0.280),
            (8192, "Triton", "backward", 1.444),
            (8192, "best known", "backward", 0.789),
            (32768, "Triton", "forward", 1.890),
            (32768, "best known", "forward", 0.877),
            (32768, "Triton", "backward", 5.697),
            (32768, "best known", "backward", 2.515),
        )
    ),
    *(
        Published("h100", "Triton", "linear_scan", "head", _GLA | dict(length=length), "forward_backward", ms)
        for length, ms in ((2048, 2.28), (8192, 5.58), (16384, 10.19))
    ),
    *(
        Published("h100", "FlashAttention-2", "attention", "", _GLA | dict(length=length), "forward_backward", ms)
        for length, ms in ((2048, 1.96), (8192, 15.02), (16384, 54.34))
    ),
]


def check(implementation: str, settings: Settings) -> Iterator[tuple[str, float, float, bool] | tuple[str, str]]:
    """Yields (case, worst output, worst gradient, whether both are within the limits), or (case, why refused)."""
    for operator in settings.operators:
        for gate in GATES[operator]:
            name = f"{operator} {gate}".strip() + f" {settings.dtype}"
            arrays = Case(operator, gate, settings).arrays(settings.length)
            ids = documents(settings.batch, settings.length)
            cotangents = None
            try:
                found, cotangents = everything(operator, arrays, ids, implementation, cotangents)
            except ValueError as error:
                yield name, str(error)
                continue
            wide = {key: x.astype(jnp.float32) for key, x in arrays.items()}
            expected, _ = everything(operator, wide, ids, "reference", cotangents)
            outputs, gradients = (
                max(ratio(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))
                for x, y in zip(expected, found, strict=True)
            )
            most_output, most_gradient = LIMITS[settings.dtype]
            yield name, outputs, gradients, outputs < most_output and gradients < most_gradient


def documents(batch: int, length: int) -> jax.Array:
    """[batch, length] ids: documents of many lengths, of one token too, and padding between and after them."""
    rng = np.random.default_rng(0)
    rows = np.cumsum(rng.random((batch, length)) < 0.02, axis=1) + 1
    rows[rng.random((batch, length)) < 0.05] = 0
    rows[:, -length // 10 :] = 0
    return jnp.asarray(rows, jnp.int32)


def everything(operator: str, arrays, ids, implementation: str, cotangents):
    """((outputs), gradients of all arrays) for random cotangents, which are drawn where none are given."""

    def run(arrays):
        outputs = getattr(kernels, operator)(**arrays, segment_ids=ids, implementation=implementation)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    if cotangents is None:
        rng = np.random.default_rng(1)
        shapes = jax.eval_shape(run, arrays)
        cotangents = [jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in shapes]

    def both(arrays, cotangents):
        outputs, back = jax.vjp(run, arrays)
        given = tuple(c.astype(o.dtype) for c, o in zip(cotangents, outputs, strict=True))
        return outputs, back(given)[0]

    with jax.default_matmul_precision("highest"):
        return jax.jit(both)(arrays, cotangents), cotangents


def ratio(expected: jax.Array, found: jax.Array) -> float:
    """RMS of the difference over RMS of what is expected; infinite where a number isn't finite."""
    expected, found = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    error = np.sqrt(np.mean(np.square(expected - found))) / (np.sqrt(np.mean(np.square(expected))) + 1e-8)
    return float(error) if np.isfinite(error) else float("inf")


def compare(implementation: str, chip_name: str) -> Iterator[str]:
    """Times the published shapes of this chip, or of all where it has none."""
    chip = chips.find(dispatch.device()[1])
    here = [p for p in PUBLISHED if p.chip == chip_name] or PUBLISHED
    timed: dict[tuple, dict[str, float]] = {}
    for p in here:
        key = (p.operator, p.gate, *p.shape.items())
        if key not in timed:
            settings = Settings(implementations=(implementation, "xla"), dtype="bfloat16", **p.shape)
            report = measure_case(Case(p.operator, p.gate, settings), chip)
            timed[key] = {r["implementation"]: r["seconds"] for r in report["results"]}
        for name, seconds in timed[key].items():
            ms = 1e3 * seconds[p.which]
            yield (
                f"{p.operator} T {p.shape['length']} {p.which}, {name}: {ms:.3f} ms,"
                f" {p.milliseconds / ms:.2f} of {p.who}'s speed on {p.chip.upper()} ({p.milliseconds} ms)"
            )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", default="pallas", help="what is checked and timed (pallas)")
    parser.add_argument("--operators", default=",".join(GATES), help="what is checked (all)")
    parser.add_argument("--length", type=int, default=LENGTH, help=f"tokens of the rows that are checked ({LENGTH})")
    parser.add_argument("--no-times", action="store_true", help="check only")
    args = parser.parse_args(argv)
    try:
        operators = tuple(args.operators.split(","))
        Settings(operators=operators, implementations=(args.implementation,), length=args.length)
    except ValueError as error:
        parser.error(str(error))
    device = dispatch.device()[1]
    print(f"{args.implementation} on {device}: worst output, worst gradient")
    right, checked = True, 0
    for dtype in LIMITS:
        shape = dict(batch=2, length=args.length, heads=4, key_heads=2, key_dim=128, value_dim=64)
        settings = Settings(operators=operators, dtype=dtype, **shape)
        for name, *result in check(args.implementation, settings):
            if len(result) == 1:
                print(f"  {name}: {result[0]}")
                continue
            outputs, gradients, fine = result
            right, checked = right and fine, checked + 1
            print(f"  {name}: {outputs:.1e} {gradients:.1e}{'' if fine else '   WRONG'}", flush=True)
    if right and not args.no_times:
        name = next((name for name in ("h100", "h200") if name in device.lower()), "")
        for line in compare(args.implementation, name):
            print(line, flush=True)
    if not checked:
        print("nothing was checked: every call was refused")
    return 0 if right and checked else 1


if __name__ == "__main__":
    sys.exit(main())
