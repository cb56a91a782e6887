"""delta_scan's TPU kernels: their values in interpret mode, and what the TPU compiler makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels import delta_scan
from hyjax.kernels.delta_scan import block_sizes, pallas_tpu, reference, tpu_chunk, tpu_plan
from tests.kernels import aot, common
from tests.kernels.test_delta_scan import GATES, NAMES, case, make, scan, slow, unit

interpreted = functools.partial(scan, implementation="pallas", interpret=True)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Grid steps so small that a short row of few heads takes several, and compiles soon."""

    def choose(chunk=16, heads=2):
        monkeypatch.setitem(block_sizes.PALLAS_TPU, "other", dict.fromkeys(("head", "channel"), (chunk, heads)))

    choose()
    return choose


def agree(inputs, cotangents, tolerances=common.FLOAT32, **options):
    """Values and all gradients of the kernels and the reference, as float32 unless the inputs are not."""
    exact = [x.astype(jnp.float32) for x in inputs]
    known = functools.partial(scan, implementation="reference", **options)
    run = lambda inputs, exact: (
        common.everything(known, cotangents, *exact),
        common.everything(functools.partial(interpreted, **options), cotangents, *inputs),
    )
    expected, out = jax.jit(run)(inputs, exact)
    common.assert_all_close(expected, out, NAMES, tolerances, 2)
    return expected, out


# Chunks at their edges, groups of heads in one grid step and in several, odd dims.
CASES = [
    case(8, 40, 1, 2, 5, 7, "head"),
    case(8, 17, 1, 4, 130, 5, "channel"),
    slow(*case(8, 1, 2, 4, 7, 5, "none").values),
    slow(*case(8, 33, 2, 2, 7, 130, "head").values),
]
SLOW_CASES = [
    case(8, time, 2, 2 * groups, key, value, gate)
    for time, groups, key, value in ((63, 1, 60, 64), (129, 2, 17, 33), (300, 4, 64, 8), (500, 1, 100, 128))
    for gate in GATES
]


@pytest.mark.parametrize("shape", CASES)
def test_values_and_gradients_in_every_gate_regime(shape):
    inputs, cotangents = make(0, *shape)
    expected, (_, grads) = agree(inputs, cotangents, gate=shape[-1])
    # A gate of -50 beside gates near 0 has a gradient of 1e-22; a total minus a prefix leaves rounding errors, 1e-7.
    row = common.REGIMES.index("mixed")
    strong = np.asarray(inputs[4][row] == -50)
    known, found = (np.asarray(x[4][row], np.float64)[strong] for x in (expected[1], grads))
    assert np.linalg.norm(found - known) <= 1e-4 * np.linalg.norm(known)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [1, 32, 128])
@pytest.mark.parametrize("shape", SLOW_CASES)
def test_values_and_gradients_over_the_grid(shape, chunk_size, small_steps):
    small_steps(heads=4)
    inputs, cotangents = make(1, *shape)
    agree(inputs, cotangents, chunk_size=chunk_size, gate=shape[-1])


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
def test_inverse_of_a_triangle_of_ones_is_exact(chunk):
    masks = [jnp.asarray(mask, jnp.float32) for mask in tpu_chunk.inverse_masks(chunk)]
    program = tpu_chunk.inverse(jnp.tril(jnp.ones((chunk, chunk)), -1), masks, "float32")
    with pytest.raises(StopIteration) as stop:
        while True:
            next(program)
    np.testing.assert_array_equal(stop.value.value, np.eye(chunk) - np.eye(chunk, k=-1))


@pytest.mark.parametrize("gate", ["head", slow("channel")])
def test_identical_keys_without_decay_at_chunk_64(gate):
    """(I + L)^-1 of a lower triangle of ones: a power series of L has terms of 4e17."""
    (q, k, v, beta, g, s), cotangents = make(15, 4, 130, 1, 1, 16, 16, gate)
    k = jnp.where(jnp.arange(4)[:, None, None, None] % 2, unit(k[:, :1]), unit(k + 2 * unit(k[:, :1])))
    beta = beta.at[1].set(1).at[3].set(1.5)
    agree((q, k, v, beta, 0 * g, s), cotangents, chunk_size=64, gate=gate)


