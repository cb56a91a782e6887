"""Which implementation serves a call, and the argument checks that the operators share."""

import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp

log = logging.getLogger("hyjax.kernels")

NAMES = ("auto", "reference", "xla", "pallas")
_logged: set[str] = set()


def choose(operator: str, implementation: str, interpret: bool, pallas: str) -> str:
    """Return "reference" or "xla" for `implementation`; raise ValueError for what can't serve the call.

    `pallas` says, in a few words, why no Pallas kernel serves this operator. "auto" is logged once an operator.
    """
    if implementation not in NAMES:
        raise ValueError(f"{operator}: implementation={implementation!r} is none of {', '.join(NAMES)}")
    if implementation == "pallas":
        raise ValueError(f"{operator}: no Pallas kernel serves this operator: {pallas}; use implementation='xla'")
    if interpret:
        raise ValueError(f"{operator}: interpret=True modifies implementation='pallas' only, not {implementation!r}")
    if implementation == "auto":
        if operator not in _logged:
            _logged.add(operator)
            log.info("%s: implementation 'auto' is 'xla' on %s", operator, jax.default_backend())
        return "xla"
    return implementation


def check_shape(operator: str, name: str, array: jax.Array, shape: Sequence[int], what: str) -> None:
    """Raise ValueError unless `array` has `shape`; `what` names the dimensions, such as "[B, T, HV]"."""
    if tuple(array.shape) != tuple(shape):
        raise ValueError(f"{operator}: {name} has shape {tuple(array.shape)}, expected {what} = {tuple(shape)}")


def check_rank(operator: str, name: str, array: jax.Array, rank: int, what: str) -> None:
    """Raise ValueError unless `array` has `rank` dimensions."""
    if array.ndim != rank:
        raise ValueError(f"{operator}: {name} has shape {tuple(array.shape)}, expected {what}")


def check_floating(operator: str, **arrays: jax.Array) -> None:
    """Raise ValueError for an array that isn't of a floating dtype."""
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{operator}: {name} has dtype {array.dtype}, expected a floating dtype")


def check_integers(operator: str, **arrays: jax.Array | None) -> None:
    """Raise ValueError for an array (None is passed over) that isn't of an integer dtype."""
    for name, array in arrays.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{operator}: {name} has dtype {array.dtype}, expected an integer dtype")


def compute_dtype(*arrays: jax.Array) -> jnp.dtype:
    """The dtype of the arithmetic: float64 where an input is, else float32."""
    return jnp.result_type(jnp.float32, *(a.dtype for a in arrays))


def zeros_like_varying(shape: Sequence[int], dtype: jnp.dtype, like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes that `like` varies over: what a loop's carry needs inside shard_map."""
    zeros = jnp.zeros(tuple(shape), dtype)
    axes = tuple(getattr(jax.typeof(like).manual_axis_type, "varying", ()))
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros


def by_backend[T](table: dict[str, T]) -> T:
    """The entry of a table of "cpu", "gpu" and "tpu" that serves the default backend."""
    backend = jax.default_backend()
    return table[backend if backend in table else "gpu"]
