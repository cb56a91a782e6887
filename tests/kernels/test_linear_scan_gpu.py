"""linear_scan's GPU kernels: their values in interpret mode, and what the GPU compiler makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec, use_abstract_mesh

from hyjax.kernels import gpu_plan, linear_scan
from hyjax.kernels.linear_scan import pallas_gpu
from tests.kernels import aot, common
from tests.kernels.test_linear_scan import NAMES, case, make, scan


@pytest.fixture(autouse=True)
def traced_for_an_h100():
    with use_abstract_mesh(aot.H100):
        yield


def half(inputs):
    """q, k and v in bfloat16, gates and states as they are."""
    return *(x.astype(jnp.bfloat16) for x in inputs[:3]), *inputs[3:]


def agree(inputs, cotangents, **options):
    """Values and all gradients of the kernels, and of the reference in float32."""
    inputs = half(inputs)
    run = lambda inputs, **how: jax.jit(
        lambda *i: common.everything(functools.partial(scan, **how, **options), cotangents, *i)
    )(*inputs)
    expected = run([x.astype(jnp.float32) for x in inputs], implementation="reference")
    out = run(inputs, implementation="pallas", interpret=True)
    common.assert_all_close(expected, out, NAMES, common.HALF, 2)
    return out


@pytest.mark.parametrize("shape", [case(8, 70, 1, 2, 5, 7, "head"), case(2, 1, 2, 2, 5, 7, "head")])
def test_values_and_gradients_in_every_gate_regime(shape):
    inputs, cotangents = make(0, *shape)
    (o, final), grads = agree(inputs, cotangents, scale=0.3)
    assert o.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    assert [x.dtype for x in grads] == [jnp.bfloat16] * 3 + [jnp.float32] * 2


@pytest.mark.parametrize("shape", [case(1, 129, 1, 1, 128, 100, "head"), case(1, 64, 1, 1, 65, 128, "head")])
def test_two_blocks_of_channels(shape):
    inputs, cotangents = make(1, *shape)
    agree((*inputs[:3], inputs[3] - 0.05, inputs[4]), cotangents)


@pytest.mark.slow
@pytest.mark.parametrize("time", [2, 63, 65, 200])
@pytest.mark.parametrize("heads", [(1, 1), (2, 4)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (17, 33)], ids=str)
def test_values_and_gradients_over_the_grid(time, heads, dims):
    inputs, cotangents = make(2, 8, time, *heads, *dims, "head")
    agree(inputs, cotangents)


def test_documents_and_poisoned_padding():
    time = 70
    (q, k, v, g, s), cotangents = make(9, 8, time, 1, 1, 5, 7, "head")
    ids = common.document_rows(time)
    q, k, v, g = (common.poisoned(x, ids) for x in (q, k, v, jnp.maximum(g, -3)))
    (o, _), grads = agree((q, k, v, g, s), cotangents, segment_ids=ids)
    padding = np.asarray(ids == 0)
    for name, array in zip(("o", "dq", "dk", "dv", "dg"), (o, *grads[:4]), strict=True):
        assert not np.any(np.asarray(array)[padding]), f"{name} at padding is not exactly zero"


def test_a_document_knows_nothing_of_the_others():
    time = 100
    (q, k, v, g, s), (do, ds) = make(4, 1, time, 1, 1, 5, 7, "head")
    ids = jnp.asarray(1 + (np.arange(time) >= 40) + (np.arange(time) >= 41) + (np.arange(time) >= 80))[None]
    mine = np.asarray(ids[0] == 3)
    inputs, cotangents = half((q, k, v, g - 0.05, s)), (do.at[:, ~mine].set(0), 0 * ds)
    f = functools.partial(scan, segment_ids=ids, implementation="pallas", interpret=True)
    run = jax.jit(lambda *i: common.everything(f, cotangents, *i))
    (o, _), grads = run(*inputs)
    changed = [x.at[:, ~mine].multiply(3) for x in inputs[:4]]
    (other_o, _), other_grads = run(*changed, inputs[4] + 1)
    np.testing.assert_array_equal(o[:, mine], other_o[:, mine])
    for a, b in zip(grads[:4], other_grads[:4], strict=True):
        np.testing.assert_array_equal(a[:, mine], b[:, mine])
        assert not np.any(np.asarray(a)[:, ~mine])


def test_races_and_memory_that_nobody_wrote():
    """The interpreter's memory holds NaN at first; three chunks go through two slots."""
    (q, k, v, g, s), (do, ds) = make(5, 1, 190, 1, 1, 5, 100, "head")
    q, k, v, do = (x.astype(jnp.bfloat16) for x in (q, k, v, do))
    options = dict(scale=1.0, chunk_size=None, interpret=plgpu.InterpretGPUParams(detect_races=True))
    o, final, states = pallas_gpu.forward(q, k, v, g, s, **options)
    grads = pallas_gpu.backward(q, k, v, g, states, do, ds, **options)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((o, final, grads)))


