"""AdamW with an explicit list of decayed leaves, and learning-rate schedules.

Every count here (`warmup_steps`, `decay_steps`, the schedule's argument) is in *optimizer steps*: one update of the
parameters, however many microbatches its gradient was summed over.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hyjax.config.errors import lookup, near

SCHEDULES = ("cosine", "wsd", "constant")


def schedule(optimizer_config: Mapping[str, Any], steps: int) -> Callable[[Any], jax.Array]:
    """Learning rate of update number `step` (0 is the first) in a run of `steps` updates, float32.

    * warm-up: `peak * (step + 1) / warmup_steps` while `step < warmup_steps`, so no update is wasted at zero;
    * `constant`: the peak from there on;
    * `cosine`: half a cosine from the peak at `warmup_steps` to `final_fraction * peak` at `steps`;
    * `wsd` (warm-up, stable, decay): the peak, then a straight line over the last `decay_steps` updates
      (0: a fifth of the run) to `final_fraction * peak` at `steps`.

    `steps` itself is one past the last update, so the last update is one notch above the floor. Beyond it the
    floor holds.
    """
    name = optimizer_config["schedule"]
    peak = float(optimizer_config["learning_rate"])
    floor = float(optimizer_config["final_fraction"])
    warmup = int(optimizer_config["warmup_steps"])
    decay = _decay_steps(optimizer_config, steps)
    _check(name, peak, floor, warmup, decay, steps)

    def learning_rate(step: Any) -> jax.Array:
        step = jnp.asarray(step).astype(jnp.float32)
        ramp = jnp.minimum(1.0, (step + 1) / max(1, warmup))
        done = jnp.clip((step - (steps - decay)) / max(1, decay), 0.0, 1.0)
        fall = 0.5 * (1 + jnp.cos(math.pi * done)) if name == "cosine" else 1 - done
        return peak * ramp * (floor + (1 - floor) * fall)

    return learning_rate


def _decay_steps(optimizer_config: Mapping[str, Any], steps: int) -> int:
    if optimizer_config["schedule"] == "cosine":
        return steps - int(optimizer_config["warmup_steps"])
    if optimizer_config["schedule"] == "wsd":
        return int(optimizer_config["decay_steps"]) or -(-steps // 5)
    return 0


def _check(name: str, peak: float, floor: float, warmup: int, decay: int, steps: int) -> None:
    lookup(dict.fromkeys(SCHEDULES), name, "optimizer.schedule")
    if not (math.isfinite(peak) and peak >= 0):
        raise ValueError(f"optimizer.learning_rate={peak} must be a finite number, 0 or more")
    if not 0 <= floor <= 1:
        raise ValueError(f"optimizer.final_fraction={floor} must lie between 0 and 1")
    if warmup < 0 or decay < 0 or warmup + decay > steps:
        raise ValueError(
            f"optimizer.warmup_steps={warmup} and {decay} steps of decay do not fit into train.steps={steps}; "
            "all three count optimizer steps"
        )


def build(optimizer_config: Mapping[str, Any], steps: int, params: Any) -> optax.GradientTransformation:
    """AdamW for the tree `params` (arrays or shapes), preceded by clipping to `clip_norm` (0: off).

    Moments are float32. Weight decay is decoupled (scaled by the learning rate) and applies to the leaves that
    `decay` lists and to no others. The state's tree is the same with and without clipping or decay, so these may
    change between a checkpoint and its resumption.
    """
    require_float32(params, "params")
    names = tuple(optimizer_config["decay"])
    if optimizer_config["weight_decay"] > 0:
        _refuse_unmatched(params, names)
    clip = optimizer_config["clip_norm"]
    return optax.chain(
        optax.clip_by_global_norm(clip) if clip > 0 else optax.identity(),
        optax.adamw(
            schedule(optimizer_config, steps),
            b1=optimizer_config["b1"],
            b2=optimizer_config["b2"],
            eps=optimizer_config["eps"],
            mu_dtype=jnp.float32,
            weight_decay=optimizer_config["weight_decay"],
            mask=lambda tree: decay_mask(tree, names),
        ),
    )


def leaf_paths(tree: Any) -> list[str]:
    """Names of the leaves in the tree's own order: keys joined by "/", such as "layers/G/mixer/q/kernel"."""
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]


def decay_mask(params: Any, names: Sequence[str]) -> Any:
    """Tree of bools: True where the leaf's name, or the end of its path ("head/kernel"), is in `names`."""
    flags = [any(_matches(path, name) for name in names) for path in leaf_paths(params)]
    return jax.tree.unflatten(jax.tree.structure(params), flags)


def decay_list(params: Any, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(paths that are decayed, paths that are not), each in the tree's order: what a run prints at its start."""
    flags = jax.tree.leaves(decay_mask(params, names))
    pairs = list(zip(leaf_paths(params), flags, strict=True))
    return [path for path, flag in pairs if flag], [path for path, flag in pairs if not flag]


def require_float32(tree: Any, name: str) -> None:
    """Raise a ValueError naming the first floating-point leaf that is not float32.

    Parameters and moments are float32 masters: in bfloat16 an update of 6e-4 on a value of 1.0 rounds to nothing.
    """
    for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.dtype != jnp.float32:
            raise ValueError(f"{name}/{path} is {leaf.dtype}; it must be float32 (masters; compute may be narrower)")


def _matches(path: str, name: str) -> bool:
    return path == name or path.endswith("/" + name)


def _refuse_unmatched(params: Any, names: Sequence[str]) -> None:
    paths = leaf_paths(params)
    for name in names:
        if not any(_matches(path, name) for path in paths):
            leaves = sorted({path.rsplit("/", 1)[-1] for path in paths})
            raise ValueError(
                f"optimizer.decay names {name!r}, which no parameter is called{near(name, [*leaves, *paths])}; "
                f"there are {', '.join(leaves)}"
            )
