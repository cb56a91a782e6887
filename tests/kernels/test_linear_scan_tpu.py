"""linear_scan's TPU kernels: their values in interpret mode, and what the TPU compiler makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels import linear_scan, tpu_gates
from hyjax.kernels.linear_scan import block_sizes, pallas_tpu, reference, tpu_plan
from tests.kernels import aot, common
from tests.kernels.test_linear_scan import GATES, NAMES, case, make, scan

interpreted = functools.partial(scan, implementation="pallas", interpret=True)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Grid steps so small that a short row of few heads takes several, and compiles soon."""

    def choose(chunk=128, heads=2):
        monkeypatch.setitem(block_sizes.PALLAS_TPU, "other", dict.fromkeys(GATES, (chunk, heads)))

    choose()
    return choose


def agree(inputs, cotangents, tolerances=common.FLOAT32, **options):
    """Values and all gradients of the kernels and the reference, as float32 unless the inputs are not."""
    run = lambda f, inputs: jax.jit(lambda *i: common.everything(functools.partial(f, **options), cotangents, *i))(
        *inputs
    )
    expected = run(functools.partial(scan, implementation="reference"), [x.astype(jnp.float32) for x in inputs])
    out = run(interpreted, inputs)
    common.assert_all_close(expected, out, NAMES, tolerances, 2)
    return out


# Chunks of one tile and of two, groups of heads in one grid step and in several, odd dims.
CASES = [
    case(8, 260, 1, 2, 5, 7, "head"),
    case(8, 20, 2, 8, 130, 5, "head"),
    case(8, 2, 2, 2, 6, 130, "head"),
    case(8, 20, 1, 4, 7, 5, "channel"),
    case(8, 260, 1, 1, 3, 130, "channel"),
    case(8, 1, 2, 4, 5, 7, "channel"),
]
SLOW_CASES = [
    case(8, time, 2, 2 * groups, key, value, gate)
    for time, groups, key, value in (
        (127, 1, 60, 64), (128, 2, 17, 33), (129, 4, 8, 8), (300, 2, 64, 128), (500, 3, 256, 64), (600, 1, 128, 100),
    )
    for gate in GATES
]  # fmt: skip


@pytest.mark.parametrize("shape", CASES)
def test_values_and_gradients_in_every_gate_regime(shape):
    inputs, cotangents = make(0, *shape)
    agree(inputs, cotangents)


@pytest.mark.parametrize("gate", GATES)
def test_chunk_of_two_tiles(gate):
    inputs, cotangents = make(3, 8, 300, 1, 1, 4, 5, gate)
    agree(inputs, cotangents, chunk_size=256)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [64, 512])
@pytest.mark.parametrize("shape", SLOW_CASES)
def test_values_and_gradients_over_the_grid(shape, chunk_size, small_steps):
    small_steps(heads=4)
    inputs, cotangents = make(1, *shape)
    agree(inputs, cotangents, chunk_size=chunk_size)


@pytest.mark.parametrize("gate", GATES)
def test_documents_and_poisoned_padding(gate):
    time = 150
    inputs, cotangents = make(4, 8, time, 1, 1, 4, 5, gate)
    ids = common.document_rows(time)
    inputs = (*(common.poisoned(x, ids) for x in inputs[:4]), inputs[4])
    (o, final), grads = agree(inputs, cotangents, segment_ids=ids)
    padding = np.asarray(ids == 0)
    for name, array in zip(("o", "dq", "dk", "dv", "dg"), (o, *grads[:4]), strict=True):
        assert not np.any(np.asarray(array)[padding]), f"{name} at padding is not exactly zero"
    np.testing.assert_array_equal(final[6], inputs[4][6])  # a row of padding hands its state on
    np.testing.assert_array_equal(grads[4][6], cotangents[1][6])