@pytest.mark.parametrize("gate", ["head", slow("channel")])
def test_documents_and_poisoned_padding(gate):
    time = 36
    inputs, cotangents = make(4, 8, time, 1, 1, 4, 5, gate)
    ids = common.document_rows(time)
    inputs = (*(common.poisoned(x, ids) for x in inputs[:5]), inputs[5])
    _, ((o, final), grads) = agree(inputs, cotangents, segment_ids=ids, gate=gate)
    padding = np.asarray(ids == 0)
    for name, array in zip(("o", *NAMES[2:7]), (o, *grads[:5]), strict=True):
        assert not np.any(np.asarray(array)[padding]), f"{name} at padding is not exactly zero"
    np.testing.assert_array_equal(final[6], inputs[5][6])  # a row of padding hands its state on
    np.testing.assert_array_equal(grads[5][6], cotangents[1][6])


@pytest.mark.parametrize("gate", [slow("head"), "channel"])
def test_a_document_knows_nothing_of_the_others(gate):
    time, mine = 40, slice(18, 35)  # document 2 crosses from one chunk to the next
    inputs, (do, ds) = make(6, 8, time, 1, 1, 4, 5, gate)
    ids = jnp.asarray(1 + (np.arange(time) >= mine.start) + (np.arange(time) >= mine.stop))[None].repeat(8, 0)
    outside = np.ones(time, bool)
    outside[mine] = False
    do = do.at[:, outside].set(0)
    packed = functools.partial(interpreted, segment_ids=ids, gate=gate)
    run = jax.jit(lambda *i: common.everything(packed, (do, 0 * ds), *i))
    changed = [x.at[:, outside].multiply(1.1).at[:, outside].add(-0.05) for x in inputs[:5]]
    (o, _), grads = run(*inputs)
    (o_changed, _), grads_changed = run(*changed, inputs[5] + 1)
    np.testing.assert_array_equal(o[:, mine], o_changed[:, mine])
    for name, a, b in zip(NAMES[2:7], grads[:5], grads_changed[:5], strict=True):
        np.testing.assert_array_equal(a[:, mine], b[:, mine], err_msg=name)
        assert not np.any(np.asarray(a)[:, outside]), f"{name} reaches another document"
    assert not np.any(np.asarray(grads[5])), "dinitial_state reaches from the second document"


HALVES = [("head", 64, 40, 16), slow("channel", 64, 40, 16), slow("head", 128, 300, 128), slow("channel", 64, 300, 64)]


@pytest.mark.parametrize("gate, dim, time, chunk_size", HALVES)
def test_half_precision(gate, dim, time, chunk_size):
    inputs, cotangents = make(8, 8, time, 1, 1, dim, dim, gate)
    rounded = [*(x.astype(jnp.bfloat16) for x in inputs[:4]), *inputs[4:]]
    _, out = agree(rounded, cotangents, common.HALF, chunk_size=chunk_size, gate=gate)
    kinds = [jnp.bfloat16, jnp.float32, *4 * [jnp.bfloat16], jnp.float32, jnp.float32]
    assert [x.dtype for x in (*out[0], *out[1])] == kinds


@pytest.mark.parametrize("gate", ["head", slow("channel")])
def test_no_races_and_no_read_of_what_was_not_written(gate):
    """In the interpreter that models memory: it raises for a race, and memory starts as NaN."""
    inputs, (do, dfinal) = make(7, 1, 20, 1, 1, 4, 4, gate)
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    options = dict(scale=0.5, chunk_size=16, interpret=mode)
    o, final, saved = jax.jit(lambda *x: pallas_tpu.forward(*x, **options))(*inputs)
    grads = jax.jit(lambda *x: pallas_tpu.backward(*x, **options))(*inputs[:5], saved, do, dfinal)
    run = lambda *i: reference.delta_scan(*i, None, 0.5)
    expected = jax.jit(lambda *i: common.everything(run, (do, dfinal), *i))(*inputs)
    common.assert_all_close(expected, ((o, final), grads), NAMES, common.FLOAT32, 2)


