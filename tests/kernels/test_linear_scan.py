import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from hyjax.kernels import dispatch, linear_scan
from hyjax.kernels.linear_scan import block_sizes
from tests.kernels import common

NAMES = ("o", "final_state", "dq", "dk", "dv", "dlog_decay", "dinitial_state")
GATES = ("head", "channel")


def make(seed, batch, time, heads, value_heads, key_dim, value_dim, gate, dtype=np.float32):
    """Inputs (q, k, v, log_decay, initial_state) and cotangents (do, dfinal)."""
    state = (batch, value_heads, key_dim, value_dim)
    key, value = (batch, time, heads, key_dim), (batch, time, value_heads, value_dim)
    q, k, v, s, do, ds = common.normal(seed, key, key, value, state, value, state, dtype=dtype)
    shape = (len(common.REGIMES), time, value_heads) + ((key_dim,) if gate == "channel" else ())
    g = common.gates(seed, shape, dtype)[np.arange(batch) % len(common.REGIMES)]
    return (q, k, v, g, s), (do, ds)


def scan(q, k, v, g, s, **options):
    return linear_scan(q, k, v, g, initial_state=s, **options)


def forms(cotangents, inputs, chunk_size, **options):
    """Reference, the walk over tokens (or what the table takes) and chunks, in one compilation."""
    kinds = (
        dict(implementation="reference"),
        dict(implementation="xla"),
        dict(implementation="xla", chunk_size=chunk_size),
    )
    run = lambda *i: [common.everything(functools.partial(scan, **k, **options), cotangents, *i) for k in kinds]
    return jax.jit(run)(*inputs)


def agree(inputs, cotangents, chunk_size=16, tolerances=common.FLOAT32, **options):
    reference, walk, chunks = forms(cotangents, inputs, chunk_size, **options)
    common.assert_all_close(reference, walk, NAMES, tolerances, 2)
    common.assert_all_close(reference, chunks, NAMES, tolerances, 2)


def case(*values):
    """A readable id: B8-T63-H1-HV2-K5-V7-head."""
    letters = ("B", "T", "H", "HV", "K", "V", "")
    return pytest.param(values, id="-".join(f"{a}{b}" for a, b in zip(letters, values, strict=True)))


CASES = [
    case(8, 1, 2, 4, 5, 7, "head"),
    case(8, 2, 2, 2, 5, 7, "channel"),
    case(8, 63, 1, 2, 5, 7, "head"),
    case(8, 65, 2, 2, 7, 5, "channel"),
    case(8, 100, 2, 8, 8, 8, "head"),
    case(8, 33, 1, 4, 6, 3, "channel"),
]
SLOW_CASES = [
    case(8, time, 2, 2 * groups, key, value, gate)
    for time in (1, 2, 3, 15, 64, 65, 100, 500)
    for groups, key, value in ((1, 60, 64), (2, 17, 33), (4, 8, 8))
    for gate in GATES
]


@pytest.mark.parametrize("shape", CASES)
def test_values_and_gradients_in_every_gate_regime(shape):
    inputs, cotangents = make(0, *shape)
    agree(inputs, cotangents)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("shape", SLOW_CASES)
def test_values_and_gradients_over_the_grid(shape, chunk_size):
    inputs, cotangents = make(1, *shape)
    agree(inputs, cotangents, chunk_size)


@pytest.mark.parametrize("gate", GATES)
def test_chunk_of_64_with_strong_decay_is_finite_and_right(gate):
    # Pairs reach a decay of 63 * -50 = -3150: a form that masks after exp, or divides by a decay, is not finite here.
    inputs, cotangents = make(2, 8, 70, 1, 1, 4, 4, gate)
    agree(inputs, cotangents, 64)


@pytest.mark.parametrize("gate", GATES)
def test_pieces_of_chunks_agree_with_the_reference(gate, monkeypatch):
    monkeypatch.setitem(block_sizes.PIECE, "cpu", 1)  # a piece a chunk
    monkeypatch.setitem(block_sizes.STEPS, "cpu", (0, 0))
    inputs, cotangents = make(3, 8, 50, 1, 2, 4, 3, gate)
    agree(inputs, cotangents, 8)


@pytest.mark.parametrize("gate", GATES)
def test_documents_and_poisoned_padding(gate):
    time = 40
    inputs, cotangents = make(4, 8, time, 1, 2, 4, 5, gate)
    ids = common.document_rows(time)
    inputs = (*(common.poisoned(x, ids) for x in inputs[:4]), inputs[4])
    results = forms(cotangents, inputs, 16, segment_ids=ids)
    for out in results[1:]:
        common.assert_all_close(results[0], out, NAMES, common.FLOAT32, 2)
    padding = np.asarray(ids == 0)
    for (o, _), grads in results:
        for name, array in zip(("o", "dq", "dk", "dv", "dg"), (o, *grads[:4]), strict=True):
            assert not np.any(np.asarray(array)[padding]), f"{name} at padding is not exactly zero"
    (_, final), grads = results[2]
    np.testing.assert_array_equal(final[6], inputs[4][6])  # a row of padding hands its state on
    np.testing.assert_array_equal(grads[4][6], cotangents[1][6])


