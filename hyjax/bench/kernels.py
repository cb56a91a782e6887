"""Every implementation of an operator against the others, in turns, forward and with all gradients.

A case is an operator with one kind of gate. Each implementation that serves the case on this device is compiled as it
is used, forward alone and forward with the gradients of all inputs for cotangents of ones; what doesn't serve it is
listed with the reason. Implementations take turns, so that a busy machine slows all of them, and each turn is preceded
by a call that is not timed. Temporary memory is the compiler's, at a quarter, half and the whole of T. In the table,
"both passes" is forward and backward together, and "reference" how many times as fast as its they are.

Where the chip is known (hyjax/cost/chips.py), `roofline` is the least time of hyjax/cost/roofline.py over the median.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from hyjax import kernels
from hyjax.bench import peers
from hyjax.cost import chips, roofline
from hyjax.kernels import dispatch

Arrays = dict[str, jax.Array]

IMPLEMENTATIONS = tuple(name for name in dispatch.NAMES if name != "auto")
GATES: dict[str, tuple[str, ...]] = {
    "attention": ("",),
    "linear_scan": ("head", "channel"),
    "delta_scan": ("none", "head", "channel"),
    "diagonal_scan": ("",),
    "selective_scan": ("",),
    "short_conv": ("",),
}
LIBRARIES = ("splash", "cudnn")  # which have attention alone
TAPS = 4  # of short_conv
LEAST_TURN = 0.02  # seconds: a quicker call is repeated within its turn
SLOW = 1.0  # seconds: a slower call is timed once; all are compiled before


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured, and its shapes; scans over channels take heads * value_dim of them."""

    operators: tuple[str, ...] = tuple(GATES)
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    batch: int = 1
    length: int = 4096
    heads: int = 8
    key_heads: int = 8  # of q and k in the scans, of k and v in attention
    key_dim: int = 64
    value_dim: int = 64
    state_dim: int = 16  # of selective_scan
    dtype: str = "float32"
    rounds: int = 5

    def __post_init__(self) -> None:
        for name, known in (("operators", tuple(GATES)), ("implementations", IMPLEMENTATIONS)):
            if unknown := [value for value in getattr(self, name) if value not in known]:
                raise ValueError(f"{name} has {unknown[0]!r}, which is none of {', '.join(known)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} is neither float32 nor bfloat16")
        if self.heads % self.key_heads:
            raise ValueError(f"key_heads={self.key_heads} must divide heads={self.heads}")
        if self.length < 4:
            raise ValueError(f"length={self.length} must be at least 4: memory is also taken at a quarter of it")


class Case(NamedTuple):
    operator: str
    gate: str
    settings: Settings

    def arrays(self, length: int) -> Arrays:
        """Random inputs as a trained layer has them: gates that retain, and for the delta rule keys of length 1."""
        s, rng = self.settings, np.random.default_rng(0)
        channels = s.heads * s.value_dim
        normal = lambda *shape: rng.standard_normal((s.batch, length, *shape), np.float32)
        retaining = lambda *shape: -np.logaddexp(0, normal(*shape) - 4.5)
        wide: dict[str, np.ndarray] = {}  # in float32, whatever the dtype of the rest
        if self.operator == "attention":
            keys = normal(s.key_heads, s.key_dim), normal(s.key_heads, s.value_dim)
            narrow = dict(q=normal(s.heads, s.key_dim), k=keys[0], v=keys[1])
        elif self.operator in ("linear_scan", "delta_scan"):
            q, k = normal(s.key_heads, s.key_dim), normal(s.key_heads, s.key_dim)
            narrow = dict(q=q, k=k / np.linalg.norm(k, axis=-1, keepdims=True), v=normal(s.heads, s.value_dim))
            if self.operator == "delta_scan":
                wide["beta"] = 1 / (1 + np.exp(-normal(s.heads)))
            if self.gate != "none":
                wide["log_decay"] = retaining(s.heads, *((s.key_dim,) if self.gate == "channel" else ()))
        elif self.operator == "diagonal_scan":
            narrow, wide = dict(x=normal(channels)), dict(log_decay=retaining(channels))
        elif self.operator == "selective_scan":
            narrow = dict(u=normal(channels), B=normal(s.state_dim), C=normal(s.state_dim))
            steps = np.tile(-np.arange(1, s.state_dim + 1, dtype=np.float32), (channels, 1))
            wide = dict(delta=np.logaddexp(0, normal(channels) - 4.5), A=steps, D=np.ones(channels, np.float32))
        else:
            narrow, wide = dict(x=normal(channels)), dict(weight=np.full((TAPS, channels), 0.5, np.float32))
        arrays = {name: jnp.asarray(x, s.dtype) for name, x in narrow.items()}
        return arrays | {name: jnp.asarray(x) for name, x in wide.items()}

    def passes(self) -> roofline.Passes:
        """What the case has to compute and to move."""
        s, size = self.settings, jnp.dtype(self.settings.dtype).itemsize
        tokens, channels = s.batch * s.length, s.heads * s.value_dim
        if self.operator == "attention":
            dims = s.heads, s.key_heads, s.key_dim, s.value_dim
            return roofline.attention(s.batch, s.length, *dims, itemsize=size)
        if self.operator in ("linear_scan", "delta_scan"):
            options: dict[str, Any] = dict(shared=s.heads / s.key_heads, per_channel=self.gate == "channel")
            if self.operator == "delta_scan":
                options["gated"] = self.gate != "none"
            scan = getattr(roofline, self.operator)
            return scan(tokens, s.heads, s.key_dim, s.value_dim, itemsize=size, **options)
        if self.operator == "selective_scan":
            return roofline.selective_scan(tokens, channels, s.state_dim, itemsize=size)
        if self.operator == "diagonal_scan":
            return roofline.diagonal_scan(tokens, channels, itemsize=size)
        return roofline.short_conv(tokens, channels, TAPS, itemsize=size)