@pytest.mark.parametrize("gate", GATES)
def test_a_document_knows_nothing_of_the_others(gate):
    time, mine = 150, slice(100, 131)  # document 2 crosses from one chunk to the next
    inputs, (do, ds) = make(6, 8, time, 1, 1, 4, 5, gate)
    ids = jnp.asarray(1 + (np.arange(time) >= mine.start) + (np.arange(time) >= mine.stop))[None].repeat(8, 0)
    outside = np.ones(time, bool)
    outside[mine] = False
    do = do.at[:, outside].set(0)
    run = jax.jit(lambda *i: common.everything(functools.partial(interpreted, segment_ids=ids), (do, 0 * ds), *i))
    changed = [x.at[:, outside].multiply(1.5).at[:, outside].add(-0.1) for x in inputs[:4]]
    (o, _), grads = run(*inputs)
    (o_changed, _), grads_changed = run(*changed, inputs[4] + 1)
    np.testing.assert_array_equal(o[:, mine], o_changed[:, mine])
    for name, a, b in zip(NAMES[2:6], grads[:4], grads_changed[:4], strict=True):
        np.testing.assert_array_equal(a[:, mine], b[:, mine], err_msg=name)
        assert not np.any(np.asarray(a)[:, outside]), f"{name} reaches another document"
    assert not np.any(np.asarray(grads[4])), "dinitial_state reaches from the second document"


@pytest.mark.parametrize("gate", GATES)
def test_half_precision(gate):
    inputs, cotangents = make(8, 8, 100, 1, 1, 16, 16, gate)
    out = agree([*(x.astype(jnp.bfloat16) for x in inputs[:3]), *inputs[3:]], cotangents, common.HALF)
    half, full = jnp.bfloat16, jnp.float32
    assert [x.dtype for x in (*out[0], *out[1])] == [half, full, half, half, half, full, full]


@pytest.mark.parametrize("gate", GATES)
def test_no_races_and_no_read_of_what_was_not_written(gate):
    """In the interpreter that models memory: it raises for a race, and memory starts as NaN."""
    inputs, (do, dfinal) = make(7, 1, 140, 1, 1, 4, 4, gate)
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    options = dict(scale=0.5, chunk_size=128, interpret=mode)
    o, final, states = jax.jit(lambda *x: pallas_tpu.forward(*x, **options))(*inputs)
    grads = jax.jit(lambda *x: pallas_tpu.backward(*x, **options))(*inputs[:4], states, do, dfinal)
    run = lambda *i: reference.linear_scan(*i, None, 0.5)
    expected = jax.jit(lambda *i: common.everything(run, (do, dfinal), *i))(*inputs)
    common.assert_all_close(expected, ((o, final), grads), NAMES, common.FLOAT32, 2)


def test_sums_of_log_decays_are_exact_and_decays_at_most_one():
    rng = np.random.default_rng(0)
    g = -rng.choice([0.0, 1e-7, 1e-4, 0.05, 5.0, 50.0, 87.0, 1000.0, np.inf], (2, 512, 3)) * rng.uniform(0.7, 1)
    g = jnp.asarray(np.nan_to_num(g, nan=0.0, neginf=-np.inf), jnp.float32)
    each = [np.asarray(x, np.float64).reshape(2, 2, 256, 3) for x in tpu_gates.parts(g)]
    np.testing.assert_allclose(
        each[0] + each[1], np.maximum(np.asarray(g, np.float64), -128).reshape(each[0].shape), atol=2**-27
    )
    exact = [np.moveaxis(np.cumsum(x, axis=2), 3, 1).reshape(2, 3, 512) for x in each]
    sums = tpu_gates.chunk_sums(g, 256)
    for a, b in zip(exact, sums, strict=True):
        np.testing.assert_array_equal(a, b)
    hi, lo = (np.asarray(x)[..., :256] for x in sums)
    exponents = (hi[..., :, None] - hi[..., None, :]) + (lo[..., :, None] - lo[..., None, :])
    assert np.all(exponents[..., *np.tril_indices(256)] <= 0)
    with pytest.raises(ValueError, match="a chunk of 512 tokens is longer than 256"):
        tpu_gates.chunk_sums(g, 512)


