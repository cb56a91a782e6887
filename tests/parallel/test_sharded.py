"""Operators over a mesh: the values and gradients of one device, and nothing that crosses devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hyjax import kernels
from hyjax.parallel import sharded
from tests.kernels import common

B, T, H, HV, K, V = 8, 20, 2, 4, 4, 6
SHAPES = {
    "attention": dict(q=(B, T, HV, K), k=(B, T, H, K), v=(B, T, H, V), sinks=(HV,)),
    "linear_scan": dict(
        q=(B, T, H, K), k=(B, T, H, K), v=(B, T, HV, V), log_decay=(B, T, HV), initial_state=(B, HV, K, V)
    ),
    "delta_scan": dict(
        q=(B, T, H, K), k=(B, T, H, K), v=(B, T, HV, V), beta=(B, T, HV), log_decay=(B, T, HV),
        initial_state=(B, HV, K, V),
    ),
    "diagonal_scan": dict(x=(B, T, HV), log_decay=(B, T, HV), initial_state=(B, HV)),
    "selective_scan": dict(
        u=(B, T, HV), delta=(B, T, HV), A=(HV, K), B=(B, T, K), C=(B, T, K), D=(HV,), initial_state=(B, HV, K)
    ),
    "short_conv": dict(x=(B, T, HV), weight=(4, HV), bias=(HV,), initial_state=(B, 3, HV)),
}  # fmt: skip


def inputs(operator):
    arrays = dict(zip(SHAPES[operator], common.normal(0, *SHAPES[operator].values()), strict=True))
    for name in ("log_decay", "A"):
        if name in arrays:
            arrays[name] = -jnp.exp(arrays[name])
    if "delta" in arrays:
        arrays["delta"] = jnp.exp(arrays["delta"] - 2)
    if "beta" in arrays:
        arrays["beta"] = jax.nn.sigmoid(arrays["beta"])
    return arrays


def tuple_of(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def everything(function, arrays, ids):
    """Outputs, and gradients of their sum of squares with respect to every array."""

    def loss(arrays):
        outputs = tuple_of(function(**arrays, segment_ids=ids))
        return sum(jnp.sum(jnp.square(o)) for o in outputs), outputs

    grads, outputs = jax.grad(loss, has_aux=True)(arrays)
    return outputs, grads


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


MESHES = [dict(data=2, fsdp=2, tensor=2), dict(data=2, context=4)]


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "-".join(f"{k}{v}" for k, v in axes.items()))
@pytest.mark.parametrize("operator", SHAPES)
def test_values_and_gradients_are_those_of_one_device(operator, axes):
    arrays, ids = inputs(operator), common.document_rows(T)
    run = lambda function: jax.jit(functools.partial(everything, function))
    expected = run(getattr(kernels, operator))(arrays, ids)
    with jax.set_mesh(mesh(**axes)):
        found = run(getattr(sharded, operator))(arrays, ids)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        common.assert_close(a, b, 1e-5, operator)


@pytest.mark.parametrize("operator", SHAPES)
def test_nothing_crosses_devices(operator):
    """Arrays that lie as the helper wants them: forward and backward, no collective but the sum of what is whole."""
    where = mesh(data=4, tensor=2)
    letters = dict.fromkeys(("q", "k", "v", "x", "u", "delta", "beta", "log_decay"), "b.h") | dict(B="b", C="b")
    letters |= dict(initial_state="b.h" if operator == "short_conv" else "bh")
    arrays = {name: x for name, x in inputs(operator).items() if name in letters}
    whole = {name: x for name, x in inputs(operator).items() if name not in letters}
    axis = {"b": "data", "h": "tensor", ".": None}
    shardings = {n: NamedSharding(where, PartitionSpec(*(axis[c] for c in letters[n]))) for n in arrays}
    arrays = {n: jax.device_put(x, shardings[n]) for n, x in arrays.items()}
    with jax.set_mesh(where):
        out = jax.eval_shape(lambda a: tuple_of(getattr(sharded, operator)(**a, **whole)), arrays)
        cotangents = tuple(jnp.ones(o.shape, o.dtype) for o in out)
        back = lambda a, c: jax.vjp(lambda a: tuple_of(getattr(sharded, operator)(**a, **whole)), a)[1](c)
        text = jax.jit(back, out_shardings=(shardings,)).lower(arrays, cotangents).compile().as_text()
    assert not re.findall(r"(all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)


def test_what_does_not_divide_is_whole():
    """One row, or heads fewer than devices, are computed on every device that would have shared them."""
    arrays = {name: x[:1] if name != "sinks" else x for name, x in inputs("attention").items()}
    with jax.set_mesh(mesh(data=4, tensor=2)):
        out = jax.jit(sharded.attention)(**arrays)
        np.testing.assert_allclose(out, kernels.attention(**arrays), atol=1e-6)
        heads = {"q": jnp.zeros((8, 1, 4, 2)), "k": jnp.zeros((8, 1, 3, 2))}
        axes = sharded._dividing("h", heads, dict(q="b.h", k="b.h"), {"tensor": 2})
    assert axes == ()


def test_inside_a_manual_region_the_call_is_plain():
    arrays = {name: inputs("linear_scan")[name] for name in ("q", "k", "v", "log_decay")}
    where, spec = mesh(data=8), PartitionSpec("data")
    run = jax.shard_map(lambda a: sharded.linear_scan(**a), mesh=where, in_specs=(spec,), out_specs=spec)
    with jax.set_mesh(where):
        found = jax.jit(run)(arrays)
    for a, b in zip(kernels.linear_scan(**arrays), found, strict=True):
        common.assert_close(a, b, 1e-6)


def test_without_a_mesh_it_is_the_operator():
    arrays = inputs("short_conv")
    plain = jax.make_jaxpr(lambda a: kernels.short_conv(**a))(arrays)
    assert str(jax.make_jaxpr(lambda a: sharded.short_conv(**a))(arrays)) == str(plain)
