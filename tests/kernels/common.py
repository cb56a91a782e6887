"""What the operators' tests share: closeness as KERNELS measures it, inputs, gradients of every input at once."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tests.kernels import errors

FLOAT32 = (1e-5, 1e-4)  # tolerances of outputs and of gradients
FLOAT64 = (1e-10, 1e-10)
HALF = (5e-3, 2e-2)

# Gates by name: every regime is a row of the batch, so that one compilation serves all of them.
REGIMES = ("zero", "-0.05", "-5", "-50", "-1000", "mixed", "trained", "tiny")


def ratio(reference, out) -> float:
    """RMS(reference - out) / (RMS(reference) + 1e-8), in float64."""
    reference, out = np.asarray(reference, np.float64), np.asarray(out, np.float64)
    rms = lambda x: float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
    return rms(reference - out) / (rms(reference) + 1e-8)


def assert_close(reference, out, tolerance: float, what: str = "", absolute: float = 1e-6) -> None:
    """max|reference - out| <= absolute or ratio < tolerance; any number that isn't finite fails."""
    reference, out = np.asarray(reference, np.float64), np.asarray(out, np.float64)
    assert reference.shape == out.shape, f"{what}: shapes {reference.shape} and {out.shape}"
    assert np.isfinite(reference).all() and np.isfinite(out).all(), f"{what}: not finite"
    if reference.size and np.max(np.abs(reference - out)) > absolute:
        error = ratio(reference, out)
        errors.record(error, tolerance)
        assert error < tolerance, f"{what}: ratio {error:.2e}"


def assert_all_close(reference, out, names: Sequence[str], tolerances: tuple[float, float], num_outputs: int) -> None:
    """`reference` and `out`: (outputs, gradients) as `everything` returns them; every row of the batch on its own."""
    arrays = zip((*reference[0], *reference[1]), (*out[0], *out[1]), names, strict=True)
    absolute = 1e-6 if tolerances[0] > 1e-8 else 1e-12
    for i, (a, b, name) in enumerate(arrays):
        tolerance = tolerances[0] if i < num_outputs else tolerances[1]
        for row in range(len(a)) if np.ndim(a) > 2 else [slice(None)]:
            assert_close(a[row], b[row], tolerance, f"{name}[{row}]", absolute)


def everything(function: Callable, cotangents: Sequence[jax.Array], *inputs):
    """Outputs (a tuple) and gradients of Σ outputs · cotangents with respect to every input."""

    def loss(*inputs):
        outputs = function(*inputs)
        terms = (jnp.sum(o.astype(c.dtype) * c) for o, c in zip(outputs, cotangents, strict=True))
        return sum(terms), outputs

    grads, outputs = jax.grad(loss, tuple(range(len(inputs))), has_aux=True)(*inputs)
    return outputs, grads


def normal(seed: int, *shapes: tuple[int, ...], dtype=np.float32) -> list[jax.Array]:
    """Standard normal arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def gates(seed: int, shape: tuple[int, ...], dtype=np.float32) -> jax.Array:
    """Log decays [len(REGIMES), ...]: row r is of the kind REGIMES[r]."""
    rng = np.random.default_rng(seed)
    spread = rng.uniform(0.7, 1.3, shape)
    rows = {
        "zero": np.zeros(shape),
        "mixed": -rng.choice([0.0, 1e-4, 0.05, 5.0, 50.0, 1000.0], shape),
        "trained": -np.logaddexp(0, rng.normal(-4.5, 1.5, shape)),
        "tiny": np.log(rng.choice([1e-12, 1e-4, 1.0], shape)),
    }
    out = [rows[r][i] if r in rows else float(r) * spread[i] for i, r in enumerate(REGIMES)]
    return jnp.asarray(np.stack(out), dtype)


def poisoned(x: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """x [B, T, ...] with NaN wherever the id is 0."""
    return jnp.where((segment_ids == 0)[(..., *(None,) * (x.ndim - 2))], jnp.nan, x)


def document_rows(time: int) -> jax.Array:
    """[8, time] ids: one document; pads left, right, between; starts mid-chunk and on edges of 16; documents of one
    token; a repeated id that is a new document; nothing but padding; and a random mixture."""
    rng = np.random.default_rng(time)
    rows = np.ones((8, time), np.int32)
    rows[1, : time // 3] = 0
    rows[2, time // 2 :] = 0
    rows[3] = 1 + (np.arange(time) >= 16) + (np.arange(time) >= 21)
    rows[3, 5:8] = 0
    rows[4] = np.arange(time) + 1
    rows[5] = np.where(np.arange(time) // 7 % 2, 5, 3)
    rows[6] = 0
    rows[7] = np.cumsum(rng.random(time) < 0.2) * (rng.random(time) < 0.8)
    return jnp.asarray(rows)
