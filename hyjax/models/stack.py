"""Running a layout: its program of runs and periods, over parameters stacked by kind.

Every kind's layers are stacked in order of depth, so what a run or a period needs of a stack is a static slice of
it: nothing is gathered, and the trace holds each distinct stretch of the layout once, however deep the model is.

Parameters and states are `{kind: tree}` whose leaves have that kind's layers as their first dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.layout import Program, expand

# one layer: (kind, its parameters, x, its state) -> (x, its state)
Apply = Callable[[str, Any, jax.Array, Any], tuple[jax.Array, Any]]
Stacks = dict[str, Any]


def run(program: Program, params: Stacks, x: jax.Array, states: Stacks, apply: Apply) -> tuple[jax.Array, Stacks]:
    """x through the layers of `program`; returns x and the new states, stacked as they came.

    `params` and `states` hold exactly the layers of `program`. Layers without state have a state of None.
    """
    used: Counter[str] = Counter()  # how many of each kind's layers lie before the item at hand
    pieces: dict[str, list[Any]] = {kind: [] for kind in params}
    for item in program:
        unit, repeats = ((item,), 1) if isinstance(item, str) else item
        layers = Counter(expand(unit))
        params_here, states_here = (
            {k: _fold(stacks[k], used[k], repeats, n) for k, n in layers.items()} for stacks in (params, states)
        )
        if isinstance(item, str):
            one = jax.tree.map(lambda a: a[0, 0], (params_here[item], states_here[item]))
            x, state = apply(item, one[0], x, one[1])
            new = {item: jax.tree.map(lambda a: a[None, None], state)}
        else:
            x, new = lax.scan(partial(_period, unit, apply), x, (params_here, states_here))
        for kind, n in layers.items():
            pieces[kind].append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), new[kind]))
            used[kind] += repeats * n
    return x, {
        kind: jax.tree.map(lambda *a: jnp.concatenate(a) if len(a) > 1 else a[0], *p) for kind, p in pieces.items()
    }


def _period(unit: Program, apply: Apply, x: jax.Array, stacks: tuple[Stacks, Stacks]) -> tuple[jax.Array, Stacks]:
    return run(unit, stacks[0], x, stacks[1], apply)


def _fold(tree: Any, start: int, repeats: int, layers: int) -> Any:
    """Layers start … start + repeats·layers of a stack, as [repeats, layers, …]."""
    count = repeats * layers
    return jax.tree.map(lambda a: a[start : start + count].reshape(repeats, layers, *a.shape[1:]), tree)
