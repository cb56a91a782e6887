"""Which implementation serves a call, for which device, and the argument checks that the operators share."""

import importlib
import logging
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hyjax.kernels import varying

log = logging.getLogger("hyjax.kernels")

NAMES = ("auto", "reference", "xla", "pallas", "splash", "cudnn")
# What "auto" takes where it serves the call, by platform and operator; else "xla". It is filled by what
# `hyjax bench kernels` finds on a device. TPU: so far by the compiler's static schedules and memory. GPU: empty until
# experiments/kernels_on_device.py has found the kernels right on one, since an interpreter shows no missing wait.
PREFERRED: dict[str, dict[str, str]] = {
    "tpu": {
        "attention": "pallas",
        "linear_scan": "pallas",
        "delta_scan": "pallas",
        "diagonal_scan": "pallas",
        "selective_scan": "pallas",
    },
}
_logged: set[str] = set()


def device() -> tuple[str, str]:
    """(platform, kind) of the device that is traced for, such as ("tpu", "TPU v5 lite"); platform: cpu, gpu, tpu.

    The active mesh's devices, which may be there in name only (compiling ahead of time), else the default device.
    """
    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    if mesh_device is not None:
        return mesh_device.platform or jax.default_backend(), mesh_device.device_kind
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    return default.platform, default.device_kind


def choose(operator: str, implementation: str, interpret: bool, kernels: str | Mapping[str, str | None]) -> str:
    """The implementation that serves a call; raises ValueError, with what would be possible, where none can.

    Args:
      kernels: for "pallas_tpu", "pallas_gpu", "splash" and "cudnn", as far as the operator has them, None where it
        serves the call, or why it does not. A string: why the operator has no kernel at all.

    Returns one of these, "reference" or "xla". "pallas" is "pallas_gpu" on a GPU and "pallas_tpu" elsewhere, where
    `interpret` lets it run; "auto" is PREFERRED's, and its choice is logged once an operator and reason.
    """
    if implementation not in NAMES:
        raise ValueError(f"{operator}: implementation={implementation!r} is none of {', '.join(NAMES)}")
    platform = device()[0]
    if implementation == "auto" and not interpret:
        wanted = PREFERRED.get(platform, {}).get(operator, "xla")
        found, reason = _resolve(wanted, platform, False, kernels) if wanted != "xla" else ("xla", None)
        choice = found if reason is None else "xla"
        message = f"{operator}: implementation 'auto' is {choice!r} on {platform}"
        message += f", since {wanted!r} can't serve: {reason}" if reason else ""
        if message not in _logged:
            _logged.add(message)
            log.info(message)
        return choice
    if interpret and implementation != "pallas":
        raise ValueError(f"{operator}: interpret=True modifies implementation='pallas' only, not {implementation!r}")
    if implementation in ("reference", "xla"):
        return implementation
    found, reason = _resolve(implementation, platform, interpret, kernels)
    if reason is not None:
        raise ValueError(f"{operator}: implementation={implementation!r} can't serve this call: {reason}; use 'xla'")
    return found


def _resolve(
    name: str, platform: str, interpret: bool, kernels: str | Mapping[str, str | None]
) -> tuple[str, str | None]:
    """(implementation, None or why it can't serve)."""
    found = {"pallas": "pallas_gpu" if platform == "gpu" else "pallas_tpu"}.get(name, name)
    if isinstance(kernels, str):
        return found, f"no Pallas kernel serves this operator: {kernels}"
    if found not in kernels:
        return found, "the operator has no such kernel"
    needs = "tpu" if found in ("pallas_tpu", "splash") else "gpu"
    if platform != needs and not (interpret and name == "pallas"):
        hint = ", and interpret=True runs it here" if name == "pallas" else ""
        return found, f"it runs on {'a TPU or a GPU' if name == 'pallas' else needs.upper()}, not on {platform}{hint}"
    return found, kernels[found]


class Run(NamedTuple):
    """How a call runs, as one hashable value for the operator's custom_vjp: by whose forward and backward, and how."""

    operator: str
    implementation: str  # a module in the operator's folder, which is imported when it is called for
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, operator: str, implementation: str, interpret: bool, **options: Any) -> "Run":
        """`interpret` goes to the kernels alone."""
        if implementation.startswith("pallas"):
            options["interpret"] = interpret
        return cls(operator, implementation, tuple(options.items()))

    def forward(self, *arrays):
        return self._module().forward(*arrays, **dict(self.options))

    def backward(self, *arrays):
        return self._module().backward(*arrays, **dict(self.options))

    def _module(self) -> ModuleType:
        return importlib.import_module(f"hyjax.kernels.{self.operator}.{self.implementation}")


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


def check_whole(operator: str, name: str, value: int | None) -> None:
    """Raise ValueError unless `value` is None or a whole number of at least 1."""
    if value is not None and (not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{operator}: {name}={value} must be a whole number of at least 1, or None")


def unless_empty(kernels: Mapping[str, str | None], *arrays: jax.Array) -> Mapping[str, str | None]:
    """`kernels` as `choose` takes it, all of them refused where an array is empty: there is nothing to launch."""
    empty = next((tuple(x.shape) for x in arrays if x.size == 0), None)
    return kernels if empty is None else dict.fromkeys(kernels, f"an array of shape {empty} is empty")


def scale_of(operator: str, scale: float | None, key_dim: int) -> float:
    """`scale` as a number, None as key_dim ** -0.5: kernels are compiled with it."""
    if isinstance(scale, jax.core.Tracer):
        raise ValueError(f"{operator}: scale must be a number that is known when tracing; multiply q by it instead")
    return key_dim**-0.5 if scale is None else float(scale)


def compute_dtype(*arrays: jax.Array) -> jnp.dtype:
    """The dtype of the arithmetic: float64 where an input is, else float32."""
    return jnp.result_type(jnp.float32, *(a.dtype for a in arrays))


def interpreter(interpret: Any, *arrays: jax.Array) -> Any:
    """`interpret` as pallas_call takes it on a TPU: JAX's quick interpreter fails in shard_map, its slow one works."""
    if interpret is True and any(varying.axes(x) for x in arrays):
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.InterpretParams()
    return interpret


def by_backend[T](table: dict[str, T]) -> T:
    """The entry of a table of "cpu", "gpu" and "tpu" that serves the device traced for."""
    platform = device()[0]
    return table[platform if platform in table else "gpu"]
