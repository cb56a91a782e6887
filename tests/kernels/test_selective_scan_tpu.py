"""selective_scan's TPU kernels: their values in interpret mode, and what the TPU compiler makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels import segments, selective_scan
from hyjax.kernels.selective_scan import block_sizes, pallas_tpu, tpu_plan
from tests.kernels import aot, common
from tests.kernels.test_selective_scan import NAMES, TOKENS, make, scan

interpreted = functools.partial(scan, implementation="pallas", interpret=True)
reference = functools.partial(scan, implementation="reference")


@pytest.fixture
def small_blocks(monkeypatch):
    """Two groups of 128 channels a block, which are walked one after the other where N > 8."""
    monkeypatch.setitem(block_sizes.PALLAS_TPU, "other", (256, 2, 1))


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
    return pytest.param(values, id="B{}-T{}-D{}-N{}".format(*values))


CASES = [case(8, 1, 5, 4), case(8, 20, 3, 1), case(8, 130, 260, 12), case(8, 128, 1, 8)]
SLOW_CASES = [
    case(8, time, dim, states)
    for time in (2, 127, 129, 500)
    for dim, states in ((1, 16), (128, 5), (600, 8), (130, 64))
]


@pytest.mark.parametrize("shape", CASES)
def test_values_and_gradients_in_every_regime(shape, small_blocks):
    agree(*make(0, *shape))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SLOW_CASES)
def test_values_and_gradients_over_the_grid(shape, small_blocks):
    agree(*make(1, *shape))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [case(8, 129, 600, 8), case(8, 260, 130, 64)])
def test_values_and_gradients_with_the_tables_blocks(shape):
    agree(*make(1, *shape))


def test_documents_and_poisoned_padding(small_blocks):
    time = 150
    inputs, cotangents = make(2, 8, time, 5, 3)
    ids = common.document_rows(time)
    inputs = [common.poisoned(x, ids) if i in TOKENS else x for i, x in enumerate(inputs)]
    (y, final), grads = agree(inputs, cotangents, segment_ids=ids)
    (y2, _), grads2 = run(interpreted, (common.poisoned(cotangents[0], ids), cotangents[1]), inputs, segment_ids=ids)
    for array in (y, y2, *(g[i] for g in (grads, grads2) for i in TOKENS)):
        assert not np.any(np.asarray(array)[np.asarray(ids == 0)])
    np.testing.assert_array_equal(final[6], inputs[6][6])  # a row of padding hands its state on
    np.testing.assert_array_equal(grads[6][6], cotangents[1][6])


def test_a_document_knows_nothing_of_the_others(small_blocks):
    time, mine = 150, slice(128, 139)  # document 2 starts on a block's edge and ends inside sixteen tokens
    inputs, (dy, ds) = make(3, 8, time, 5, 3)
    ids = jnp.asarray(1 + (np.arange(time) >= 128) + (np.arange(time) >= 139))[None].repeat(8, 0)
    outside = np.ones(time, bool)
    outside[mine] = False
    dy = dy.at[:, outside].set(0)
    changed = [x.at[:, outside].multiply(1.5) if i in TOKENS else x for i, x in enumerate(inputs)]
    (y, _), grads = run(interpreted, (dy, 0 * ds), inputs, segment_ids=ids)
    (y2, _), grads2 = run(interpreted, (dy, 0 * ds), [*changed[:6], inputs[6] + 1], segment_ids=ids)
    np.testing.assert_array_equal(y[:, mine], y2[:, mine])
    for i, (name, a, b) in enumerate(zip(NAMES[2:], grads, grads2, strict=True)):
        if i in TOKENS:
            np.testing.assert_array_equal(a[:, mine], b[:, mine], err_msg=name)
            assert not np.any(np.asarray(a)[:, outside]), f"{name} reaches another document"
        else:  # the weights' gradients come from this document alone
            np.testing.assert_array_equal(a, b, err_msg=name)
    assert not np.any(np.asarray(grads[6])), "dinitial_state reaches from the second document"


def test_a_slow_decay_is_reset_too(small_blocks):
    """Whatever A is, 2^(RESET A) has to be zero at a document's first token; 2^(Δ A) is 1 here elsewhere."""
    (u, delta, A, B, C, D, s), cotangents = make(4, 2, 40, 3, 4)
    A = jnp.asarray([-0.0, -1e-40, -1e-30, -1e6])[None] * jnp.ones_like(A)
    ids = jnp.repeat(jnp.asarray([1, 2]), 20)[None].repeat(2, 0)
    agree((u, jnp.minimum(delta, 1), A, B, C, D, s), cotangents, segment_ids=ids)


