"""One optimizer step as a pure function: batch → token-weighted loss → gradients → update → metrics.

The gradient of a step is

    d/dθ [ Σ over every token of the batch: weight · loss ] / W,      W = Σ weights of the whole batch

W is taken once, before the first microbatch, so microbatches and data shards of unequal token counts are weighted
by their tokens: any split of the same rows gives the same gradient. A microbatch without a valid token adds
nothing; a batch without one has gradient zero.

The model is anything with `loss(variables, batch) -> (sum of token losses, aux)`; `aux` holds the sums "z_loss"
(already times its coefficient, and not in the first result), "weight" and "correct".
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hyjax.train.optimizer import leaf_paths, require_float32

Batch = Mapping[str, Any]
DATA_AXIS = "data"


class TrainState(flax.struct.PyTreeNode):
    """Everything that an update changes or needs, and all that a checkpoint holds in arrays.

    `step` counts the updates done. `skipped` counts steps refused since a loss or gradient was not finite: once it
    is above zero no later step changes anything, so a loop that reads its metrics only now and then still finds the
    parameters and the step number that met the fault.
    """

    step: jax.Array  # int32 scalar
    params: Any  # float32 masters
    opt_state: Any
    controllers: Any  # values steered between steps beside the optimizer's (router bias); a dict
    rng: jax.Array  # raw key data, uint32; step s uses fold_in(key, s), so it never changes
    skipped: jax.Array  # int32 scalar


def create_state(params: Any, optimizer: optax.GradientTransformation, rng: jax.Array) -> TrainState:
    """State before the first update. `rng` is a key (typed or raw). Raises where params or moments are not float32."""
    require_float32(params, "params")
    opt_state = optimizer.init(params)
    require_float32(opt_state, "opt_state")
    raw = jax.random.key_data(rng) if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else rng
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero, params=params, opt_state=opt_state, controllers={}, rng=raw, skipped=jnp.zeros_like(zero)
    )


def split_rows(batch: Batch, microbatches: int) -> Batch:
    """[B, ...] → [microbatches, B / microbatches, ...]; microbatch m holds rows m, m + M, m + 2M, ...

    Interleaved, not contiguous: a batch whose rows are sharded over devices in contiguous runs then needs no
    exchange of rows, since every device holds its share of every microbatch.
    """
    rows = batch["tokens"].shape[0]
    if microbatches < 1 or rows % microbatches:
        raise ValueError(f"train.microbatches={microbatches} must divide the batch's {rows} rows")
    return {
        name: x.reshape(rows // microbatches, microbatches, *x.shape[1:]).swapaxes(0, 1) for name, x in batch.items()
    }


def loss_and_grads(model: Any, params: Any, batch: Batch, microbatches: int = 1) -> tuple[dict[str, jax.Array], Any]:
    """(metrics, gradients) of the token-weighted loss. metrics: "loss", "z_loss", "accuracy" per valid token and
    "weight", their number; float32 scalars. Gradients are of loss + z_loss, summed in float32."""
    weight = jnp.sum(batch["weights"], dtype=jnp.float32)
    per_token = jnp.where(weight > 0, 1 / jnp.maximum(weight, 1e-30), 0.0)

    def objective(params: Any, rows: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, aux = model.loss({"params": params}, rows)
        sums = {"loss": loss, "z_loss": aux["z_loss"], "accuracy": aux["correct"]}
        means = {name: per_token * jnp.asarray(value, jnp.float32) for name, value in sums.items()}
        return means["loss"] + means["z_loss"], means

    grad = jax.grad(objective, has_aux=True)
    if microbatches == 1:
        grads, means = grad(params, batch)
    else:

        def accumulate(carry: Any, rows: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, grad(params, rows)), None

        split = split_rows(batch, microbatches)
        shapes = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], split))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (grads, means), _ = jax.lax.scan(accumulate, zeros, split)
    return {**means, "weight": weight}, grads


def make_train_step(
    model: Any,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[Any], jax.Array],
    microbatches: int = 1,
    mesh: Mesh | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Jitted `train_step(state, batch) -> (state, metrics)`; the state that goes in is donated.

    Metrics are scalars: "loss" (cross-entropy, nats a token), "z_loss" (apart from it), "accuracy", "weight" (valid
    tokens), "grad_norm" (before clipping), "learning_rate" (of this update), "non_finite" (how many numbers in the
    losses and gradients are not finite). If any is not, the state comes back unchanged but for `skipped`.

    With a mesh the batch's rows are sharded over its `data` axis and the state is replicated (`replicate`).
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        metrics, grads = loss_and_grads(model, state.params, batch, microbatches)
        non_finite = _count_non_finite((metrics, grads))
        metrics["grad_norm"] = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        metrics["learning_rate"] = schedule(state.step)
        metrics["non_finite"] = non_finite
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # A norm may overflow though each gradient is finite, and clipping by it would then zero them all.
        good = (non_finite == 0) & jnp.isfinite(metrics["grad_norm"]) & (state.skipped == 0)
        changed = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        refused = state.replace(skipped=state.skipped + 1)
        return jax.tree.map(lambda new, old: jnp.where(good, new, old), changed, refused), metrics

    if mesh is None:
        return jax.jit(train_step, donate_argnums=0)
    shards = mesh.shape[DATA_AXIS] * microbatches
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    step = jax.jit(train_step, donate_argnums=0, in_shardings=(whole, rows), out_shardings=(whole, whole))

    def sharded_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        if batch["tokens"].shape[0] % shards:
            raise ValueError(
                f"train.batch_size={batch['tokens'].shape[0]} must be a multiple of {shards}: "
                f"{mesh.shape[DATA_AXIS]} data shards times {microbatches} microbatches"
            )
        return step(state, batch)

    return sharded_step


def make_eval_step(model: Any, mesh: Mesh | None = None) -> Callable[[Any, Batch], dict[str, jax.Array]]:
    """Jitted `eval_step(params, batch)` → the *sums* "loss" (cross-entropy, nats), "weight" and "correct"; divide
    after adding up all batches, so a last, padded batch counts by its tokens."""

    def eval_step(params: Any, batch: Batch) -> dict[str, jax.Array]:
        loss, aux = model.loss({"params": params}, batch)
        return {"loss": loss, "weight": aux["weight"], "correct": aux["correct"]}

    if mesh is None:
        return jax.jit(eval_step)
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    return jax.jit(eval_step, in_shardings=(whole, rows), out_shardings=whole)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree with a copy of every leaf on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def _count_non_finite(tree: Any) -> jax.Array:
    return sum((jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in jax.tree.leaves(tree)), jnp.zeros((), jnp.int32))


def first_bad_tensor(tree: Any) -> str | None:
    """Path of the first leaf that holds a NaN or an infinity ("grads/layers/G/mixer/q/kernel"), or None."""
    for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.all(jnp.isfinite(leaf))):
            return path
    return None


def diagnose(model: Any, params: Any, batch: Batch, microbatches: int = 1) -> str | None:
    """Name of the first tensor that is not finite, in the order params, loss, grads; None if all are finite.

    Where the loss is NaN the operation that first made one follows in brackets, with its place in the source.

    Computes the step's gradients again, without donation or update: call it with the state of a refused step and
    the batch of that step.
    """
    if bad := first_bad_tensor({"params": params}):
        return bad
    metrics, grads = jax.jit(lambda p, b: loss_and_grads(model, p, b, microbatches))(params, batch)
    if bad := first_bad_tensor({"metrics": metrics}):
        return bad + _first_nan(model, params, batch)
    return first_bad_tensor({"grads": grads})


def _first_nan(model: Any, params: Any, batch: Batch) -> str:
    """Such as " (nan generated by primitive: div, .../reference.py:55 (one_query))"; empty if no NaN arises in the
    forward pass."""
    checked = checkify.checkify(lambda p, b: model.loss({"params": p}, b), errors=checkify.nan_checks)
    try:
        error, _ = jax.jit(checked)(params, batch)
    except Exception as failure:  # an operation that can't be checked must not hide what is already known
        return f" (where it arose is not known: {type(failure).__name__})"
    fault = error.get_exception()
    if fault is None:
        return ""
    frames = str(getattr(fault, "traceback_info", "")).splitlines()  # innermost first
    ours = [frame for frame in frames if "/jax/_src/" not in frame and "/flax/" not in frame]
    return f" ({', '.join([str(fault).rstrip('.'), *ours[:1]])})"