def test_decays_are_right_whatever_shares_a_chunk():
    g = common.gates(6, (8, 100, 2))
    g = g.at[0, 30, 0].set(-jnp.inf).at[0, 70, 1].set(-jnp.inf)
    p = gpu_plan.plan((8, 100, 1, 4), (8, 100, 2, 4), 2)
    rows = gpu_plan.gate_rows(g, p)
    exact = np.exp(np.pad(np.asarray(g, np.float64), ((0, 0), (0, 28), (0, 0)))).transpose(0, 2, 1).reshape(8, 2, 2, 64)
    pairs, upto, after = np.zeros((8, 2, 2, 64, 64)), np.cumprod(exact, -1), np.ones((8, 2, 2, 64))
    for i in range(64):
        pairs[..., i, i] = 1
        for j in reversed(range(i)):
            pairs[..., i, j] = pairs[..., i, j + 1] * exact[..., j + 1]
    after = pairs[..., -1, :]
    for found, wanted in (
        (gpu_plan.pair_decays(rows), pairs),
        (rows[..., gpu_plan.UPTO, :], upto),
        (rows[..., gpu_plan.AFTER, :], after),
    ):
        assert np.max(found) <= 1 + 1e-6
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-7)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-37)  # at e^-80 an exponential loses two digits


def test_decays_after_a_reset_are_the_same_to_the_bit_whatever_came_before():
    p = gpu_plan.plan((1, 64, 1, 4), (1, 64, 1, 4), 2)
    g = -0.003 * jax.random.uniform(jax.random.key(0), (1, 64, 1)).at[0, 20].set(jnp.inf)
    alone, other = (gpu_plan.gate_rows(g.at[0, :20].multiply(factor), p)[0, 0, 0] for factor in (0.0, 7.77))
    after = lambda rows: gpu_plan.pair_decays(rows[None, None, None])[0, 0, 0, 20:]
    np.testing.assert_array_equal(after(alone), after(other))
    np.testing.assert_array_equal(alone[gpu_plan.AFTER, 20:], other[gpu_plan.AFTER, 20:])


def test_the_gates_gradient_takes_no_difference_of_sums():
    """Between strong gates a tiny gradient is right too; and across a reset nothing is left."""
    time = 70
    (q, k, v, _, s), cotangents = make(7, 1, time, 1, 1, 5, 7, "head")
    g = jnp.where(jnp.arange(time) % 2, -30.0, -40.0)[None, :, None].at[0, 33].set(-jnp.inf)
    _, grads = agree((q, k, v, g, s), cotangents)
    dg = np.asarray(grads[3])[0, :, 0]
    assert dg[33] == 0 and np.max(np.abs(dg)) < 1e-11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=jnp.float32), "q has dtype float32, and it takes bfloat16"),
        (dict(v=jnp.float16), "v has dtype float16, and it takes bfloat16"),
        (dict(gate="channel"), "a gate for each key channel"),
        (dict(dim=129), "q has head dim 129, and it takes up to 128"),
        (dict(chunk_size=32), "chunk_size is 32, and its chunks have 64 tokens"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_it_refuses(change, message):
    (q, k, v, g, _), _ = make(8, 1, 4, 1, 1, change.get("dim", 4), 4, change.get("gate", "head"))
    arrays = dict(q=q, k=k, v=v)
    arrays = {name: x.astype(change.get(name, jnp.bfloat16)) for name, x in arrays.items()}
    with pytest.raises(ValueError, match=message):
        linear_scan(*arrays.values(), g, implementation="pallas", chunk_size=change.get("chunk_size"))


def shapes(batch, time, heads, value_heads, key_dim, value_dim):
    state = (batch, value_heads, key_dim, value_dim)
    return dict(
        q=((batch, time, heads, key_dim), "bfloat16"),
        k=((batch, time, heads, key_dim), "bfloat16"),
        v=((batch, time, value_heads, value_dim), "bfloat16"),
        g=((batch, time, value_heads), "float32"),
        s=(state, "float32"),
        do=((batch, time, value_heads, value_dim), "bfloat16"),
        ds=(state, "float32"),
    )


def loss(do, ds, *inputs):
    o, final = scan(*inputs, implementation="pallas")
    return jnp.sum((o * do).astype(jnp.float32)) + jnp.sum(final * ds)


def training(q, k, v, g, s, do, ds):
    """Forward and backward by the kernels."""
    return jax.value_and_grad(functools.partial(loss, do, ds), tuple(range(5)))(q, k, v, g, s)


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
    sizes = [
        aot.compile_for("h100", training, shapes(1, time, 2, 4, 128, 128)).temporary for time in (2048, 4096, 8192)
    ]
    print(sizes)
    assert sizes[2] < 4.2 * sizes[0]


@aot.needs_cuda
def test_a_mesh_brings_no_collective():
    """Batch and heads over devices, in a shard_map that checks what varies."""
    spec = dict.fromkeys(("q", "k", "v", "do"), PartitionSpec("data", None, "model", None))
    spec |= dict.fromkeys(("s", "ds"), PartitionSpec("data", "model", None, None))
    spec |= dict(g=PartitionSpec("data", None, "model"))

    def gradients(arrays):
        inputs = (arrays[name] for name in "qkvgs")
        return jax.grad(functools.partial(loss, arrays["do"], arrays["ds"]), tuple(range(5)))(*inputs)

    def sharded(**arrays):
        return jax.shard_map(gradients, in_specs=(spec,), out_specs=tuple(spec[name] for name in "qkvgs"))(arrays)

    program = aot.compile_for("h100", sharded, shapes(2, 256, 2, 4, 64, 64), dict(data=2, model=2), spec)
    assert len(program.kernels) == 3 and not program.collectives
