"""delta_scan's GPU kernels: their values in interpret mode, and what the GPU compiler makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec, use_abstract_mesh

from hyjax.kernels import delta_scan
from hyjax.kernels.delta_scan import pallas_gpu
from tests.kernels import aot, common
from tests.kernels.test_delta_scan import NAMES, case, make, scan, unit


@pytest.fixture(autouse=True)
def traced_for_an_h100():
    with use_abstract_mesh(aot.H100):
        yield


def half(inputs):
    """q, k and v in bfloat16, the others as they are."""
    return *(x.astype(jnp.bfloat16) for x in inputs[:3]), *inputs[3:]


def agree(inputs, cotangents, tolerances=common.HALF, **options):
    """Values and all gradients of the kernels, and of the reference in float32."""
    inputs = half(inputs)
    run = lambda inputs, **how: jax.jit(
        lambda *i: common.everything(functools.partial(scan, **how, **options), cotangents, *i)
    )(*inputs)
    expected = run([x.astype(jnp.float32) for x in inputs], implementation="reference")
    out = run(inputs, implementation="pallas", interpret=True)
    common.assert_all_close(expected, out, NAMES, tolerances, 2)
    return out


@pytest.mark.parametrize("shape", [case(8, 70, 1, 2, 33, 7, "head"), case(2, 1, 2, 2, 33, 7, "none")])
def test_values_and_gradients_in_every_gate_regime(shape):
    inputs, cotangents = make(0, *shape)
    (o, final), grads = agree(inputs, cotangents, gate=shape[-1], scale=0.3)
    assert o.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    assert [x.dtype for x in grads] == [jnp.bfloat16] * 3 + [jnp.float32] * 3


@pytest.mark.parametrize("shape", [case(1, 65, 1, 1, 128, 100, "head")])
def test_two_blocks_of_channels(shape):
    inputs, cotangents = make(1, *shape)
    agree(inputs, cotangents)


@pytest.mark.slow
@pytest.mark.parametrize("time", [2, 63, 65, 200])
@pytest.mark.parametrize("heads", [(1, 2)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (33, 17)], ids=str)
@pytest.mark.parametrize("gate", ["none", "head"])
def test_values_and_gradients_over_the_grid(time, heads, dims, gate):
    """Rows with β up to 2 and little decay forget nothing, errors neither: twice the tolerance of half precision."""
    inputs, cotangents = make(2, 8, time, *heads, *dims, gate)
    agree(inputs, cotangents, (1e-2, 4e-2), gate=gate)


def test_documents_and_poisoned_padding():
    time = 70
    (q, k, v, beta, g, s), cotangents = make(3, 8, time, 1, 1, 64, 7, "head")
    ids = common.document_rows(time)
    q, k, v, beta, g = (common.poisoned(x, ids) for x in (q, k, v, beta, jnp.maximum(g, -3)))
    (o, _), grads = agree((q, k, v, beta, g, s), cotangents, segment_ids=ids)
    padding = np.asarray(ids == 0)
    for name, array in zip(("o", "dq", "dk", "dv", "dbeta", "dg"), (o, *grads[:5]), strict=True):
        assert not np.any(np.asarray(array)[padding]), f"{name} at padding is not exactly zero"


def test_a_document_knows_nothing_of_the_others():
    time = 100
    (q, k, v, beta, g, s), (do, ds) = make(4, 1, time, 1, 1, 64, 7, "head")
    ids = jnp.asarray(1 + (np.arange(time) >= 40) + (np.arange(time) >= 41) + (np.arange(time) >= 80))[None]
    mine = np.asarray(ids[0] == 3)
    inputs, cotangents = half((q, k, v, beta, g - 0.05, s)), (do.at[:, ~mine].set(0), 0 * ds)
    f = functools.partial(scan, segment_ids=ids, implementation="pallas", interpret=True)
    run = jax.jit(lambda *i: common.everything(f, cotangents, *i))
    (o, _), grads = run(*inputs)
    changed = [x.at[:, ~mine].multiply(0.7) for x in inputs[:5]]
    (other_o, _), other_grads = run(*changed, inputs[5] + 1)
    np.testing.assert_array_equal(o[:, mine], other_o[:, mine])
    for a, b in zip(grads[:5], other_grads[:5], strict=True):
        np.testing.assert_array_equal(a[:, mine], b[:, mine])
        assert not np.any(np.asarray(a)[:, ~mine])


def test_identical_keys_that_are_written_over():
    """β = 1 and no decay: each token replaces what the key held, and a power of the matrix would overflow."""
    time = 100
    (q, k, v, _, g, s), cotangents = make(5, 1, time, 1, 1, 64, 7, "none")
    k = jnp.broadcast_to(unit(jnp.arange(1.0, 65)), k.shape)
    (o, _), _ = agree((q, k, v, jnp.ones_like(g), g, s), cotangents, gate="none")
    assert np.all(np.isfinite(o))


def test_races_and_memory_that_nobody_wrote():
    """The interpreter's memory holds NaN at first; three chunks go through two slots."""
    (q, k, v, beta, g, s), (do, ds) = make(6, 1, 190, 1, 1, 32, 100, "head")
    q, k, v, do = (x.astype(jnp.bfloat16) for x in (q, k, v, do))
    options = dict(scale=1.0, chunk_size=None, interpret=plgpu.InterpretGPUParams(detect_races=True))
    o, final, states = pallas_gpu.forward(q, k, v, beta, g, s, **options)
    grads = pallas_gpu.backward(q, k, v, beta, g, states, do, ds, **options)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((o, final, grads)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=jnp.float32), "k has dtype float32, and it takes bfloat16"),
        (dict(gate="channel"), "a gate for each key channel"),
        (dict(dim=129), "q has head dim 129, and it takes up to 128"),
        (dict(dim=31), "q has head dim 31, and it takes at least 32"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_it_refuses(change, message):
    (q, k, v, beta, g, _), _ = make(8, 1, 4, 1, 1, change.get("dim", 32), 4, change.get("gate", "head"))
    arrays = dict(q=q, k=k, v=v)
    arrays = {name: x.astype(change.get(name, jnp.bfloat16)) for name, x in arrays.items()}
    with pytest.raises(ValueError, match=message):
        delta_scan(*arrays.values(), beta, g, implementation="pallas")


def shapes(batch, time, heads, value_heads, key_dim, value_dim):
    state = (batch, value_heads, key_dim, value_dim)
    return dict(
        q=((batch, time, heads, key_dim), "bfloat16"),
        k=((batch, time, heads, key_dim), "bfloat16"),
        v=((batch, time, value_heads, value_dim), "bfloat16"),
        beta=((batch, time, value_heads), "float32"),
        g=((batch, time, value_heads), "float32"),
        s=(state, "float32"),
        do=((batch, time, value_heads, value_dim), "bfloat16"),
        ds=(state, "float32"),
    )


def loss(do, ds, *inputs):
    o, final = scan(*inputs, implementation="pallas")
    return jnp.sum((o * do).astype(jnp.float32)) + jnp.sum(final * ds)


def training(q, k, v, beta, g, s, do, ds):
    """Forward and backward by the kernels."""
    return jax.value_and_grad(functools.partial(loss, do, ds), tuple(range(6)))(q, k, v, beta, g, s)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (100, 36)], ids=str)