def test_factors_of_a_gate_a_channel_make_the_decay_between_any_two_tokens():
    chunk = 32
    g = np.random.default_rng(0).choice([0.0, -1e-4, -0.05, -5.0, -50.0], (chunk, 6)).astype(np.float32)
    gate = jax.jit(lambda g: tpu_chunk.ChannelGate.of(g, None, "float32")[:4])(g)
    factors, upto, after, total = jax.tree.map(np.asarray, gate)
    diagonal, *meeting = tpu_chunk.ChannelGate.masks_of(chunk)
    np.testing.assert_array_equal(np.sum([diagonal, *meeting], axis=0), np.tril(np.ones((chunk, chunk))))
    sums = np.cumsum(g, axis=0, dtype=np.float64)
    for factor, mask in zip(factors, meeting, strict=True):
        assert np.all(factor <= 1)
        i, j = np.nonzero(mask)
        np.testing.assert_allclose(factor[i] * factor[j], np.exp(sums[i] - sums[j]), rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(upto, np.exp(sums), rtol=1e-4, atol=1e-37)
    np.testing.assert_allclose(after, np.exp(sums[-1] - sums), rtol=1e-4, atol=1e-37)
    np.testing.assert_array_equal(total[:, 0], upto[-1])


def shapes_of(batch, time, heads, value_heads, key_dim, value_dim, dtype="float32"):
    key, value = (batch, time, heads, key_dim), (batch, time, value_heads, value_dim)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in (key, key, value)]


@pytest.mark.parametrize(
    "heads, value_heads, expected",
    [(1, 1, (1, 1, 1)), (4, 4, (4, 4, 1)), (1, 8, (4, 1, 2)), (2, 12, (3, 1, 2)), (3, 6, (2, 1, 1)), (5, 5, (1, 1, 1))],
)
def test_heads_of_a_grid_step_share_key_heads_evenly(heads, value_heads, expected, small_steps):
    small_steps(heads=8)  # half as many beside float32
    p = tpu_plan.plan(*shapes_of(1, 300, heads, value_heads, 8, 8), False, 1.0, None)
    assert (p.heads, p.step_keys, p.parts) == expected


@pytest.mark.parametrize(
    "chunk_size, time, chunk", [(None, 999, 64), (None, 9, 16), (1, 999, 16), (40, 999, 64), (5000, 9999, 128)]
)
def test_chunk_is_a_power_of_two(chunk_size, time, chunk, small_steps):
    small_steps(chunk=64)
    assert tpu_plan.plan(*shapes_of(1, time, 1, 1, 8, 8), False, 1.0, chunk_size).chunk == chunk


def test_few_key_channels_are_computed_in_float32_and_large_states_with_fewer_heads(small_steps):
    small_steps(heads=8)
    plan = lambda key_dim, value_dim: tpu_plan.plan(
        *shapes_of(1, 99, 8, 8, key_dim, value_dim, "bfloat16"), False, 1.0, None
    )
    assert [plan(dim, 64).dtype for dim in (32, 64)] == ["float32", "bfloat16"]
    assert [plan(*dims).heads for dims in ((32, 64), (64, 64), (128, 256), (256, 256))] == [4, 8, 4, 2]


def sharded(mesh, **options):
    """Batch over "data", heads over "model"."""
    spec, state = jax.sharding.PartitionSpec("data", None, "model"), jax.sharding.PartitionSpec("data", "model")
    run = lambda *i: scan(*i, implementation="pallas", **options)
    return jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 5 + (state,), out_specs=(spec, state), check_vma=True)