@pytest.mark.parametrize(
    "key_heads, value_heads, expected",
    [(1, 1, (1, 1, 1)), (4, 4, (4, 4, 1)), (1, 8, (4, 1, 2)), (2, 12, (3, 1, 2)), (3, 6, (2, 1, 1)), (5, 5, (1, 1, 1))],
)
def test_heads_of_a_grid_step_share_key_heads_evenly(key_heads, value_heads, expected, small_steps):
    small_steps(heads=4)
    p = tpu_plan.plan((1, 300, key_heads, 8), (1, 300, value_heads, 8), False, None)
    assert (p.heads, p.step_keys, p.parts) == expected


@pytest.mark.parametrize(
    "chunk_size, time, chunk", [(None, 999, 256), (None, 9, 128), (1, 999, 128), (5000, 9999, 512)]
)
def test_chunk_is_a_power_of_two_of_whole_tiles(chunk_size, time, chunk, small_steps):
    small_steps(chunk=256)
    assert tpu_plan.plan((1, time, 1, 8), (1, time, 1, 8), False, chunk_size).chunk == chunk


@pytest.mark.parametrize("dim, size", [(64, (512, 4)), (128, (512, 4)), (256, (512, 2)), (512, (512, 1))])
def test_grid_steps_of_large_heads_fit_fast_memory(dim, size, small_steps):
    small_steps(heads=4)
    p = tpu_plan.plan((1, 999, 8, dim), (1, 999, 8, dim), False, 512)
    assert (p.chunk, p.heads) == size


def sharded(mesh, **options):
    """Batch over "data", heads over "model"."""
    spec, state = jax.sharding.PartitionSpec("data", None, "model"), jax.sharding.PartitionSpec("data", "model")
    run = lambda *i: scan(*i, implementation="pallas", **options)
    return jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 4 + (state,), out_specs=(spec, state), check_vma=True)


