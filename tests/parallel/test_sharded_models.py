"""Operators inside a model on a mesh: what crosses devices is the layers' sums, and nothing of the operators."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hyjax import kernels
from hyjax.models import Context, HybridLM
from hyjax.parallel import sharded
from tests.kernels import aot

MODEL = dict(
    layout="GA", width=64, heads=4, kv_heads=2, head_dim=64, vocab_size=96, ffn_width=128,
    legend=dict(G=dict(mixer="gated_linear_attention", conv_width=4, value_dim=64)),
)  # fmt: skip
ROWS, LENGTH = 8, 256
TENSOR = ("heads", "mlp")  # logical axes that are split


def gradients(model, params, tokens, segments):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    context = Context(positions=positions, segment_ids=segments)

    def loss(params):
        logits = model.apply({"params": params}, tokens, context).logits.astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    return jax.grad(loss)(params)


def program(mesh, **model_options) -> str:
    """The optimised HLO of the gradients, rows over "data" and heads over "tensor"."""
    model = HybridLM(MODEL | model_options)
    rows = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    key, dummy = jax.random.key(0), jnp.zeros((1, 4), jnp.int32)
    with jax.set_mesh(mesh):
        params = jax.eval_shape(model.init, key, dummy)["params"]
    where = lambda dims: NamedSharding(mesh, PartitionSpec(*("tensor" if d in TENSOR else None for d in dims)))
    shardings = jax.tree.map(where, model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
    params = jax.tree.map(lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, shardings)
    run = jax.jit(functools.partial(gradients, model), out_shardings=shardings)
    with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
        return run.lower(params, rows, rows).compile().as_text()


def assert_only_sums_of_layers(text: str) -> None:
    """No collective but sums; and inside the operators only those of weights, which the devices share."""
    found = [line for line in text.splitlines() if re.search(r"= .*\b(all-|reduce-scatter|collective-)[\w-]*\(", line)]
    assert found
    for line in found:
        assert re.search(r"\ball-reduce(-start|-done)?\(", line), line
        # what the compiler joined into one sum, by the layers' names
        inside = set(re.findall(r"(\w+)/shard_map/(\w+)", line))
        assert inside <= {("conv", "psum_invariant")}, line


def cpu_mesh():
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def test_on_eight_cpu_devices():
    assert_only_sums_of_layers(program(cpu_mesh()))


def test_with_the_kernels_in_interpret_mode(monkeypatch):
    """As the mixers call them, through the mesh's helper: only who computes is changed."""
    used = []
    for module, name in (("attention", "attention"), ("gated_linear_attention", "linear_scan")):
        operator = getattr(kernels, name)

        def interpreted(*args, operator=operator, name=name, **options):
            used.append(name)
            return operator(*args, **options | dict(implementation="pallas", interpret=True))

        dims = dict(attention=(dict(q="b.h", k="b.h", v="b.h", segment_ids="b", kv_segment_ids="b"), "b.h"))
        letters, out = dims.get(name, (sharded._SCAN, ("b.h", "bh")))
        over = sharded.over_mesh(functools.wraps(operator)(interpreted), letters, out)
        monkeypatch.setattr(f"hyjax.models.mixers.{module}.{name}", over)
    assert_only_sums_of_layers(program(cpu_mesh()))
    assert set(used) == {"attention", "linear_scan"}


@aot.needs_tpu
def test_compiled_for_four_tpus():
    mesh = Mesh(np.array(aot.devices("v5e")).reshape(2, 2), ("data", "tensor"))
    text = program(mesh, dtype="bfloat16")
    assert text.count('custom_call_target="tpu_custom_call"') == 5  # attention: 3; linear_scan: 2
    assert_only_sums_of_layers(text)


@aot.needs_cuda
def test_compiled_for_four_gpus():
    mesh = Mesh(np.array(aot.devices("h100")).reshape(2, 2), ("data", "tensor"))
    text = program(mesh, dtype="bfloat16", implementation="pallas", legend=GPU)
    assert text.count("mosaic_gpu_v2") >= 5
    assert_only_sums_of_layers(text)


# short_conv has no kernel, and implementation="pallas" is of every operator of a layer
GPU = dict(G=dict(mixer="gated_linear_attention", value_dim=64))
