"""attention's GPU kernels: their values in interpret mode, and what the GPU compiler makes of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec, use_abstract_mesh

from hyjax.kernels import attention
from hyjax.kernels.attention import gpu_plan, pallas_gpu, reference, xla
from tests.kernels import aot, common
from tests.kernels.test_attention import NAMES, attend, make

interpreted = functools.partial(attend, implementation="pallas", interpret=True)


@pytest.fixture(autouse=True)
def traced_for_an_h100():
    with use_abstract_mesh(aot.H100):
        yield


def half(inputs, dtype=jnp.bfloat16):
    """q, k and v in two bytes, sinks as they are."""
    return *(x.astype(dtype) for x in inputs[:3]), *inputs[3:]


def agree(inputs, cotangents, dtype=jnp.bfloat16, **options):
    """Values and all gradients of the kernels, and of the reference in float32."""
    inputs = half(inputs, dtype)
    run = lambda f, inputs: jax.jit(lambda *i: common.everything(functools.partial(f, **options), cotangents, *i))(
        *inputs
    )
    expected = run(functools.partial(attend, implementation="reference"), [x.astype(jnp.float32) for x in inputs])
    out = run(interpreted, inputs)
    common.assert_all_close(expected, out, NAMES[: 1 + len(inputs)], common.HALF, 1)
    assert all(x.dtype == dtype for x in (out[0][0], *out[1][:3]))
    return out


# name: (B, Tq, Tk, Hq, Hk, K, V), options
CASES = {
    "B2-T150-H2-Hk1-K5-V7": ((2, 150, 150, 2, 1, 5, 7), dict()),
    "B1-Tq70-Tk140-H1-Hk1-full-K65-V128": ((1, 70, 140, 1, 1, 65, 128), dict(causal=False)),
    "B1-Tq200-Tk140-H2-Hk1-window70-soft_cap-sinks": ((1, 200, 140, 2, 1, 8, 8), dict(window=70, soft_cap=1.5)),
    "B1-T140-H1-Hk1-negative_scale-float16": ((1, 140, 140, 1, 1, 64, 64), dict(scale=-0.1)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    (*shape, key_dim, value_dim), options = CASES[name]
    inputs, cotangents = make(0, *shape, key_dim, value_dim)
    dtype = jnp.float16 if "float16" in name else jnp.bfloat16
    agree(inputs if "sinks" in name else inputs[:3], cotangents, dtype, **options)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 2, 64, 130])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (63, 129), (127, 128), (129, 129), (257, 100), (385, 385)])
def test_ragged_lengths_at_the_blocks_edges(lengths, window):
    for heads, dims in (((2, 2), (33, 40)), ((4, 1), (128, 100))):
        inputs, cotangents = make(1, 1, *lengths, *heads, *dims)
        agree(inputs[:3], cotangents, window=window)
        if window is None:
            agree(inputs[:3], cotangents, causal=False, soft_cap=3.0)


def documents(rows, causal):
    time = 150
    (q, k, v, sinks), cotangents = make(3, 8, time, time, 1, 1)
    ids = common.document_rows(time)[rows]
    q, k, v, do = (common.poisoned(x[rows], ids) for x in (q, k, v, *cotangents))
    options = dict(segment_ids=ids, causal=causal, window=100 if causal else None)
    (o,), grads = agree((q, k, v, sinks), (jnp.nan_to_num(do),), **options)
    padding = np.asarray(ids == 0)
    for name, array in zip(("o", "dq", "dk", "dv"), (o, *grads[:3]), strict=True):
        assert not np.any(np.asarray(array)[padding]), f"{name} at padding is not exactly zero"


def test_documents_and_poisoned_padding():
    documents(np.array([2, 3, 7]), causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_every_kind_of_documents(causal):
    documents(np.arange(8), causal)


@pytest.mark.parametrize("window", [1, 64, 65])
def test_window_is_exactly_the_last_w_tokens(window):
    time, queries = 128, 120
    q, k = jnp.ones((1, queries, 1, 2), jnp.bfloat16), jnp.ones((1, time, 1, 2), jnp.bfloat16)
    one_hot = jnp.eye(time, dtype=jnp.bfloat16)[None, :, None]  # the output shows which keys were read
    place = np.arange(time - queries, time)[:, None, None]
    expected = (np.arange(time) <= place) & (np.arange(time) > place - window)
    o = np.asarray(jax.jit(functools.partial(interpreted, window=window))(q, k, one_hot)[0][0], np.float32)
    np.testing.assert_array_equal(o > 0, np.broadcast_to(expected, o.shape))
    np.testing.assert_allclose(np.sum(o, -1), 1, rtol=1e-2)


def test_lse_is_that_of_xla():
    (q, k, v, sinks), _ = make(9, 1, 140, 140, 2, 1, 4, 4)
    q, k, v = half((q, k, v))
    ids, places = jnp.repeat(jnp.asarray([[1, 0, 2, 2]]), 35, axis=1), jnp.arange(140)[None]
    options = xla.Options(True, 60, 0.5, None)
    for sink in (None, sinks):
        lse = jax.jit(lambda q, k, v, s=sink: pallas_gpu.forward(q, k, v, ids, ids, s, options, True)[1])(q, k, v)
        rows = xla.Rows(places, ids)
        expected = xla.forward(q, k, v, rows, rows, sink, options, jnp.float32)[1]
        np.testing.assert_allclose(lse, expected, rtol=1e-5, atol=1e-5)
        assert np.any(np.isposinf(lse)) == (sink is None)


def test_rows_that_see_nothing_and_rows_of_very_negative_logits():
    (q, k, v, _), cotangents = make(5, 2, 140, 130, 1, 1, 4, 4)
    k = k.at[:, :, :, 0].set(1)
    q = jnp.zeros_like(q).at[0, :, :, 0].set(-2e5).at[1].set(q[1])  # row 0: logits of -1e5, all alike
    inputs = half((q, k, v))
    (o,), grads = jax.jit(lambda *i: common.everything(interpreted, cotangents, *i))(*inputs)
    assert np.all(np.isfinite(o)) and all(np.all(np.isfinite(g)) for g in grads)
    assert not np.any(np.asarray(o)[:, :10]) and not np.any(np.asarray(grads[0])[:, :10])  # Tq - Tk = 10
    mean = jnp.cumsum(inputs[2][0].astype(jnp.float32), 0) / jnp.arange(1, 131)[:, None, None]
    common.assert_close(mean, o[0, 10:], common.HALF[0])


def test_a_document_knows_nothing_of_the_others():
    time = 200
    (q, k, v, _), (do,) = make(6, 1, time, time, 1, 1)
    ids = jnp.asarray(1 + (np.arange(time) >= 100) + (np.arange(time) >= 101) + (np.arange(time) >= 150))[None]
    mine = np.asarray(ids[0] == 3)
    inputs, do = half((q, k, v)), do.at[:, ~mine].set(0)
    run = jax.jit(lambda *i: common.everything(functools.partial(interpreted, segment_ids=ids), (do,), *i))
    (o,), grads = run(*inputs)
    (changed,), grads_changed = run(*(x.at[:, ~mine].multiply(3) for x in inputs))
    np.testing.assert_array_equal(o[:, mine], changed[:, mine])
    for a, b in zip(grads, grads_changed, strict=True):
        np.testing.assert_array_equal(a[:, mine], b[:, mine])
        assert not np.any(np.asarray(a)[:, ~mine])


def test_no_races_and_no_read_of_what_was_not_written():
    """In the interpreter that models memory, which starts as NaN; five blocks of keys go through two stages."""
    (q, k, v, sinks), (do,) = make(7, 1, 140, 520, 1, 1, 4, 4)
    q, k, v, do = (x.astype(jnp.bfloat16) for x in (q, k, v, do))
    q_ids, kv_ids = jnp.repeat(jnp.asarray([[0, 2]]), 70, axis=1), jnp.repeat(jnp.asarray([1, 0, 2, 2]), 130)[None]
    options = xla.Options(True, 400, 0.5, 2.0)
    mode = plgpu.InterpretGPUParams(detect_races=True)
    o, lse = jax.jit(lambda *x: pallas_gpu.forward(*x, q_ids, kv_ids, sinks, options, mode))(q, k, v)
    backward = jax.jit(lambda *x: pallas_gpu.backward(*x[:3], q_ids, kv_ids, sinks, *x[3:], options, mode))
    grads = backward(q, k, v, o, lse, do)
    rows = jnp.arange(380, 520)[None], jnp.arange(520)[None], q_ids, kv_ids
    run = lambda q, k, v, sinks: (reference.attention(q, k, v, *rows, sinks, **options._asdict()),)
    inputs = [x.astype(jnp.float32) for x in (q, k, v, sinks)]
    expected = jax.jit(lambda *i: common.everything(run, (do.astype(jnp.float32),), *i))(*inputs)
    common.assert_all_close(expected, ((o,), grads), NAMES, common.HALF, 1)


# Which blocks meet.


def plan(q_len, kv_len, causal=True, window=None, packed=False):
    q, k = (1, q_len, 1, 64), (1, kv_len, 1, 64)
    return gpu_plan.plan(q, k, k, xla.Options(causal, window, 1.0, None), packed)


def test_blocks_that_nothing_can_see_are_skipped():
    def visits(time, segment_ids=None, **options):
        p = plan(time, time, packed=segment_ids is not None, **options)
        ids = gpu_plan.pad_ids(p, segment_ids, segment_ids)
        first, end, whole_first, whole_end = np.moveaxis(np.asarray(gpu_plan.by_query(p, 64, ids).table[0]), 1, 0)
        mirrored = np.asarray(gpu_plan.by_key(p, 64, ids).table[0])
        assert np.sum(end - first) == np.sum(mirrored[:, 1] - mirrored[:, 0])  # blocks of 128 and 64 either way
        return int(np.sum(end - first)), int(np.sum(whole_end - whole_first))

    # 4 blocks of 128 queries, 8 of 64 keys
    assert visits(512) == (2 + 4 + 6 + 8, 0 + 2 + 4 + 6)
    assert visits(512, causal=False) == (32, 32)
    assert visits(512, window=65) == (2 + 3 + 3 + 3, 0)  # a block's first query sees 64 keys back
    assert visits(512, window=66) == (2 + 4 + 4 + 4, 0)
    assert visits(512, window=256) == (2 + 4 + 6 + 6, 0 + 2 + 2 + 2)
    ids = jnp.repeat(jnp.arange(4), 128)[None]  # the first document is padding
    assert visits(512, ids) == (2 + 2 + 2, 0)
    assert visits(512, ids, causal=False) == (2 + 2 + 2, 6)


def test_tables_are_right_about_every_pair():
    """Pairs of blocks that are not visited hold no visible pair, and those said to be whole no invisible one."""
    rng = np.random.default_rng(0)
    for case in range(36):
        q_len, kv_len = (int(n) for n in rng.choice([1, 200, 450], 2, p=[0.1, 0.3, 0.6]))
        causal, packed = bool(case % 3), bool(case % 2)
        window = int(rng.integers(1, 300)) if case % 3 == 2 else None
        p = plan(q_len, kv_len, causal, window, packed)
        q_ids, kv_ids = (np.cumsum(rng.random(n) < 0.01) % 3 if packed else np.ones(n, int) for n in (q_len, kv_len))
        ahead = np.arange(q_len)[:, None] + kv_len - q_len - np.arange(kv_len)
        visible = (q_ids[:, None] == kv_ids) & (q_ids[:, None] != 0)
        visible &= (ahead >= 0) | (not causal)
        visible &= ahead < (window or np.inf)
        ids = gpu_plan.pad_ids(p, q_ids[None], kv_ids[None]) if packed else None
        # Padded queries are of no consequence, padded keys may not be seen.
        seen = np.pad(visible, ((0, p.q_padded - q_len), (0, p.kv_padded - kv_len)))
        unseen = np.pad(~visible, ((0, p.q_padded - q_len), (0, 0)))
        unseen = np.pad(unseen, ((0, 0), (0, p.kv_padded - kv_len)), constant_values=True)
        for visits, inner, some, none in (
            (gpu_plan.by_query(p, p.forward.inner, ids), p.forward.inner, seen, unseen),
            (gpu_plan.by_key(p, p.dkv.inner, ids), p.dkv.inner, seen.T, unseen.T),
        ):
            for n, (first, end, whole_first, whole_end) in enumerate(np.asarray(visits.table[0])):
                assert 0 <= first <= end and (whole_first == whole_end or first <= whole_first < whole_end <= end)
                outer = slice(n * gpu_plan.OUTER, (n + 1) * gpu_plan.OUTER)
                places = np.flatnonzero(some[outer].any(0))
                assert not places.size or (first * inner <= places[0] and places[-1] < end * inner)
                assert not none[outer, whole_first * inner : whole_end * inner].any()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(dtype="float32"), "it takes q, k, v all bfloat16 or all float16, not float32"),
        (dict(key_dim=136), "q has head dim 136, and it takes up to 128"),
        (dict(by_position=True), "it goes by place in the row"),
        (dict(device="NVIDIA B200"), "it is written for H100, .* and not for NVIDIA B200"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_refusals(change, message):
    q = jnp.zeros((1, 4, 2, change.get("key_dim", 8)), change.get("dtype", "bfloat16"))
    k = q[:, :, :1]
    places = jnp.arange(4)[None] if change.get("by_position") else None
    kind = change.get("device", "NVIDIA H100 80GB HBM3")
    device = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    with (
        use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)),
        pytest.raises(ValueError, match=message),
    ):
        attention(q, k, k, q_positions=places, kv_positions=places, implementation="pallas")


# What the GPU compiler makes of them.


def gradients(q, k, v, ids=None, **options):
    loss = lambda q, k, v: jnp.sum(
        attention(q, k, v, segment_ids=ids, implementation="pallas", **options).astype(jnp.float32)
    )
    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def shapes(head_dim, time, dtype="bfloat16", kv_heads=8, packed=False):
    """8 heads."""
    arrays = {name: ((1, time, n, head_dim), dtype) for name, n in dict(q=8, k=kv_heads, v=kv_heads).items()}
    return arrays | (dict(ids=((1, time), "int32")) if packed else {})


def compile_case(head_dim, time=8192, dtype="bfloat16", kv_heads=8, packed=False, **options):
    """Forward and backward, causal unless the options say otherwise."""
    arrays = shapes(head_dim, time, dtype, kv_heads, packed)
    return aot.compile_for("h100", functools.partial(gradients, **options), arrays)


def test_lowers_for_a_gpu():
    """Without a GPU's compiler: as far as the kernels' own language."""
    arrays = [jax.ShapeDtypeStruct(*x) for x in shapes(128, 512, kv_heads=2, packed=True).values()]
    run = jax.jit(functools.partial(gradients, window=200, soft_cap=20.0))
    unchecked = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    module = export.export(run, platforms=["cuda"], disabled_checks=unchecked)(*arrays).mlir_module()
    assert module.count("@mosaic_gpu_v2") == 3


KINDS = dict(
    causal=dict(), full=dict(causal=False), window=dict(window=1024), packed=dict(packed=True, kv_heads=2),
    soft_cap=dict(soft_cap=30.0), all=dict(packed=True, kv_heads=2, window=1024, soft_cap=30.0),
    ragged=dict(causal=False, time=2000), short=dict(time=100, dtype="float16"),
)  # fmt: skip


@aot.needs_cuda
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_no_spills_and_no_products_that_wait_for_each_other(kind, head_dim):
    options = dict(time=2048) | KINDS[kind]
    assemblies = aot.ptxas(f"tests.kernels.test_attention_gpu:compile_case({head_dim}, **{options!r})")
    assert sorted(a.kernel for a in assemblies) == ["attention_dkv", "attention_dq", "attention_forward"]
    assert all(a.spills == 0 and not a.serialized for a in assemblies), assemblies


@aot.needs_cuda
@pytest.mark.parametrize("head_dim", [64, 128])
def test_memory_is_linear_in_time(head_dim):
    programs = {time: compile_case(head_dim, time, kv_heads=2, packed=True) for time in (2048, 4096, 8192)}
    assert all(len(program.kernels) == 3 for program in programs.values())
    memory = {time: program.temporary for time, program in programs.items()}
    print(f"D {head_dim}: bytes of temporary memory by T: {memory}")
    # Logits of one head alone would be 268 MB at T 8192, where two float32 arrays of q's size are 67 MB at D 128.
    assert all(memory[time] < 2 * time * 8 * head_dim * 4 for time in memory)


@aot.needs_cuda
def test_a_mesh_needs_no_collective():
    spec, rows = PartitionSpec("data", None, "model"), PartitionSpec("data")

    def run(q, k, v, ids):
        return attention(q, k, v, segment_ids=ids, implementation="pallas")

    def sharded(q, k, v, ids):
        f = jax.shard_map(run, in_specs=(spec,) * 3 + (rows,), out_specs=spec, check_vma=True)
        return jax.grad(lambda q, k, v: jnp.sum(f(q, k, v, ids).astype(jnp.float32)), (0, 1, 2))(q, k, v)

    arrays = {name: ((2, 512, 4, 64), "bfloat16") for name in "qkv"} | dict(ids=((2, 512), "int32"))
    specs = dict(q=spec, k=spec, v=spec, ids=rows)
    program = aot.compile_for("h100", sharded, arrays, dict(data=2, model=2), specs)
    assert len(program.kernels) == 3 and not program.collectives