def test_runs_under_shard_map():
    inputs, cotangents = make(13, 8, 20, 2, 2, 4, 5, "head")
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=kinds)
    out, expected = (
        jax.jit(lambda *i, f=f: common.everything(f, cotangents, *i))(*inputs)
        for f in (sharded(mesh, interpret=True), interpreted)
    )
    common.assert_all_close(expected, out, NAMES, common.FLOAT32, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(dtype="float16"), "q has dtype float16, and it takes bfloat16 and float32"),
        (dict(key_dim=520), "q has head dim 520, and it takes up to 512"),
        (dict(interpret=False), "it runs on a TPU or a GPU, not on cpu, and interpret=True runs it here"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refusals(change, message):
    q = jnp.zeros((1, 4, 1, change.get("key_dim", 8)), change.get("dtype", "float32"))
    with pytest.raises(ValueError, match=message):
        linear_scan(q, q, q, q[..., 0], implementation="pallas", interpret=change.get("interpret", True))


# What the TPU compiler makes of them.


def compile_case(chip, gate, dims, time=8192, dtype="bfloat16", heads=(8, 8)):
    """Forward and backward, with `heads` of q and k, and of v."""
    (key_dim, value_dim), (key_heads, value_heads) = dims, heads

    def run(q, k, v, g, s):
        def loss(*inputs):
            o, final = scan(*inputs)
            return jnp.sum(o.astype(jnp.float32)) + jnp.sum(final)

        return jax.value_and_grad(loss, (0, 1, 2, 3, 4))(q, k, v, g, s)

    key, gates = (1, time, key_heads, key_dim), (1, time, value_heads) + ((key_dim,) if gate == "channel" else ())
    shapes = dict(q=(key, dtype), k=(key, dtype), v=((1, time, value_heads, value_dim), dtype), g=(gates, "float32"))
    return aot.compile_for(chip, run, shapes | dict(s=((1, value_heads, key_dim, value_dim), "float32")))


@aot.needs_tpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_auto_compiles_to_the_kernels_with_memory_linear_in_time(chip, gate, small_steps):
    """Grid steps smaller than the table's compile sooner."""
    small_steps(heads=1)
    programs = {time: compile_case(chip, gate, (128, 64), time, heads=(8, 16)) for time in (2048, 4096, 8192)}
    assert all(len(program.kernels) == 2 for program in programs.values())
    memory = {time: program.temporary for time, program in programs.items()}
    print(f"{chip} {gate}: bytes of temporary memory by T: {memory}")
    # Twelve float32 arrays of v's heads and of 128 channels; the scores of a head alone take 268 MB at T 8192.
    assert all(memory[time] < 12 * time * 16 * 128 * 4 for time in memory)


@aot.needs_tpu
def test_a_mesh_needs_no_collective():
    mesh = jax.sharding.Mesh(np.array(aot.devices("v5e")).reshape(2, 2), ("data", "model"))
    run = sharded(mesh)
    spec, state = jax.sharding.PartitionSpec("data", None, "model"), jax.sharding.PartitionSpec("data", "model")

    def gradients(q, k, v, g, s):
        return jax.grad(lambda *i: sum(jnp.sum(x.astype(jnp.float32)) for x in run(*i)), (0, 1, 2, 3, 4))(q, k, v, g, s)

    shapes = {name: ((2, 512, 4, 64), "bfloat16") for name in "qkv"}
    shapes |= dict(g=((2, 512, 4), "float32"), s=((2, 4, 64, 64), "float32"))
    specs = dict(q=spec, k=spec, v=spec, g=spec, s=state)
    program = aot.compile_for("v5e", gradients, shapes, dict(data=2, model=2), specs)
    assert len(program.kernels) == 2 and not program.collectives


@aot.needs_tpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["256", "512-float32", "100-groups", "64-short"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("chip", aot.TPUS)
def test_every_kind_of_call_compiles(chip, gate, kind, monkeypatch):
    monkeypatch.undo()  # the table's grid steps
    dim, dtype = int(kind.split("-")[0]), "float32" if "float32" in kind else "bfloat16"
    heads, time = (2, 24) if "groups" in kind else (8, 8), 100 if "short" in kind else 2048
    program = compile_case(chip, gate, (dim, dim), time, dtype, heads)
    assert len(program.kernels) == 2


# By kind of gate and dims: bundles a head and token of the forward and the backward kernel, and registers spilled, at
# most on any chip. A bundle is a cycle; what HBM leaves of them is printed beside.
BUDGETS = {
    ("head", (128, 128)): ((1.8, 4.3), 1800),
    ("head", (128, 64)): ((1.7, 4.0), 1800),
    ("head", (64, 64)): ((1.7, 4.0), 1800),
    ("channel", (128, 128)): ((4.4, 14.0), 4000),
}


@aot.needs_tpu
@pytest.mark.slow
@pytest.mark.parametrize("gate, dims", BUDGETS, ids=str)
@pytest.mark.parametrize("chip", aot.TPUS)
def test_static_schedule(chip, gate, dims, monkeypatch):
    monkeypatch.undo()
    (key_dim, value_dim), heads = dims, 32  # fewer heads' arrays would lie in fast memory before the kernel starts
    module = "tests.kernels.test_linear_scan_tpu"
    schedules = aot.schedules(
        f"{module}:compile_case({chip!r}, {gate!r}, {dims}, heads={(heads, heads)})", "linear_scan"
    )
    by_name = {next(n for n in ("forward", "backward") if n in s.kernel): s for s in schedules}
    p = tpu_plan.plan((1, 8192, heads, key_dim), (1, 8192, heads, value_dim), gate == "channel", None)
    gates, states = 4 * (key_dim if gate == "channel" else 1), 4 * key_dim * value_dim / p.chunk
    moved = dict(
        forward=4 * key_dim + 4 * value_dim + gates + states,
        backward=8 * key_dim + 6 * value_dim + 2 * gates + states,
    )
    most, spills = BUDGETS[gate, dims]
    for name, budget in zip(("forward", "backward"), most, strict=True):
        schedule, of = by_name[name], aot.CHIPS[chip]
        bundles, bound = schedule.bundles / (p.heads * p.chunk), moved[name] / of["bandwidth"] * of["clock"]
        print(
            f"{chip} {gate} {dims} {name}: {bundles:.2f} bundles a head and token, where HBM takes {bound:.2f} cycles; "
            f"{schedule.share('MXU'):.2f} of matrix-unit slots, {schedule.spills} spills"
        )
        assert bundles <= budget and schedule.spills <= spills, name
