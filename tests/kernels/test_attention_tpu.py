"""attention's TPU kernels: their values in interpret mode, and what the TPU compiler makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels import attention
from hyjax.kernels.attention import block_sizes, pallas_tpu, reference, tpu_blocks, xla
from tests.kernels import aot, common
from tests.kernels.test_attention import NAMES, attend, make

interpreted = functools.partial(attend, implementation="pallas", interpret=True)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So small that a short row has several blocks, and those several tiles."""

    def choose(rows=256, keys=128, tile_rows=128, tile_keys=128, ahead=2, behind=1):
        monkeypatch.setitem(block_sizes.PALLAS_TPU, "other", (rows, keys, tile_rows, tile_keys, ahead, behind))

    choose()
    return choose


def agree(inputs, cotangents, tolerances=common.FLOAT32, **options):
    """Values and all gradients of the kernels and the reference, as float32 unless the inputs are not."""
    run = lambda f, inputs: jax.jit(lambda *i: common.everything(functools.partial(f, **options), cotangents, *i))(
        *inputs
    )
    expected = run(functools.partial(attend, implementation="reference"), [x.astype(jnp.float32) for x in inputs])
    out = run(interpreted, inputs)
    common.assert_all_close(expected, out, NAMES[: 1 + len(inputs)], tolerances, 1)
    return out


# name: (B, Tq, Tk, Hq, Hk, K, V), options
CASES = {
    "B2-T200-H4-Hk2-K5-V7": ((2, 200, 200, 4, 2, 5, 7), dict()),
    "B1-Tq140-Tk200-H2-Hk2-full-K64-V130": ((1, 140, 200, 2, 2, 64, 130), dict(causal=False)),
    "B1-T300-H3-Hk1-window70-sinks": ((1, 300, 300, 3, 1, 8, 8), dict(window=70)),
    "B1-Tq300-Tk140-H2-Hk2-window9-soft_cap-sinks": ((1, 300, 140, 2, 2, 5, 7), dict(window=9, soft_cap=1.5)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    (*shape, key_dim, value_dim), options = CASES[name]
    inputs, cotangents = make(0, *shape, key_dim, value_dim)
    agree(inputs if "sinks" in name else inputs[:3], cotangents, **options)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 127, 130])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (63, 129), (127, 128), (129, 129), (257, 100), (385, 385)])
def test_ragged_lengths_at_the_blocks_edges(lengths, window):
    for heads in ((2, 2), (8, 1), (6, 2)):
        inputs, cotangents = make(1, 2, *lengths, *heads, 33, 40)
        agree(inputs, cotangents, window=window)
        if window is None:
            agree(inputs, cotangents, causal=False, soft_cap=3.0)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128), (100, 60)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_dims_and_tiles(dims, dtype, small_blocks):
    tolerances = common.FLOAT32 if dtype == "float32" else common.HALF
    for sizes in ((256, 256, 256, 128, 1, 0), (512, 256, 256, 256, 3, 2)):
        small_blocks(*sizes)
        inputs, cotangents = make(2, 1, 400, 400, 4, 2, *dims)
        agree([x.astype(dtype) for x in inputs], cotangents, tolerances, window=300)


def test_a_sink_of_nothing_beside_rows_that_see_nothing():
    inputs, cotangents = make(11, 1, 384, 384, 2, 1)
    ids = jnp.asarray([[1] * 128 + [0] * 128 + [1] * 128])
    agree((*inputs[:3], inputs[3].at[0].set(-jnp.inf)), cotangents, segment_ids=ids)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_and_poisoned_padding(causal):
    time = 150
    (q, k, v, sinks), cotangents = make(3, 8, time, time, 2, 1)
    ids = common.document_rows(time)
    q, k, v = (common.poisoned(x, ids) for x in (q, k, v))
    (o,), grads = agree((q, k, v, sinks), cotangents, segment_ids=ids, causal=causal, window=100 if causal else None)
    padding = np.asarray(ids == 0)
    for name, array in zip(("o", "dq", "dk", "dv"), (o, *grads[:3]), strict=True):
        assert not np.any(np.asarray(array)[padding]), f"{name} at padding is not exactly zero"


