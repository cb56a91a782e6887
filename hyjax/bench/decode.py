"""Time per token at several contexts, of several layouts in turns.

Every layout gets the same widths, and one state with room for the longest context, which is filled by reading a random
prompt of that length in pieces. For a shorter context the row's clock is set back: what attention then sees are the
first tokens of that prompt, and what it skips is the rest of the cache, as in a row that has only begun. (A recurrence
keeps the matrix of the whole prompt, which has the same size.) Layouts take turns at each context, so that a busy
machine slows all of them, and each turn is preceded by a few tokens that are not timed.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hyjax.cost import count_params
from hyjax.cost.state import state_sizes
from hyjax.generate import Generation, Generator, Sampling
from hyjax.models import HybridLM

WARM_UP = 2  # tokens before each turn, not timed
PREFILL_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured: `tokens` a turn and row, `rounds` turns, of models with these sizes."""

    contexts: tuple[int, ...] = (256, 1024, 4096, 16384)
    layouts: tuple[str, ...] = ("GGAG", "AAAA", "GGGG")
    width: int = 768
    heads: int = 12
    kv_heads: int = 3
    vocab_size: int = 16384
    batch: int = 1
    tokens: int = 16
    rounds: int = 7

    def __post_init__(self) -> None:
        for name in ("contexts", "layouts"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} is {values!r}; it must name at least one, and none twice")
        if min(self.contexts) < 1:
            raise ValueError(f"contexts is {self.contexts}; a context holds at least 1 token")

    def model(self, layout: str) -> HybridLM:
        sizes = {name: getattr(self, name) for name in ("width", "heads", "kv_heads", "vocab_size")}
        return HybridLM(sizes | {"layout": layout})


def main(settings: Settings, json: bool = False) -> dict[str, Any]:
    """Measures, and prints a table or one JSON object."""
    report = measure(settings)
    _print_json(report) if json else _print_table(report)
    return report


def measure(settings: Settings) -> dict[str, Any]:
    """Median seconds a token at each context, and how many times as long as at the shortest."""
    runs = {layout: Run(settings, layout) for layout in settings.layouts}
    contexts = sorted(settings.contexts)
    seconds: dict[tuple[str, int], list[float]] = {(x, n): [] for x in settings.layouts for n in contexts}
    for turn in range(settings.rounds):
        for context in contexts[:: 1 if turn % 2 == 0 else -1]:  # no context always follows the longest one
            for layout, run in runs.items():
                seconds[layout, context].append(run.time_per_token(context, settings.tokens))
    results = []
    for layout, run in runs.items():
        medians = {str(n): statistics.median(seconds[layout, n]) for n in contexts}
        shortest = medians[str(contexts[0])]
        results.append(
            {
                "layout": layout,
                "params": run.params,
                "prefill_tokens_per_second": run.prefill_rate,
                "seconds_per_token": medians,
                "fastest": {str(n): min(seconds[layout, n]) for n in contexts},
                "ratio": {n: value / shortest for n, value in medians.items()},
                "state_bytes": {str(n): state_sizes(run.model, n, settings.batch).total() for n in contexts},
            }
        )
    device = jax.devices()[0].device_kind
    return {"device": device, "settings": dataclasses.asdict(settings), "room": runs[layout].room, "results": results}


class Run:
    """A layout whose state has read a prompt as long as the longest context."""

    def __init__(self, settings: Settings, layout: str):
        self.model = model = settings.model(layout)
        params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))["params"]
        self.params = count_params(model.config)["total"]
        longest, new = max(settings.contexts), WARM_UP + settings.tokens
        self.room = -(-(longest + new) // PREFILL_CHUNK) * PREFILL_CHUNK
        self.generator = Generator(model, params, self.room, prefill_chunk=PREFILL_CHUNK)
        self.prompts = np.random.default_rng(0).integers(0, settings.vocab_size, (settings.batch, longest))
        sampling = Sampling(max_new_tokens=new, temperature=0.0)
        self.generator.start([*self.prompts[:, :2]], sampling).advance()  # compiles
        start = time.perf_counter()
        self.generation: Generation = self.generator.start([*self.prompts], sampling)
        jax.block_until_ready(self.generation.rows)
        self.prefill_rate = self.prompts.size / (time.perf_counter() - start)

    def time_per_token(self, context: int, tokens: int) -> float:
        """Seconds a token of every row, when `context` tokens stand before the first that is drawn."""
        self._set_back(context)
        self.generation.advance(WARM_UP)
        start = time.perf_counter()
        self.generation.advance(tokens)
        return (time.perf_counter() - start) / tokens

    def _set_back(self, context: int) -> None:
        rows = self.generation.rows
        now = lambda: jnp.full(rows.count.shape, context - 1, jnp.int32)  # the prompt's last token is not read yet
        clock = dataclasses.replace(rows.state.clock, time=now(), position=now())
        self.generation.rows = dataclasses.replace(
            rows,
            state=dataclasses.replace(rows.state, clock=clock),
            token=jnp.asarray(self.prompts[:, context - 1], jnp.int32),
            count=jnp.zeros_like(rows.count),
            done=jnp.zeros_like(rows.done),
        )
        self.generation.done = [False] * len(self.generation.done)


def _print_json(report: dict[str, Any]) -> None:
    print(json.dumps(report, indent=2))


def _print_table(report: dict[str, Any]) -> None:
    settings, contexts = report["settings"], sorted(report["settings"]["contexts"])
    print(
        f"ms a token (and times the shortest context's) on {report['device']}: width {settings['width']},"
        f" {settings['heads']} heads, {settings['kv_heads']} for keys and values, batch {settings['batch']};"
        f" room for {report['room']:,} tokens"
    )
    print("layout    " + "".join(f"{f'{n:,} tokens':>20}" for n in contexts) + f"{'state at the last':>20}")
    for result in report["results"]:
        cells = _cells(result, contexts)
        size = result["state_bytes"][str(contexts[-1])] / 2**20
        print(f"{result['layout']:<10}" + "".join(f"{cell:>20}" for cell in cells) + f"{size:>16.1f} MiB")


def _cells(result: dict[str, Any], contexts: Sequence[int]) -> list[str]:
    return [f"{1000 * result['seconds_per_token'][str(n)]:.2f} ({result['ratio'][str(n)]:.2f}x)" for n in contexts]