def test_runs_under_shard_map():
    inputs, cotangents = make(13, 2, 5, 2, 2, 4, 5, "head")
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
        (dict(key_dim=260), "q has head dim 260, and it takes up to 256"),
        (dict(interpret=False), "it runs on a TPU or a GPU, not on cpu, and interpret=True runs it here"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refusals(change, message):
    q = jnp.zeros((1, 4, 1, change.get("key_dim", 8)), change.get("dtype", "float32"))
    with pytest.raises(ValueError, match=message):
        delta_scan(q, q, q, q[..., 0], implementation="pallas", interpret=change.get("interpret", True))


def test_float64_is_refused():
    with jax.enable_x64():
        q = jnp.zeros((1, 4, 1, 8), jnp.float32)
        for name, change in dict(v=dict(v=q.astype("float64")), beta=dict(beta=q[..., 0].astype("float64"))).items():
            with pytest.raises(ValueError, match=f"{name} has dtype float64"):
                arguments = dict(q=q, k=q, v=q, beta=q[..., 0]) | change
                delta_scan(**arguments, implementation="pallas", interpret=True)


# What the TPU compiler makes of them.


def compile_case(chip, gate, dims, time=8192, dtype="bfloat16", heads=(8, 8)):
    """Forward and backward, with `heads` of q and k, and of v."""
    (key_dim, value_dim), (key_heads, value_heads) = dims, heads

    def run(q, k, v, beta, g, s):
        def loss(*inputs):
            o, final = scan(*inputs, gate=gate)
            return jnp.sum(o.astype(jnp.float32)) + jnp.sum(final)

        return jax.value_and_grad(loss, (0, 1, 2, 3, 4, 5))(q, k, v, beta, g, s)

    key, rows = (1, time, key_heads, key_dim), (1, time, value_heads)
    shapes = dict(q=(key, dtype), k=(key, dtype), v=((*rows, value_dim), dtype), beta=(rows, "float32"))
    shapes |= dict(g=(rows + ((key_dim,) if gate == "channel" else ()), "float32"))
    return aot.compile_for(chip, run, shapes | dict(s=((1, value_heads, key_dim, value_dim), "float32")))


@aot.needs_tpu
@pytest.mark.parametrize("chip, gate", [("v5e", "head"), slow("v5e", "channel"), slow("tpu7x", "head")])
def test_auto_compiles_to_the_kernels_with_memory_linear_in_time(chip, gate, small_steps):
    """Grid steps smaller than the table's compile sooner; few heads' arrays would lie in fast memory, uncounted."""
    small_steps(chunk=64, heads=1)
    heads = 32
    programs = {time: compile_case(chip, gate, (128, 64), time, heads=(8, heads)) for time in (2048, 4096, 8192)}
    assert all(len(program.kernels) == 2 for program in programs.values())
    memory = {time: program.temporary for time, program in programs.items()}
    print(f"{chip} {gate}: bytes of temporary memory by T: {memory}")
    # Nine float32 arrays of v's heads and of 128 channels; a state a token would take eight times as much.
    assert all(memory[time] < 9 * time * heads * 128 * 4 for time in memory)
    assert memory[8192] < 2.5 * memory[4096]


@aot.needs_tpu
def test_a_mesh_needs_no_collective(small_steps):
    mesh = jax.sharding.Mesh(np.array(aot.devices("v5e")).reshape(2, 2), ("data", "model"))
    run = sharded(mesh)
    spec, state = jax.sharding.PartitionSpec("data", None, "model"), jax.sharding.PartitionSpec("data", "model")

    def gradients(q, k, v, beta, g, s):
        loss = lambda *i: sum(jnp.sum(x.astype(jnp.float32)) for x in run(*i))
        return jax.grad(loss, tuple(range(6)))(q, k, v, beta, g, s)

    shapes = {name: ((2, 64, 2, 64), "bfloat16") for name in "qkv"}
    shapes |= {name: ((2, 64, 2), "float32") for name in ("beta", "g")} | dict(s=((2, 2, 64, 64), "float32"))
    specs = {name: spec for name in shapes} | dict(s=state)
    program = aot.compile_for("v5e", gradients, shapes, dict(data=2, model=2), specs)
    assert len(program.kernels) == 2 and not program.collectives


@aot.needs_tpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["64", "128", "256", "float32", "256-float32", "groups", "short"])
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("chip", aot.TPUS)
def test_every_kind_of_call_compiles(chip, gate, kind, monkeypatch):
    monkeypatch.undo()  # the table's grid steps
    dim = int(kind.split("-")[0]) if kind[0].isdigit() else 64
    options = dict(groups=dict(heads=(2, 24)), short=dict(time=100)).get(kind, {})
    dtype = "float32" if "float32" in kind else "bfloat16"
    program = compile_case(chip, gate, (dim, dim), **(dict(time=8192, dtype=dtype) | options))
    assert len(program.kernels) == 2