@pytest.mark.parametrize("chunk_size", [None, 16], ids=["walk", "chunks"])
@pytest.mark.parametrize("gate", GATES)
def test_packed_documents_equal_documents_alone(gate, chunk_size):
    lengths = (5, 1, 10, 16)  # a start mid-chunk, a document of one token, a start on a chunk's edge
    inputs, cotangents = make(5, 8, sum(lengths), 1, 2, 4, 5, gate)
    ids = jnp.asarray(np.repeat(np.arange(1, 5), lengths)[None].repeat(8, 0))

    def alone(q, k, v, g, s):
        outputs, end = [], np.cumsum(lengths)
        for length, last in zip(lengths, end, strict=True):
            piece = slice(last - length, last)
            o, s = scan(q[:, piece], k[:, piece], v[:, piece], g[:, piece], s, implementation="reference")
            outputs.append(o)
            final, s = s, jnp.zeros_like(s)
        return jnp.concatenate(outputs, axis=1), final

    packed = functools.partial(scan, segment_ids=ids, chunk_size=chunk_size)
    run = jax.jit(lambda *i: (common.everything(alone, cotangents, *i), common.everything(packed, cotangents, *i)))
    common.assert_all_close(*run(*inputs), NAMES, common.FLOAT32, 2)


@pytest.mark.parametrize("options", [dict(), dict(chunk_size=16), dict(implementation="reference")], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_a_document_knows_nothing_of_the_others(gate, options):
    time, mine = 40, slice(16, 23)  # document 2 of row 0 starts on a chunk's edge and ends inside the chunk
    inputs, (do, ds) = make(6, 8, time, 1, 2, 4, 5, gate)
    ids = jnp.asarray(1 + (np.arange(time) >= 16) + (np.arange(time) >= 23))[None].repeat(8, 0)
    do = do.at[:, :16].set(0).at[:, 23:].set(0)
    run = jax.jit(lambda *i: common.everything(functools.partial(scan, segment_ids=ids, **options), (do, 0 * ds), *i))
    outside = np.ones(time, bool)
    outside[mine] = False
    changed = [x.at[:, outside].multiply(1.5).at[:, outside].add(-0.1) for x in inputs[:4]]
    (o, _), grads = run(*inputs)
    (o_changed, _), grads_changed = run(*changed, inputs[4] + 1)
    np.testing.assert_array_equal(o[:, mine], o_changed[:, mine])
    for name, a, b in zip(NAMES[2:6], grads[:4], grads_changed[:4], strict=True):
        np.testing.assert_array_equal(a[:, mine], b[:, mine], err_msg=name)
        assert not np.any(np.asarray(a)[:, outside]), f"{name} reaches another document"
    assert not np.any(np.asarray(grads[4])), "dinitial_state reaches from the second document"


EDGES = [[1], [17], list(range(1, 35))]
SLOW_EDGES = [[2], [3], [15], [16], [34], [1, 4, 20, 33]]


@pytest.mark.parametrize("edges", [EDGES, pytest.param(SLOW_EDGES, marks=pytest.mark.slow)], ids=["few", "more"])
@pytest.mark.parametrize("chunk_size", [None, 16], ids=["walk", "chunks"])
@pytest.mark.parametrize("gate", GATES)
def test_any_split_equals_one_call(gate, chunk_size, edges):
    time = 35
    inputs, _ = make(7, 8, time, 1, 2, 4, 5, gate)
    ids = common.document_rows(time).at[:, 20:].set(1).at[:, :20].min(1)  # padding, and one document across each split
    run = jax.jit(functools.partial(linear_scan, chunk_size=chunk_size))
    whole = run(*inputs[:4], initial_state=inputs[4], segment_ids=ids)

    def pieces(edges):
        state, outputs = inputs[4], []
        for a, b in zip([0, *edges], [*edges, time], strict=True):
            o, state = run(*(x[:, a:b] for x in inputs[:4]), initial_state=state, segment_ids=ids[:, a:b])
            outputs.append(o)
        return jnp.concatenate(outputs, axis=1), state

    for split in edges:
        for a, b, name in zip(whole, pieces(split), NAMES[:2], strict=True):
            common.assert_close(a, b, 1e-5, f"{name} split at {split}")


@pytest.mark.parametrize("gate", GATES)
def test_half_precision(gate):
    inputs, cotangents = make(8, 8, 40, 1, 2, 4, 5, gate)
    rounded = [x.astype(jnp.bfloat16) for x in inputs[:3]]
    exact = [x.astype(jnp.float32) for x in rounded]
    reference = jax.jit(
        lambda *i: common.everything(functools.partial(scan, implementation="reference"), cotangents, *i)
    )(*exact, *inputs[3:])
    for chunk_size in (None, 16):
        run = functools.partial(scan, chunk_size=chunk_size)
        out = jax.jit(lambda *i, run=run: common.everything(run, cotangents, *i))(*rounded, *inputs[3:])
        assert [x.dtype for x in (*out[0], *out[1])] == [
            jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32,
        ]  # fmt: skip
        common.assert_all_close(reference, out, NAMES, common.HALF, 2)


@pytest.mark.parametrize("gate", GATES)
def test_float64_and_finite_differences(gate):
    with jax.enable_x64():
        inputs, cotangents = make(9, 8, 37, 1, 2, 4, 5, gate, np.float64)
        agree(inputs, cotangents, tolerances=common.FLOAT64, segment_ids=common.document_rows(37))
        small, _ = make(10, 1, 5, 1, 2, 2, 2, gate, np.float64)
        small = (*small[:3], -jnp.exp(small[3] - 1), small[4])
        run = functools.partial(scan, segment_ids=jnp.array([[1, 1, 0, 2, 2]]), chunk_size=4)
        check_grads(jax.jit(run), small, order=1, modes=("rev",), atol=1e-7, rtol=1e-7)


def test_scale_and_omitted_state():
    (q, k, v, g, s), _ = make(11, 8, 20, 1, 2, 4, 5, "head")
    run = jax.jit(
        lambda q: (linear_scan(q, k, v, g), linear_scan(q * 3, k, v, g, scale=4**-0.5 / 3, initial_state=0 * s))
    )
    for a, b in zip(*run(q), strict=True):
        common.assert_close(a, b, 1e-6)


def test_states_carry_a_name_for_remat_policies():
    (q, k, v, g, _), _ = make(12, 8, 20, 1, 2, 4, 5, "head")
    loss = lambda q: jnp.sum(linear_scan(q, k, v, g)[0])
    assert "name=linear_scan_states" in str(jax.make_jaxpr(jax.grad(loss))(q))


def test_runs_under_shard_map_with_checks():
    inputs, cotangents = make(13, 8, 20, 1, 2, 4, 5, "head")
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    for chunk_size in (None, 16):
        run = lambda *i, c=chunk_size: linear_scan(*i, chunk_size=c)
        sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
        out, expected = (
            jax.jit(lambda *i, f=f: common.everything(f, cotangents, *i))(*inputs[:4]) for f in (sharded, run)
        )
        common.assert_all_close(expected, out, NAMES[:6], common.FLOAT32, 2)


def test_auto_takes_xla_and_says_so_once(caplog):
    (q, k, v, g, _), _ = make(14, 8, 3, 1, 1, 2, 2, "head")
    dispatch._logged.clear()
    with caplog.at_level(logging.INFO, "hyjax.kernels"):
        for _ in range(2):
            linear_scan(q, k, v, g)
    assert [r.getMessage() for r in caplog.records] == ["linear_scan: implementation 'auto' is 'xla' on cpu"]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=(2, 3, 2, 5)), r"q has shape \(2, 3, 2, 5\), expected .* = \(2, 3, 2, 4\)"),
        (dict(v=(2, 3, 3, 5)), r"\(2, 3, 3, 5\) need T, K >= 1 and HV a multiple of H"),
        (dict(log_decay=(2, 3, 2)), r"log_decay has shape \(2, 3, 2\), expected .* = \(2, 3, 4\)"),
        (dict(log_decay=(2, 3, 4, 5)), r"log_decay has shape \(2, 3, 4, 5\), expected .* = \(2, 3, 4, 4\)"),
        (dict(initial_state=(2, 4, 5, 4)), r"initial_state has shape \(2, 4, 5, 4\), expected .* = \(2, 4, 4, 5\)"),
        (dict(segment_ids=(3, 2)), r"segment_ids has shape \(3, 2\), expected .* = \(2, 3\)"),
        (dict(chunk_size=0), "chunk_size=0 must be a whole number of at least 1"),
        (dict(implementation="pallas"), "it runs on a TPU or a GPU, not on cpu, and interpret=True runs it here"),
        (dict(implementation="xla", interpret=True), "interpret=True modifies implementation='pallas' only"),
        (dict(implementation="triton"), "'triton' is none of auto, reference, xla, pallas"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refusals(change, message):
    shapes = dict(q=(2, 3, 2, 4), k=(2, 3, 2, 4), v=(2, 3, 4, 5), log_decay=(2, 3, 4))
    shapes |= {name: x for name, x in change.items() if isinstance(x, tuple)}
    options = {name: x for name, x in change.items() if not isinstance(x, tuple)}
    arrays = {n: jnp.zeros(s, jnp.int32 if n == "segment_ids" else jnp.float32) for n, s in shapes.items()}
    with pytest.raises(ValueError, match=message):
        linear_scan(**arrays, **options)