def test_half_precision():
    (q, k, v, sinks), cotangents = make(4, 1, 200, 200, 4, 2, 16, 16)
    half = [*(x.astype(jnp.bfloat16) for x in (q, k, v)), sinks]
    (o,), grads = agree(half, cotangents, common.HALF, window=150)
    assert all(x.dtype == jnp.bfloat16 for x in (o, *grads[:3]))


@pytest.mark.parametrize("window", [1, 128, 129, 211])
def test_window_is_exactly_the_last_w_tokens(window):
    """With 64 places a block, 128 keys and an offset of 20, 211 keeps all but one pair of a block."""
    time, queries = 300, 280
    q, k = jnp.ones((1, queries, 4, 2)), jnp.ones((1, time, 1, 2))
    one_hot = jnp.eye(time)[None, :, None]  # the output shows which keys were read
    place = np.arange(time - queries, time)[:, None, None]
    expected = (np.arange(time) <= place) & (np.arange(time) > place - window)
    o = interpreted(q, k, one_hot, window=window)[0][0]
    np.testing.assert_array_equal(np.asarray(o) > 0, np.broadcast_to(expected, o.shape))
    np.testing.assert_allclose(np.sum(o, -1), 1, rtol=1e-5)


def test_lse_is_that_of_xla():
    (q, k, v, sinks), _ = make(9, 1, 140, 140, 2, 1, 4, 4)
    ids, places = jnp.repeat(jnp.asarray([[1, 0, 2, 2]]), 35, axis=1), jnp.arange(140)[None]
    options = xla.Options(True, 60, 0.5, None)
    for sink in (None, sinks):
        lse = pallas_tpu.forward(q, k, v, ids, ids, sink, options, True)[1]
        rows = xla.Rows(places, ids)
        expected = xla.forward(q, k, v, rows, rows, sink, options, jnp.float32)[1]
        np.testing.assert_allclose(lse, expected, rtol=1e-5, atol=1e-5)
        assert np.any(np.isposinf(lse)) == (sink is None)


def test_rows_that_see_nothing_and_rows_of_very_negative_logits():
    (q, k, v, _), cotangents = make(5, 2, 140, 130, 2, 2, 4, 4)
    k = k.at[:, :, :, 0].set(1)
    q = jnp.zeros_like(q).at[0, :, :, 0].set(-2e5).at[1].set(q[1])  # row 0: logits of -1e5, all alike
    (o,), grads = jax.jit(lambda *i: common.everything(interpreted, cotangents, *i))(q, k, v)
    assert np.all(np.isfinite(o)) and all(np.all(np.isfinite(g)) for g in grads)
    assert not np.any(np.asarray(o)[:, :10]) and not np.any(np.asarray(grads[0])[:, :10])  # Tq - Tk = 10
    common.assert_close(jnp.cumsum(v[0], 0) / jnp.arange(1, 131)[:, None, None], o[0, 10:], 1e-4)


def test_a_document_knows_nothing_of_the_others():
    time = 260
    (q, k, v, _), (do,) = make(6, 1, time, time, 2, 1)
    ids = jnp.asarray(1 + (np.arange(time) >= 100) + (np.arange(time) >= 101) + (np.arange(time) >= 230))[None]
    mine = np.asarray(ids[0] == 3)
    do = do.at[:, ~mine].set(0)
    run = jax.jit(lambda *i: common.everything(functools.partial(interpreted, segment_ids=ids), (do,), *i))
    (o,), grads = run(q, k, v)
    (changed,), grads_changed = run(*(x.at[:, ~mine].multiply(3) for x in (q, k, v)))
    np.testing.assert_array_equal(o[:, mine], changed[:, mine])
    for a, b in zip(grads, grads_changed, strict=True):
        np.testing.assert_array_equal(a[:, mine], b[:, mine])
        assert not np.any(np.asarray(a)[:, ~mine])