# By kind of gate and dim: bundles a head and token of the forward and the backward kernel, and registers spilled, at
# most, by chip. On every chip a bundle is a cycle, and the bound beside is what HBM leaves of them.
BUDGETS = {
    ("head", 128): dict(v5e=(6.5, 8.8), v5p=(6.5, 8.8), v6e=(5.0, 6.0), tpu7x=(5.0, 6.0)),
    ("head", 64): dict(v5e=(6.3, 8.7), v5p=(6.3, 8.7), v6e=(4.9, 5.9), tpu7x=(4.9, 5.9)),
    ("channel", 128): dict(v5e=(10.2, 21.0), v5p=(10.2, 21.0), v6e=(9.2, 17.5), tpu7x=(9.2, 17.5)),
}
MOST_SPILLS = 8500


def moved_bytes(p, backward):
    """Bytes that a head and token move between HBM and the kernel, at bfloat16."""
    residuals = 2 * p.key_dim * p.value_dim / p.chunk + 4 * p.chunk
    gates = 4 * p.key_dim if p.per_channel else 8
    rows = 2 * (2 * p.key_dim / p.groups + p.value_dim)  # q, k and v
    return residuals + 4 + (2 * (rows + gates) + 4 + 2 * p.value_dim if backward else rows + gates + 2 * p.value_dim)


@aot.needs_tpu
@pytest.mark.slow
@pytest.mark.parametrize("gate, dim", BUDGETS, ids=str)
@pytest.mark.parametrize("chip", aot.TPUS)
def test_static_schedule(chip, gate, dim, monkeypatch):
    monkeypatch.undo()
    heads = 32  # fewer heads' arrays would lie in fast memory before the kernel starts
    module = "tests.kernels.test_delta_scan_tpu"
    target = f"{module}:compile_case({chip!r}, {gate!r}, {(dim, dim)}, heads={(heads, heads)})"
    schedules = aot.schedules(target, "delta_scan")
    shapes = shapes_of(1, 8192, heads, heads, dim, dim, "bfloat16")
    p, of = tpu_plan.plan(*shapes, gate == "channel", 1.0, None), aot.CHIPS[chip]
    for name, budget in zip(("forward", "backward"), BUDGETS[gate, dim][chip], strict=True):
        schedule = next(s for s in schedules if name in s.kernel)
        bundles = schedule.bundles / (p.heads * p.chunk)
        bound = moved_bytes(p, name == "backward") / of["bandwidth"] * of["clock"]
        print(
            f"{chip} {gate} {dim} {name}: {bundles:.2f} bundles a head and token, where HBM takes {bound:.2f} cycles; "
            f"{schedule.share('MXU'):.2f} of matrix-unit slots, {schedule.spills} spills"
        )
        assert bundles <= budget and schedule.spills <= MOST_SPILLS, name
