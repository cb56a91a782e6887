"""diagonal_scan's TPU kernels: their values in interpret mode, and what the TPU compiler makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels import diagonal_scan
from hyjax.kernels.diagonal_scan import block_sizes, pallas_tpu, tpu_plan, xla
from tests.kernels import aot, common
from tests.kernels.test_diagonal_scan import KINDS, NAMES, make, scan, to_complex

interpreted = functools.partial(scan, implementation="pallas", interpret=True)
reference = functools.partial(scan, implementation="reference")


@pytest.fixture
def small_blocks(monkeypatch):
    """So small that a short row has several blocks of time, and more than one of channels."""
    monkeypatch.setitem(block_sizes.PALLAS_TPU, "other", (32, 256))


@functools.partial(jax.jit, static_argnums=0)
def run(function, cotangents, inputs, **options):
    """Values and all gradients; options are arrays."""
    return common.everything(functools.partial(function, **options), cotangents, *inputs)


@pytest.fixture(autouse=True)
def compile_anew():
    """What is compiled is known by its shapes, and not by the tables of blocks that it was made with."""
    run.clear_cache()


def agree(inputs, cotangents, tolerances=common.FLOAT32, **options):
    expected = run(reference, cotangents, inputs, **options)
    out = run(interpreted, cotangents, inputs, **options)
    common.assert_all_close(expected, out, NAMES, tolerances, 2)
    return out


def case(*values):
    return pytest.param(values, id="B{}-T{}-D{}-{}".format(*values))


CASES = [
    case(8, 1, 5, "real"),
    case(8, 7, 3, "complex"),
    case(8, 33, 5, "real"),
    case(16, 64, 300, "real"),
    case(8, 40, 130, "complex"),
]
SLOW_CASES = [case(8, time, dim, kind) for time in (2, 15, 16, 17, 65, 500) for dim in (1, 128, 700) for kind in KINDS]


@pytest.mark.parametrize("shape", CASES)
def test_values_and_gradients_in_every_gate_regime(shape, small_blocks):
    agree(*make(0, *shape))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", ["small", "table"])
@pytest.mark.parametrize("shape", SLOW_CASES)
def test_values_and_gradients_over_the_grid(shape, blocks, request):
    if blocks == "small":
        request.getfixturevalue("small_blocks")
    agree(*make(1, *shape))


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_poisoned_padding(kind, small_blocks):
    time = 40
    inputs, cotangents = make(2, 8, time, 5, kind)
    ids = common.document_rows(time)
    inputs = (*(common.poisoned(a, ids) for a in inputs[:2]), inputs[2])
    (h, final), grads = agree(inputs, cotangents, segment_ids=ids)
    poisoned = (common.poisoned(cotangents[0], ids), cotangents[1])
    (h2, _), grads2 = run(interpreted, poisoned, inputs, segment_ids=ids)
    for array in (h, *grads[:2], h2, *grads2[:2]):
        assert not np.any(np.asarray(array)[np.asarray(ids == 0)])
    np.testing.assert_array_equal(final[6], inputs[2][6])  # a row of padding hands its state on
    np.testing.assert_array_equal(grads[2][6], cotangents[1][6])


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_knows_nothing_of_the_others(kind, small_blocks):
    time, mine = 50, slice(32, 45)  # document 2 starts on a block's edge and ends inside eight tokens
    inputs, (dh, ds) = make(3, 8, time, 5, kind)
    ids = jnp.asarray(1 + (np.arange(time) >= 32) + (np.arange(time) >= 45))[None].repeat(8, 0)
    outside = np.ones(time, bool)
    outside[mine] = False
    dh = dh.at[:, outside].set(0)
    changed = [a.at[:, outside].multiply(1.5).at[:, outside].add(-0.1) for a in inputs[:2]]
    (h, _), grads = run(interpreted, (dh, 0 * ds), inputs, segment_ids=ids)
    (h2, _), grads2 = run(interpreted, (dh, 0 * ds), (*changed, inputs[2] + 1), segment_ids=ids)
    for a, b in ((h, h2), *zip(grads[:2], grads2[:2], strict=True)):
        np.testing.assert_array_equal(a[:, mine], b[:, mine])
    assert not any(np.any(np.asarray(a)[:, outside]) for a in grads[:2]) and not np.any(np.asarray(grads[2]))


@pytest.mark.parametrize("gates", ["float32", "bfloat16"])
def test_half_precision(gates, small_blocks):
    (x, g, s), cotangents = make(4, 8, 50, 5)
    inputs = x.astype(jnp.bfloat16), g.astype(gates), s
    expected = run(reference, cotangents, [a.astype(jnp.float32) for a in inputs])
    out = run(interpreted, cotangents, inputs)
    assert [a.dtype for a in (*out[0], *out[1])] == ["bfloat16", "float32", "bfloat16", gates, "float32"]
    common.assert_all_close(expected, out, NAMES, common.HALF, 2)


def test_no_races_and_no_read_of_what_was_not_written(small_blocks):
    """In the interpreter that models memory: it raises for a race, and memory starts as NaN."""
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    inputs, cotangents = make(5, 1, 40, 5, "complex")
    x, g, s, dh, ds = (to_complex(a) for a in (*inputs, *cotangents))
    s, ds, options = s[:, 0], ds[:, 0], dict(chunk_size=None)
    h, final = jax.jit(lambda *i: pallas_tpu.forward(*i, **options, interpret=mode))(x, g, s)
    grads = jax.jit(lambda *i: pallas_tpu.backward(*i, **options, interpret=mode))(h, g, s, dh, ds)
    expected = jax.jit(lambda *i: xla.forward(*i, **options))(x, g, s)
    expected += jax.jit(lambda *i: xla.backward(*i, **options))(h, g, s, dh, ds)
    for name, a, b in zip(NAMES, expected, (h, final, *grads), strict=True):
        for part in (np.real, np.imag):
            common.assert_close(part(a), part(b), 1e-5, name)


def test_blocks():
    plan = lambda *shape: tuple(tpu_plan.plan(shape, False))[1:]
    assert plan(4, 8192, 2048) == (8192, 2048, 1, 256, 1024)
    assert plan(6, 100, 300) == (112, 384, 2, 112, 384)  # 2 rows of the batch make up for few channels
    assert plan(5, 257, 130) == (512, 256, 1, 256, 256)
    assert plan(4, 300, 5 * 128)[2:] == (1, 256, 640)


def sharded(mesh, **options):
    """Batch over "data", channels over "model"."""
    spec, rows = jax.sharding.PartitionSpec("data", None, "model"), jax.sharding.PartitionSpec("data")

    def run(x, g, ids):
        h, final = diagonal_scan(x, g, segment_ids=ids, implementation="pallas", **options)
        return h, final[:, None]

    return jax.shard_map(run, mesh=mesh, in_specs=(spec, spec, rows), out_specs=spec, check_vma=True)


def test_runs_under_shard_map(small_blocks):
    (x, g, s), cotangents = make(6, 8, 40, 4)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=kinds)
    ids = common.document_rows(40)
    shards = sharded(mesh, interpret=True)
    whole = functools.partial(reference, s=0 * s, segment_ids=ids)
    out = run(lambda x, g: shards(x, g, ids), cotangents, (x, g))
    common.assert_all_close(run(whole, cotangents, (x, g)), out, NAMES[:4], common.FLOAT32, 2)


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "float16")], ids="-".join)
def test_refusals(dtypes):
    x, g = (jnp.zeros((1, 4, 3), dtype) for dtype in dtypes)
    name = "x" if dtypes[0] == "float16" else "log_decay"
    with pytest.raises(ValueError, match=f"{name} has dtype float16, and it takes bfloat16, float32 and complex64"):
        diagonal_scan(x, g, implementation="pallas", interpret=True)


def test_refuses_float64():
    with jax.enable_x64(), pytest.raises(ValueError, match="x has dtype float64"):
        diagonal_scan(*[jnp.zeros((1, 4, 3), "float64")] * 2, implementation="pallas", interpret=True)


# What the TPU compiler makes of them.


def compile_case(chip, which, time=8192, dim=2048, batch=1, dtype="bfloat16", gates="float32"):
    """The forward or the backward kernel alone, its arrays coming from outside."""
    shape, state = (batch, time, dim), "complex64" if "complex" in dtype else "float32"
    arrays = dict(x=(shape, dtype), g=(shape, gates), s=((batch, dim), state))
    if which == "backward":
        arrays |= dict(dh=(shape, dtype), dfinal=((batch, dim), state))
    function = functools.partial(getattr(pallas_tpu, which), chunk_size=None, interpret=False)
    return aot.compile_for(
        chip, lambda x, g, s, **d: function(x, g, s, *[d[n] for n in ("dh", "dfinal") if n in d]), arrays
    )


@aot.needs_tpu
@pytest.mark.parametrize("chip", ["v5e", "tpu7x", *(pytest.param(c, marks=pytest.mark.slow) for c in ("v5p", "v6e"))])
def test_auto_compiles_to_the_kernels_with_memory_linear_in_time(chip):
    def gradients(x, g, ids):
        loss = lambda x, g: jnp.sum(diagonal_scan(x, g, segment_ids=ids)[0].astype(jnp.float32))
        return jax.value_and_grad(loss, (0, 1))(x, g)

    def program(time):
        shape = (1, time, 2048)
        return aot.compile_for(
            chip, gradients, dict(x=(shape, "bfloat16"), g=(shape, "float32"), ids=((1, time), "int32"))
        )

    programs = {time: program(time) for time in (2048, 4096, 8192)}
    assert all(len(x.kernels) == 2 for x in programs.values())
    memory = {time: x.temporary for time, x in programs.items()}
    print(f"{chip}: bytes of temporary memory by T: {memory}")
    # x, h, dh, dx in bfloat16 and g, dg in float32 are 16 bytes a token and channel.
    assert all(memory[time] <= 17 * time * 2048 for time in memory)


@aot.needs_tpu
@pytest.mark.parametrize("options", [
    dict(dtype="complex64", gates="complex64", time=2048),
    dict(time=100, dim=130, batch=6, gates="bfloat16"),
    dict(time=5000, dim=64, batch=8, dtype="float32"),
], ids=["complex", "ragged", "narrow"])  # fmt: skip
def test_every_kind_of_call_compiles(options):
    for which in ("forward", "backward"):
        assert len(compile_case("v5e", which, **options).kernels) == 1


@aot.needs_tpu
def test_a_mesh_needs_no_collective():
    mesh = jax.sharding.Mesh(np.array(aot.devices("v5e")).reshape(2, 2), ("data", "model"))
    shards = sharded(mesh)
    spec, rows = jax.sharding.PartitionSpec("data", None, "model"), jax.sharding.PartitionSpec("data")

    def gradients(x, g, ids):
        return jax.grad(lambda x, g: jnp.sum(shards(x, g, ids)[0].astype(jnp.float32)), (0, 1))(x, g)

    shapes = dict(x=((2, 512, 512), "bfloat16"), g=((2, 512, 512), "float32"), ids=((2, 512), "int32"))
    program = aot.compile_for("v5e", gradients, shapes, dict(data=2, model=2), dict(x=spec, g=spec, ids=rows))
    assert len(program.kernels) == 2 and not program.collectives


# At most, forward and backward: bundles of the whole kernel, which are more than those of its loop's step of 16 tokens
# and 1024 channels (backward the step is there twice), and registers spilled.
BUDGETS = {"forward": (260, 8, 8), "backward": (540, 60, 14)}


@aot.needs_tpu
@pytest.mark.parametrize("which", BUDGETS)
@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.slow)])
def test_static_schedule(chip, which):
    module = "tests.kernels.test_diagonal_scan_tpu"
    (schedule,) = aot.schedules(f"{module}:compile_case({chip!r}, {which!r})", f"diagonal_scan_{which}")
    bundles, spills, size = BUDGETS[which]
    steps = 2 if which == "backward" else 1
    at_most = schedule.bundles / (steps * 16 * 1024) * 8192 * 2048 / aot.CHIPS[chip]["clock"]
    bound = size * 8192 * 2048 / aot.CHIPS[chip]["bandwidth"]
    print(
        f"{chip} {which}: {schedule.bundles} bundles, {schedule.spills} spills; at most {at_most * 1e6:.0f} us of "
        f"bundles, and {bound * 1e6:.0f} us of bandwidth, for 8192 tokens of 2048 channels"
    )
    assert schedule.bundles <= bundles and schedule.spills <= spills