def test_no_races_and_no_read_of_what_was_not_written():
    """In the interpreter that models memory: it raises for a race, and memory starts as NaN."""
    (q, k, v, sinks), (do,) = make(7, 1, 150, 150, 2, 1, 4, 4)
    ids = jnp.repeat(jnp.asarray([1, 0, 2]), 50)[None]
    options = xla.Options(True, 60, 0.5, 2.0)
    mode = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    o, lse = jax.jit(lambda *x: pallas_tpu.forward(*x, ids, ids, sinks, options, mode))(q, k, v)
    grads = jax.jit(lambda *x: pallas_tpu.backward(*x[:3], ids, ids, sinks, *x[3:], options, mode))(q, k, v, o, lse, do)
    places = jnp.arange(150)[None]
    run = lambda q, k, v, sinks: (reference.attention(q, k, v, places, places, ids, ids, sinks, **options._asdict()),)
    expected = jax.jit(lambda *i: common.everything(run, (do,), *i))(q, k, v, sinks)
    common.assert_all_close(expected, ((o,), grads), NAMES, common.FLOAT32, 1)


def test_blocks_that_nothing_can_see_are_skipped():
    def visits(time, segment_ids=None, causal=True, window=None):
        shape = (1, time, 1, 64)
        p = tpu_blocks.plan(shape, shape, shape, causal, window, segment_ids is not None)
        assert (p.places, p.keys) == (256, 128)
        found = tpu_blocks.packing(p, segment_ids, segment_ids)
        by_query, by_key = (int(np.sum(x.length)) for x in (found.by_query, found.by_key))
        assert by_query == by_key
        return by_query, found.by_query.steps, found.by_key.steps

    # 4 blocks of 256 queries, 8 of 128 keys
    assert visits(1024) == (2 + 4 + 6 + 8, 8, 4)
    assert visits(1024, causal=False) == (32, 8, 4)
    assert visits(1024, window=129) == (2 + 3 + 3 + 3, 3, 2)  # a block's first query sees 128 keys back
    assert visits(1024, window=130) == (2 + 4 + 4 + 4, 4, 2)
    ids = jnp.repeat(jnp.arange(4), 256)[None]  # the first document is padding
    assert visits(1024, ids) == (2 + 2 + 2, 8, 4)


def sharded(mesh, **options):
    """Batch over "data", heads over "model"."""
    spec, rows = jax.sharding.PartitionSpec("data", None, "model"), jax.sharding.PartitionSpec("data")

    def run(q, k, v, ids):
        return attend(q, k, v, segment_ids=ids, implementation="pallas", **options)

    return jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3 + (rows,), out_specs=(spec,), check_vma=True)


