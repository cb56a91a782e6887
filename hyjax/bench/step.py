"""A training step of the all-recurrent recall model against the plain forms of the same model.

The plain form is what one writes first: the gates' cumulative sums, exp(where(mask, cum_i − cum_j, −inf)) over
[B,T,T,H], and two einsums, differentiated by JAX. Its time and memory grow with T². Everything else of the model and
the step is the same, and the forms take turns, so that a busy machine slows all of them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from hyjax.config import DEFAULTS
from hyjax.models import HybridLM
from hyjax.models.mixers import MIXERS
from hyjax.models.mixers.gated_linear_attention import GatedLinearAttention
from hyjax.train import optimizer as optimizers
from hyjax.train.step import TrainState, create_state, make_train_step

MODEL = {
    "layout": "GGGG",
    "width": 32,
    "heads": 4,
    "norm": "layernorm",
    "ffn": "gelu",
    "position": "learned",
    "streams": (64, 33),
    "vocab_size": 32,
    "head_bias": True,
    "remat": "kernels",
}
ADAM = DEFAULTS["optimizer"] | {"learning_rate": 3e-3, "schedule": "constant", "b2": 0.999, "clip_norm": 0.0}


class Case(NamedTuple):
    name: str
    batch: int
    length: int
    steps: int  # timed steps of each form, in each of its turns


ROUNDS = 3  # turns that each form has
# the seed experiment's largest load, 64 pairs; and a row long enough for the square to show
CASES = (Case("recall, 64 pairs", 128, 128, 6), Case("rows of 1024", 16, 1024, 2))


class QuadraticForm(GatedLinearAttention):
    """The same layer, its scan written as a masked square."""

    def scan(self, q, k, v, log_decay, state, segment_ids):
        total = jnp.cumsum(log_decay, axis=1)
        mask = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))[None, :, :, None]
        decay = jnp.exp(jnp.where(mask, total[:, :, None] - total[:, None], -jnp.inf))
        scores = jnp.einsum("bthk,bshk->btsh", q, k) * decay
        return jnp.einsum("btsh,bshv->bthv", scores, v) * q.shape[-1] ** -0.5, None


FORMS: dict[str, dict[str, Any]] = {
    "hyjax": {},
    # without residuals of its own to keep, a plain form is fastest when its layers are run again
    "token by token": dict(implementation="reference", remat="full"),
    "quadratic": dict(legend=dict(G=dict(mixer="quadratic_form")), remat="full"),
}


def main(json: bool = False) -> dict[str, Any]:
    """Runs all cases and prints a table, or one JSON object."""
    results = [measure(case) for case in CASES]
    _print_json(results) if json else _print_table(results)
    return {"cases": results}


def measure(case: Case) -> dict[str, Any]:
    """Median seconds a step of each form, and how many times as long as hyjax's the others take."""
    runs = {name: _prepare(options, case) for name, options in FORMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, step in runs.items():
            step()  # not timed: it pays for what the form before left in the caches and the allocator
            for _ in range(case.steps):
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = {name: value / medians["hyjax"] for name, value in medians.items() if name != "hyjax"}
    return {"case": case.name, "batch": case.batch, "length": case.length, "seconds": medians, "ratio": ratios}


def _prepare(options: dict[str, Any], case: Case) -> Callable[[], float]:
    """A function that does one training step (compiled already) and waits for its loss."""
    with mock.patch.dict(MIXERS, quadratic_form=QuadraticForm):
        model = HybridLM(MODEL | dict(max_positions=case.length) | options)
    rng = np.random.default_rng(0)
    shape = (case.batch, case.length)
    batch = dict(
        tokens=np.stack([rng.integers(0, size, shape, dtype=np.int32) for size in (64, 33)], axis=-1),
        targets=rng.integers(0, 32, shape, dtype=np.int32),
        weights=np.ones(shape, np.float32),
    )
    params = jax.jit(model.init)(jax.random.key(0), batch["tokens"][:1])["params"]
    optimizer = optimizers.build(ADAM, 1000, params)
    train_step = make_train_step(model, optimizer, optimizers.schedule(ADAM, 1000))
    state: list[TrainState] = [create_state(params, optimizer, jax.random.key(1))]

    def step() -> float:
        state[0], metrics = train_step(state[0], batch)
        return float(metrics["loss"])

    step()
    step()
    return step


def _print_json(results: list[dict[str, Any]]) -> None:
    print(json.dumps({"device": jax.devices()[0].device_kind, "cases": results}, indent=2))


def _print_table(results: list[dict[str, Any]]) -> None:
    print(f"one training step of {MODEL['layout']}, width {MODEL['width']}, on {jax.devices()[0].device_kind}")
    for result in results:
        print(f"{result['case']}: batch {result['batch']}, T = {result['length']}")
        for name, seconds in result["seconds"].items():
            ratio = f"{result['ratio'][name]:6.1f}x" if name in result["ratio"] else ""
            print(f"  {name:<16}{1000 * seconds:10.1f} ms  {ratio}")