def test_half_precision(small_blocks):
    (u, delta, A, B, C, D, s), cotangents = make(5, 8, 40, 5, 16)
    inputs = [x.astype(jnp.bfloat16) if i in (0, 3, 4) else x for i, x in enumerate((u, delta, A, B, C, D, s))]
    expected = run(reference, cotangents, [x.astype(jnp.float32) for x in inputs])
    out = run(interpreted, cotangents, inputs)
    half, full = jnp.bfloat16, jnp.float32
    assert [x.dtype for x in (*out[0], *out[1])] == [half, full, half, full, full, half, half, full, full]
    common.assert_all_close(expected, out, NAMES, common.HALF, 2)


def test_no_races_and_no_read_of_what_was_not_written(small_blocks):
    """In the interpreter that models memory: it raises for a race, and memory starts as NaN."""
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    inputs, cotangents = make(6, 1, 140, 5, 3)
    ids = jnp.repeat(jnp.asarray([1, 2]), 70)[None]
    weights, options = (*inputs[:6], segments.starts(ids)), dict(chunk_size=None)
    y, final, states = jax.jit(lambda *i: pallas_tpu.forward(*i, **options, interpret=mode))(*weights, inputs[6])
    back = jax.jit(lambda *i: pallas_tpu.backward(*i, **options, interpret=mode))
    grads = back(*weights, states, *cotangents)
    expected = run(functools.partial(reference, segment_ids=ids), cotangents, inputs)
    common.assert_all_close(expected, ((y, final), grads), NAMES, common.FLOAT32, 2)


def test_blocks():
    plan = lambda u, a, packed=False: tuple(tpu_plan.plan(u, a, packed))[1:]
    assert plan((4, 8192, 2048), (2048, 16)) == (8192, 2048, 2, 2048, 4, 4)
    assert plan((4, 100, 5120), (5120, 16)) == (128, 5120, 2, 1280, 2, 4)  # 40 = 4 * 10 groups of 128 channels
    assert plan((4, 129, 130), (130, 5)) == (256, 256, 1, 256, 2, 4)
    assert plan((4, 129, 384), (384, 64)) == (256, 384, 8, 384, 1, 4)


def sharded(mesh, **options):
    """Batch over "data", channels over "model"."""
    P = jax.sharding.PartitionSpec
    specs = dict(u=P("data", None, "model"), delta=P("data", None, "model"), A=P("model"), B=P("data"), C=P("data"))
    specs |= dict(D=P("model"), ids=P("data"))

    def run(u, delta, A, B, C, D, ids):
        return selective_scan(u, delta, A, B, C, D, segment_ids=ids, implementation="pallas", **options)

    out_specs = P("data", None, "model"), P("data", "model")
    call = jax.shard_map(run, mesh=mesh, in_specs=tuple(specs.values()), out_specs=out_specs, check_vma=True)
    return call, specs