def main(settings: Settings, json: bool = False) -> dict[str, Any]:
    """Measures, and prints a table or one JSON object."""
    report = measure(settings)
    _print_json(report) if json else _print_table(report)
    return report


def measure(settings: Settings) -> dict[str, Any]:
    """Every case: seconds and memory by implementation, and who refused it."""
    chip = chips.find(dispatch.device()[1])
    cases = [Case(name, gate, settings) for name in settings.operators for gate in GATES[name]]
    return {
        "device": dispatch.device()[1],
        "peak": None if chip is None else chip._asdict(),
        "settings": dataclasses.asdict(settings),
        "cases": [measure_case(case, chip) for case in cases],
    }


def measure_case(case: Case, chip: chips.Chip | None) -> dict[str, Any]:
    runs, refused = {}, {}
    for name in case.settings.implementations:
        if case.operator != "attention" and name in LIBRARIES:
            continue
        try:
            runs[name] = Programs.of(case, name)
        except ValueError as error:
            refused[name] = re.sub(r".*can't serve this call: |; use 'xla'$", "", str(error))
    timed: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, run in runs.items():
        timed |= {(name, "forward"): run.forward, (name, "forward_backward"): run.forward_backward}
    for name, calls in peers.of(case.operator, case.gate, case.arrays(case.settings.length)).items():
        timed |= {(name, which): call for which, call in calls.items()}
    seconds = _in_turns(timed, case.settings.rounds)
    bound = case.passes()
    bounds = {"forward": [bound.forward], "forward_backward": [bound.forward, bound.backward]}
    results = []
    for name in dict.fromkeys(name for name, _ in timed):
        times = {which: statistics.median(values) for (who, which), values in seconds.items() if who == name}
        result: dict[str, Any] = {"implementation": name, "seconds": times}
        result["seconds"]["backward"] = times["forward_backward"] - times["forward"]
        result["roofline"] = chip and {
            which: sum(work.seconds(chip) for work in works) / times[which] for which, works in bounds.items()
        }
        if name in runs:
            result["temporary_bytes"] = runs[name].temporary_bytes
        results.append(result)
    reference = next((result["seconds"] for result in results if result["implementation"] == "reference"), None)
    for result in results:
        result["times_as_fast_as_reference"] = reference and {
            which: reference[which] / result["seconds"][which] for which in bounds
        }
    return {
        "operator": case.operator,
        "gate": case.gate or None,
        "auto": _auto(case),
        "flops": {"forward": bound.forward.flops, "backward": bound.backward.flops},
        "bytes": {"forward": bound.forward.bytes, "backward": bound.backward.bytes},
        "results": results,
        "refused": refused,
    }