def test_lowers_for_a_gpu(dims):
    arrays = {name: jax.ShapeDtypeStruct(*x) for name, x in shapes(1, 300, 2, 4, *dims).items()}
    lowered = jax.jit(training).trace(**arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 3


def compile_case(dims):
    return aot.compile_for("h100", training, shapes(1, 512, 1, 2, *dims))


@aot.needs_cuda
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 64), (128, 128)], ids=str)
def test_registers_suffice_and_products_overlap(dims):
    kernels = aot.ptxas(f"{__name__}:compile_case({dims})")
    names = {kernel.kernel for kernel in kernels}
    assert names == {"scan_forward_walk", "scan_backward_walk", "scan_chunk_gradients"}
    for kernel in kernels:
        print(kernel)
        assert kernel.spills == 0 and not kernel.serialized, kernel


@aot.needs_cuda
def test_temporary_memory_is_linear_in_time():
    memory = lambda time: aot.compile_for("h100", training, shapes(1, time, 2, 4, 128, 128)).temporary
    sizes = [memory(time) for time in (2048, 4096, 8192)]
    print(sizes)
    assert sizes[2] < 4.2 * sizes[0]


@aot.needs_cuda
def test_a_mesh_brings_no_collective():
    """Batch and heads over devices, in a shard_map that checks what varies."""
    spec = dict.fromkeys(("q", "k", "v", "do"), PartitionSpec("data", None, "model", None))
    spec |= dict.fromkeys(("s", "ds"), PartitionSpec("data", "model", None, None))
    spec |= dict.fromkeys(("beta", "g"), PartitionSpec("data", None, "model"))
    names = ("q", "k", "v", "beta", "g", "s")

    def gradients(arrays):
        inputs = (arrays[name] for name in names)
        return jax.grad(functools.partial(loss, arrays["do"], arrays["ds"]), tuple(range(6)))(*inputs)

    def sharded(**arrays):
        return jax.shard_map(gradients, in_specs=(spec,), out_specs=tuple(spec[name] for name in names))(arrays)

    program = aot.compile_for("h100", sharded, shapes(2, 256, 2, 4, 64, 64), dict(data=2, model=2), spec)
    assert len(program.kernels) == 3 and not program.collectives