def test_runs_under_shard_map(small_blocks):
    (*inputs, s), _ = make(7, 2, 20, 4, 3)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=kinds)
    ids = common.document_rows(20)[3:5]
    shards, _ = sharded(mesh, interpret=True)
    out, expected = jax.jit(shards)(*inputs, ids), reference(*inputs, 0 * s, segment_ids=ids)
    for name, a, b in zip(NAMES, expected, out, strict=False):
        common.assert_close(a, b, 1e-5, name)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(u="float16"), "u has dtype float16, and it takes bfloat16 and float32"),
        (dict(C="float16"), "C has dtype float16"),
        (dict(states=65), r"A \(3, 65\) has 65 states a channel, and it takes up to 64"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refusals(change, message):
    n = change.get("states", 4)
    shapes = dict(u=(1, 4, 3), delta=(1, 4, 3), A=(3, n), B=(1, 4, n), C=(1, 4, n), D=(3,))
    arrays = {name: jnp.zeros(shape, change.get(name, "float32")) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        selective_scan(**arrays, implementation="pallas", interpret=True)


# What the TPU compiler makes of them.


def shapes(time, dim, states, batch, dtype, packed):
    tokens, numbers = (batch, time, dim), (batch, time, states)
    arrays = dict(u=(tokens, dtype), delta=(tokens, "float32"), A=((dim, states), "float32"), B=(numbers, dtype))
    arrays |= dict(C=(numbers, dtype), D=((dim,), "float32"))
    return arrays | (dict(ids=((batch, time), "int32")) if packed else {})


def compile_case(chip, time=8192, dim=2048, states=16, batch=1, dtype="bfloat16", packed=False):
    """Forward and backward."""

    def gradients(u, delta, A, B, C, D, ids=None):
        loss = lambda *inputs: jnp.sum(selective_scan(*inputs, segment_ids=ids)[0].astype(jnp.float32))
        return jax.value_and_grad(loss, tuple(range(6)))(u, delta, A, B, C, D)

    return aot.compile_for(chip, gradients, shapes(time, dim, states, batch, dtype, packed))


@aot.needs_tpu
@pytest.mark.parametrize("chip", ["v5e", "tpu7x", *(pytest.param(c, marks=pytest.mark.slow) for c in ("v5p", "v6e"))])
def test_auto_compiles_to_the_kernels_with_memory_linear_in_time(chip, monkeypatch):
    """Steps shorter than the table's compile sooner, and what lies outside of the kernels is the same."""
    kind = aot.devices(chip)[0].device_kind
    monkeypatch.setitem(block_sizes.PALLAS_TPU, kind, (2048, 2, 1))
    programs = {time: compile_case(chip, time, packed=True) for time in (2048, 4096, 8192)}
    assert all(len(program.kernels) == 2 for program in programs.values())
    memory = {time: program.temporary for time, program in programs.items()}
    print(f"{chip}: bytes of temporary memory by T: {memory}")
    # u, y, dy, du in bfloat16, delta, ddelta in float32: 16 bytes a token and channel; an expanded state would be 64.
    assert all(memory[time] < 20 * time * 2048 for time in memory)


@aot.needs_tpu
@pytest.mark.slow
@pytest.mark.parametrize("case", [
    dict(packed=True, dtype="float32"), dict(states=64), dict(states=64, dtype="float32", packed=True),
    dict(states=4, dim=200, time=100, batch=3, packed=True), dict(states=40, dim=384), dict(dim=5120),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("chip", aot.TPUS)
def test_every_kind_of_call_compiles(chip, case):
    assert len(compile_case(chip, **(dict(time=1024) | case)).kernels) == 2


@aot.needs_tpu
def test_a_mesh_needs_no_collective(monkeypatch):
    """But for the gradients of what devices share: A, B, C and D, which aren't asked for here."""
    monkeypatch.setitem(block_sizes.PALLAS_TPU, "TPU v5 lite", (2048, 2, 1))
    mesh = jax.sharding.Mesh(np.array(aot.devices("v5e")).reshape(2, 2), ("data", "model"))
    shards, specs = sharded(mesh)

    def gradients(u, delta, A, B, C, D, ids):
        loss = lambda u, delta: jnp.sum(shards(u, delta, A, B, C, D, ids)[0].astype(jnp.float32))
        return jax.grad(loss, (0, 1))(u, delta)

    arrays = shapes(512, 512, 16, 2, "bfloat16", True)
    program = aot.compile_for("v5e", gradients, arrays, dict(data=2, model=2), specs)
    assert len(program.kernels) == 2 and not program.collectives


# By chip and kernel: bundles of the whole kernel and registers spilled to fast memory, at most. A step of the loop
# takes 64 tokens of 512 channels, in 0.028 bundles a token and channel; backward has two such loops, which take 0.081.
BUDGETS = {
    "v5e": {"forward": (1400, 400), "backward": (3550, 700)},
    "v6e": {"forward": (1400, 500), "backward": (3600, 1150)},
}
BYTES = {"forward": 8, "backward": 14}  # a token and channel


@aot.needs_tpu
@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.slow)])
def test_static_schedule(chip):
    module = "tests.kernels.test_selective_scan_tpu"
    schedules = aot.schedules(f"{module}:compile_case({chip!r})", "selective_scan_")
    tokens, channels = 8192, 2048
    for schedule in schedules:
        which = "forward" if "forward" in schedule.kernel else "backward"
        bundles, spills = BUDGETS[chip][which]
        share = schedule.bundles / (64 * 512)
        bound = BYTES[which] * tokens * channels / aot.CHIPS[chip]["bandwidth"]
        print(
            f"{chip} {which}: {schedule.bundles} bundles, at most {share:.3f} a token and channel "
            f"({share * tokens * channels / aot.CHIPS[chip]['clock'] * 1e3:.2f} ms for {tokens} tokens of {channels} "
            f"channels, whose bandwidth takes {bound * 1e3:.2f} ms), {schedule.share('VALU'):.2f} of vector slots, "
            f"{schedule.spills} spills"
        )
        assert schedule.bundles <= bundles and schedule.spills <= spills, which