class Programs(NamedTuple):
    """An implementation of a case, compiled."""

    forward: Callable[[], Any]
    forward_backward: Callable[[], Any]
    temporary_bytes: dict[str, int]  # of forward_backward, by length

    @classmethod
    def of(cls, case: Case, implementation: str) -> Programs:
        """Raises ValueError, the operator's own, where it does not serve the case."""
        function = _operator(case.operator, implementation)
        length = case.settings.length
        arrays = case.arrays(length)
        outputs = jax.eval_shape(function, arrays)
        cotangents = [jnp.ones(o.shape, o.dtype) for o in outputs]
        forward = jax.jit(function).lower(arrays).compile()
        both = {n: _with_gradients(function, case.arrays(n)) for n in (length // 4, length // 2, length)}
        memory = {str(n): program.memory_analysis().temp_size_in_bytes for n, program in both.items()}
        return cls(lambda: forward(arrays), lambda: both[length](arrays, cotangents), memory)


def _operator(name: str, implementation: str) -> Callable[[Arrays], tuple[jax.Array, ...]]:
    def run(arrays: Arrays) -> tuple[jax.Array, ...]:
        outputs = getattr(kernels, name)(**arrays, implementation=implementation)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return run


def _with_gradients(function: Callable, arrays: Arrays):
    """Outputs and the gradients of all inputs, compiled for arrays of these shapes."""

    def run(arrays, cotangents):
        outputs, back = jax.vjp(function, arrays)
        return outputs, back(tuple(cotangents))

    outputs = jax.eval_shape(function, arrays)
    return jax.jit(run).lower(arrays, list(outputs)).compile()


def _in_turns(calls: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, list[float]]:
    """Seconds a call, in each of its turns."""

    def run(call: Callable[[], Any], times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            out = call()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / times

    first = {name: run(call, 1) for name, call in calls.items()}
    seconds: dict[Any, list[float]] = {name: [time] if time > SLOW else [] for name, time in first.items()}
    quick = {name: call for name, call in calls.items() if not seconds[name]}
    times = {name: max(1, int(LEAST_TURN / run(call, 1))) for name, call in quick.items()}
    for _ in range(rounds):
        for name, call in quick.items():
            run(call, 1)
            seconds[name].append(run(call, times[name]))
    return seconds


def _auto(case: Case) -> str:
    """What implementation="auto" is for the case on this device."""
    chosen = []

    def choose(*args):
        chosen.append(choose_one(*args))
        return chosen[-1]

    choose_one = dispatch.choose
    with mock.patch.object(dispatch, "choose", choose):
        jax.eval_shape(_operator(case.operator, "auto"), case.arrays(case.settings.length))
    return chosen[-1]


def _print_json(report: dict[str, Any]) -> None:
    print(json.dumps(report, indent=2))


def _print_table(report: dict[str, Any]) -> None:
    for line in _table(report):
        print(line)


def _table(report: dict[str, Any]) -> Iterator[str]:
    s = report["settings"]
    shape = f"batch {s['batch']}, T {s['length']}, {s['heads']} heads, {s['key_heads']} of keys"
    dims = f"K {s['key_dim']}, V {s['value_dim']}, N {s['state_dim']}"
    yield f"ms on {report['device']}: {shape}, {dims}, {s['dtype']}"
    yield f"{'':<14}{'forward':>10}{'both passes':>14}{'reference':>12}{'roofline':>10}{'temporary memory':>18}"
    for case in report["cases"]:
        gate = {None: "", "none": ", no gate"}.get(case["gate"], f", a gate a {case['gate']}")
        yield f"{case['operator']}{gate} (auto: {case['auto']})"
        for result in case["results"]:
            yield f"  {result['implementation']:<12}" + "".join(_cells(result))
        for name, reason in case["refused"].items():
            yield f"  {name:<12}{reason}"


def _cells(result: dict[str, Any]) -> Iterator[str]:
    yield f"{1e3 * result['seconds']['forward']:>10.2f}{1e3 * result['seconds']['forward_backward']:>14.2f}"
    faster, share = result["times_as_fast_as_reference"], result["roofline"]
    yield f"{faster['forward_backward']:>11.1f}x" if faster else f"{'':>12}"
    yield f"{share['forward_backward']:>10.1%}" if share else f"{'':>10}"
    memory = result.get("temporary_bytes")
    yield f"{list(memory.values())[-1] / 2**20:>14.1f} MiB" if memory else ""