def test_runs_under_shard_map():
    (q, k, v, _), cotangents = make(8, 2, 140, 140, 2, 2)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=kinds)
    ids = jnp.repeat(jnp.asarray([[1, 2], [3, 0]]), 70, axis=1)
    run = sharded(mesh, interpret=True)
    out, expected = (
        jax.jit(lambda *i, f=f: common.everything(lambda *i: f(*i, ids), cotangents, *i))(q, k, v)
        for f in (run, lambda *i: interpreted(*i[:3], segment_ids=i[3]))
    )
    common.assert_all_close(expected, out, NAMES[:4], common.FLOAT32, 1)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(dtype="float16"), "q has dtype float16, and it takes bfloat16 and float32"),
        (dict(key_dim=520), "q has head dim 520, and it takes up to 512"),
        (dict(heads=17), "17 query heads a key head make a block of more than 2048 rows"),
        (dict(by_position=True), "it goes by place in the row"),
        (dict(interpret=False), "it runs on a TPU or a GPU, not on cpu, and interpret=True runs it here"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refusals(change, message):
    q = jnp.zeros((1, 4, change.get("heads", 2), change.get("key_dim", 8)), change.get("dtype", "float32"))
    k = q[:, :, :1]
    places = jnp.arange(4)[None] if change.get("by_position") else None
    with pytest.raises(ValueError, match=message):
        attention(
            q, k, k, q_positions=places, kv_positions=places, implementation="pallas",
            interpret=change.get("interpret", True),
        )  # fmt: skip


# What the TPU compiler makes of them.


def compile_case(chip, head_dim, time=8192, dtype="bfloat16", kv_heads=8, packed=False, **options):
    """Forward and backward of 8 causal heads."""

    def run(q, k, v, ids=None):
        loss = lambda q, k, v: jnp.sum(attention(q, k, v, segment_ids=ids, **options).astype(jnp.float32))
        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    shapes = {name: ((1, time, n, head_dim), dtype) for name, n in dict(q=8, k=kv_heads, v=kv_heads).items()}
    return aot.compile_for(chip, run, shapes | (dict(ids=((1, time), "int32")) if packed else {}))


@aot.needs_tpu
@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_auto_compiles_to_the_kernels_with_memory_linear_in_time(chip, small_blocks, monkeypatch):
    """Blocks smaller than the table's compile sooner, and what lies outside of the kernels is the same."""
    kind = aot.devices(chip)[0].device_kind
    monkeypatch.setitem(block_sizes.PALLAS_TPU, kind, (256, 256, 256, 256, 1, 0))
    programs = {time: compile_case(chip, 128, time, kv_heads=2, packed=True) for time in (2048, 4096, 8192)}
    assert all(len(program.kernels) == 3 for program in programs.values())
    memory = {time: program.temporary for time, program in programs.items()}
    print(f"{chip}: bytes of temporary memory by T: {memory}")
    # The logits of one head alone would be 268 MB at T 8192, where five float32 arrays of q's size are 168 MB.
    assert all(memory[time] < 5 * time * 8 * 128 * 4 for time in memory)


@aot.needs_tpu
def test_a_mesh_needs_no_collective():
    mesh = jax.sharding.Mesh(np.array(aot.devices("v5e")).reshape(2, 2), ("data", "model"))
    run = sharded(mesh)
    spec, rows = jax.sharding.PartitionSpec("data", None, "model"), jax.sharding.PartitionSpec("data")

    def gradients(q, k, v, ids):
        return jax.grad(lambda q, k, v: jnp.sum(run(q, k, v, ids)[0].astype(jnp.float32)), (0, 1, 2))(q, k, v)

    shapes = {name: ((2, 512, 4, 64), "bfloat16") for name in "qkv"} | dict(ids=((2, 512), "int32"))
    specs = dict(q=spec, k=spec, v=spec, ids=rows)
    program = aot.compile_for("v5e", gradients, shapes, dict(data=2, model=2), specs)
    assert len(program.kernels) == 3 and not program.collectives


@aot.needs_tpu
@pytest.mark.slow
@pytest.mark.parametrize("case", ["full", "window", "packed", "soft_cap", "float32", "256", "512-float32", "short"])
@pytest.mark.parametrize("chip", aot.TPUS)
def test_every_kind_of_call_compiles(chip, case):
    options = dict(
        full=dict(causal=False), window=dict(window=1024), packed=dict(packed=True, kv_heads=2),
        soft_cap=dict(soft_cap=30.0), short=dict(time=100),
    )  # fmt: skip
    dtype = "float32" if "float32" in case else "bfloat16"
    dim = int(case.split("-")[0]) if case[0].isdigit() else 64
    program = compile_case(chip, dim, **(dict(time=2048, dtype=dtype) | options.get(case, {})))
    assert len(program.kernels) == 3


# By chip, in the forward, dq and dkv kernels: the share of the matrix unit's slots that the static schedule uses, at
# least, and registers spilled, at most. Tiles are larger than all registers, so that some spill (to fast memory) beside
# the products. v6e and tpu7x have twice the matrix unit to the same vector unit, which is what bounds forward there.
BUDGETS = {
    "v5e": ((0.78, 0.88, 0.88), 3500),
    "v5p": ((0.78, 0.88, 0.88), 3500),
    "v6e": ((0.50, 0.72, 0.80), 3500),
    "tpu7x": ((0.48, 0.70, 0.78), 3500),
}


@aot.needs_tpu
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("chip", BUDGETS)
def test_static_schedule(chip, head_dim):
    module = "tests.kernels.test_attention_tpu"
    schedules = aot.schedules(f"{module}:compile_case({chip!r}, {head_dim})", "attention_")
    by_name = {next(n for n in ("forward", "dq", "dkv") if n in s.kernel): s for s in schedules}
    shares, spills = BUDGETS[chip]
    for name, least in zip(("forward", "dq", "dkv"), shares, strict=True):
        schedule = by_name[name]
        print(
            f"{chip} D{head_dim} {name}: {schedule.bundles} bundles, {schedule.share('MXU'):.2f} of matrix-unit slots, "
            f"{schedule.share('VALU'):.2f} of vector slots, {schedule.spills} spills"
        )
        assert schedule.share("MXU") >= least and schedule.spills <= spills, name
