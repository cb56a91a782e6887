import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from hyjax.kernels import delta_scan, dispatch
from hyjax.kernels.delta_scan import block_sizes
from hyjax.kernels.delta_scan.triangular import inverse
from tests.kernels import common

NAMES = ("o", "final_state", "dq", "dk", "dv", "dbeta", "dlog_decay", "dinitial_state")
GATES = ("none", "head", "channel")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # compiling is what takes time here


def betas(seed, batch, time, heads):
    """[batch, time, heads], a row of its own kind beside each of common.REGIMES."""
    spread = np.random.default_rng(seed).uniform(size=(batch, time, heads))
    zero, some = 0 * spread, np.round(2 * spread)  # some: 0, 1 or 2
    kinds = [2 * spread, some, spread, zero + 2, zero, 2 * spread, spread, zero + 1]
    return np.choose(np.arange(batch)[:, None, None] % len(kinds), kinds)


def unit(x):
    """Rows of length 1: what the layers make of q and k."""
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def make(seed, batch, time, heads, value_heads, key_dim, value_dim, gate, dtype=np.float32):
    """Inputs (q, k, v, beta, log_decay, initial_state) and cotangents (do, dfinal). Gate "none" is a decay of zero."""
    state = (batch, value_heads, key_dim, value_dim)
    key, value = (batch, time, heads, key_dim), (batch, time, value_heads, value_dim)
    q, k, v, s, do, ds = common.normal(seed, key, key, value, state, value, state, dtype=dtype)
    q, k = unit(q).at[:, 5::11].set(0), unit(k).at[:, 3::7].set(0)  # rows of zeros are legal
    shape = (len(common.REGIMES), time, value_heads) + ((key_dim,) if gate == "channel" else ())
    g = common.gates(seed, shape, dtype)[np.arange(batch) % len(common.REGIMES)] * (gate != "none")
    return (q, k, v, jnp.asarray(betas(seed, batch, time, value_heads), dtype), g, s), (do, ds)


def scan(q, k, v, beta, g, s, gate="head", **options):
    return delta_scan(q, k, v, beta, None if gate == "none" else g, initial_state=s, **options)


def agree(inputs, cotangents, *chunk_sizes, tolerances=common.FLOAT32, **options):
    """Holds every chunk size against the reference (None: the table's choice, the walk over tokens where it serves)."""
    kinds = [dict(implementation="reference"), *(dict(chunk_size=c) for c in chunk_sizes)]
    run = lambda *i: [common.everything(functools.partial(scan, **k, **options), cotangents, *i) for k in kinds]
    reference, *results = jax.jit(run)(*inputs)
    for out in results:
        common.assert_all_close(reference, out, NAMES, tolerances, 2)
    return reference, *results


def case(*values):
    """A readable id: B8-T63-H1-HV2-K5-V7-head."""
    letters = ("B", "T", "H", "HV", "K", "V", "")
    return pytest.param(values, id="-".join(f"{a}{b}" for a, b in zip(letters, values, strict=True)))


CASES = [
    case(8, 1, 2, 4, 5, 7, "head"),
    case(8, 63, 1, 2, 5, 7, "head"),
    case(8, 65, 2, 4, 7, 5, "channel"),
]
SLOW_CASES = [
    case(8, time, 2, 2 * groups, key, value, gate)
    for time in (1, 2, 15, 64, 100, 500)
    for groups, key, value in ((1, 60, 64), (2, 17, 33), (4, 8, 8))
    for gate in GATES
]


@pytest.mark.parametrize("shape", CASES)
def test_values_and_gradients_in_every_gate_regime(shape):
    inputs, cotangents = make(0, *shape)
    reference, *results = agree(inputs, cotangents, None, 64 if shape[1] > 64 else 16, gate=shape[-1])
    # A gate of -50 beside gates near 0 has a gradient of 1e-22; a total minus a prefix leaves rounding errors, 1e-7.
    row = common.REGIMES.index("mixed")
    strong = np.asarray(inputs[4][row] == -50)
    expected = np.asarray(reference[1][4][row], np.float64)[strong]
    for _, grads in results:
        error = np.asarray(grads[4][row], np.float64)[strong] - expected
        assert np.linalg.norm(error) <= 1e-4 * np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SLOW_CASES)
def test_values_and_gradients_over_the_grid(shape):
    inputs, cotangents = make(1, *shape)
    reference, *others = agree(inputs, cotangents, None, 16, 64, 128, gate=shape[-1])
    flat = [(*outputs, *grads) for outputs, grads in (reference, *others)]
    worst = {n: max(common.ratio(flat[0][i], out[i]) for out in flat[1:]) for i, n in enumerate(NAMES)}
    print("largest errors:", " ".join(f"{name} {value:.1e}" for name, value in worst.items()))


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_chunk_of_64_with_strong_decay_is_finite_and_right(gate):
    # Pairs reach a decay of 63 * -50 = -3150: a form that masks after exp, or divides by a decay, is not finite here.
    inputs, cotangents = make(2, 8, 70, 1, 1, 4, 4, gate)
    agree(inputs, cotangents, 64, gate=gate)


@pytest.mark.parametrize("gate, x64", [("none", False), slow("none", True), slow("head", True), slow("channel", True)])
def test_identical_keys_without_decay_at_chunk_64(gate, x64):
    # (I + L)^-1 of a lower triangle of ones: a power series of L has terms of 4e17.
    dtype = np.float64 if x64 else np.float32
    with jax.enable_x64(x64):
        (q, k, v, beta, g, s), cotangents = make(15, 8, 130, 1, 1, 16, 16, gate, dtype)
        key = unit(k[:, :1])
        k = jnp.where(jnp.arange(8)[:, None, None, None] % 2, key, unit(k + 2 * key))  # the same, and much alike
        beta = beta.at[1].set(1).at[3].set(2 if x64 else 1.5).at[5].set(0.5)
        tolerances = common.FLOAT64 if x64 else common.FLOAT32
        agree((q, k, v, beta, 0 * g, s), cotangents, 64, tolerances=tolerances, gate=gate)


@pytest.mark.parametrize("size", [1, 8, 64, 128])
def test_inverse_of_a_triangle_of_ones_is_exact(size):
    found = jax.jit(inverse)(jnp.ones((3, size, size)))  # what stands on and above the diagonal isn't read
    np.testing.assert_array_equal(found, np.broadcast_to(np.eye(size) - np.eye(size, k=-1), found.shape))


@pytest.mark.parametrize("gate", ["head", slow("channel")])
def test_pieces_of_chunks_agree_with_the_reference(gate, monkeypatch):
    monkeypatch.setitem(block_sizes.PIECE, "cpu", 1)  # a piece a chunk
    inputs, cotangents = make(3, 8, 50, 1, 2, 4, 3, gate)
    agree(inputs, cotangents, 8)


@pytest.mark.parametrize("gate", [slow("none"), slow("head"), "channel"])
def test_documents_and_poisoned_padding(gate):
    time = 36
    inputs, cotangents = make(4, 8, time, 1, 2, 4, 5, gate)
    ids = common.document_rows(time)
    inputs = (*(common.poisoned(x, ids) for x in inputs[:5]), inputs[5])
    results = agree(inputs, cotangents, None, 8, segment_ids=ids, gate=gate)
    padding = np.asarray(ids == 0)
    for (o, final), grads in results:
        for name, array in zip(("o", *NAMES[2:7]), (o, *grads[:5]), strict=True):
            assert not np.any(np.asarray(array)[padding]), f"{name} at padding is not exactly zero"
        np.testing.assert_array_equal(final[6], inputs[5][6])  # a row of padding hands its state on
        np.testing.assert_array_equal(grads[5][6], cotangents[1][6])


OPTIONS = [dict(implementation="reference"), slow(dict()), slow(dict(chunk_size=16))]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("gate", ["none", slow("channel")])
def test_packed_documents_equal_documents_alone(gate, options):
    lengths = (5, 1, 10, 16)  # a start mid-chunk, a document of one token, a start on a chunk's edge
    inputs, cotangents = make(5, 8, sum(lengths), 1, 2, 4, 5, gate)
    ids = jnp.asarray(np.repeat(np.arange(1, 5), lengths)[None].repeat(8, 0))

    def alone(*inputs):
        *inputs, s = inputs
        outputs, end = [], np.cumsum(lengths)
        for length, last in zip(lengths, end, strict=True):
            piece = [x[:, last - length : last] for x in inputs]
            o, s = scan(*piece, s, gate=gate, implementation="reference")
            outputs.append(o)
            final, s = s, jnp.zeros_like(s)
        return jnp.concatenate(outputs, axis=1), final

    packed = functools.partial(scan, gate=gate, segment_ids=ids, **options)
    run = jax.jit(lambda *i: (common.everything(alone, cotangents, *i), common.everything(packed, cotangents, *i)))
    common.assert_all_close(*run(*inputs), NAMES, common.FLOAT32, 2)


ALL_OPTIONS = [("channel", dict()), ("head", dict(chunk_size=8)), ("none", dict(implementation="reference"))]
MORE_OPTIONS = [(g, o) for g in GATES for o in (dict(), dict(chunk_size=16), dict(implementation="reference"))]


@pytest.mark.parametrize("gate, options", ALL_OPTIONS + [slow(*o) for o in MORE_OPTIONS], ids=str)
def test_a_document_knows_nothing_of_the_others(gate, options):
    time, mine = 40, slice(16, 23)  # document 2 of row 0 starts on a chunk's edge and ends inside the chunk
    inputs, (do, ds) = make(6, 8, time, 1, 2, 4, 5, gate)
    ids = jnp.asarray(1 + (np.arange(time) >= 16) + (np.arange(time) >= 23))[None].repeat(8, 0)
    do = do.at[:, :16].set(0).at[:, 23:].set(0)
    packed = functools.partial(scan, gate=gate, segment_ids=ids, **options)
    run = jax.jit(lambda *i: common.everything(packed, (do, 0 * ds), *i))
    outside = np.ones(time, bool)
    outside[mine] = False
    changed = [x.at[:, outside].multiply(1.1).at[:, outside].add(-0.05) for x in inputs[:5]]
    (o, _), grads = run(*inputs)
    (o_changed, _), grads_changed = run(*changed, inputs[5] + 1)
    np.testing.assert_array_equal(o[:, mine], o_changed[:, mine])
    for name, a, b in zip(NAMES[2:7], grads[:5], grads_changed[:5], strict=True):
        np.testing.assert_array_equal(a[:, mine], b[:, mine], err_msg=name)
        assert not np.any(np.asarray(a)[:, outside]), f"{name} reaches another document"
    assert not np.any(np.asarray(grads[5])), "dinitial_state reaches from the second document"


EDGES = [[17], list(range(1, 35))]
SLOW_EDGES = [[1], [2], [3], [7], [8], [9], [34], [1, 4, 20, 33]]


@pytest.mark.parametrize("edges", [EDGES, slow(SLOW_EDGES)], ids=["few", "more"])
@pytest.mark.parametrize("chunk_size", [slow(None), 8], ids=["walk", "chunks"])
@pytest.mark.parametrize("gate", [slow("none"), "channel"])
def test_any_split_equals_one_call(gate, chunk_size, edges):
    time = 35
    inputs, _ = make(7, 8, time, 1, 2, 4, 5, gate)
    ids = common.document_rows(time).at[:, 20:].set(1).at[:, :20].min(1)  # padding, and one document across each split
    run = jax.jit(functools.partial(scan, gate=gate, chunk_size=chunk_size))
    whole = run(*inputs, segment_ids=ids)

    def pieces(edges):
        state, outputs = inputs[5], []
        for a, b in zip([0, *edges], [*edges, time], strict=True):
            o, state = run(*(x[:, a:b] for x in inputs[:5]), state, segment_ids=ids[:, a:b])
            outputs.append(o)
        return jnp.concatenate(outputs, axis=1), state

    for split in edges:
        for a, b, name in zip(whole, pieces(split), NAMES[:2], strict=True):
            common.assert_close(a, b, 1e-5, f"{name} split at {split}")


HALVES = [("head", 8), slow("head", None), slow("channel", None), slow("channel", 64)]


@pytest.mark.parametrize("gate, chunk_size", HALVES)
def test_half_precision(gate, chunk_size):
    inputs, cotangents = make(8, 8, 40, 1, 2, 4, 5, gate)
    rounded = [x.astype(jnp.bfloat16) for x in inputs[:4]]
    exact = [x.astype(jnp.float32) for x in rounded]

    def run(rounded, exact, rest):
        reference = functools.partial(scan, implementation="reference")
        half = functools.partial(scan, chunk_size=chunk_size)
        both = (reference, exact), (half, rounded)
        return [common.everything(function, cotangents, *inputs, *rest) for function, inputs in both]

    reference, out = jax.jit(run)(rounded, exact, inputs[4:])
    kinds = [jnp.bfloat16, jnp.float32, *4 * [jnp.bfloat16], jnp.float32, jnp.float32]
    assert [x.dtype for x in (*out[0], *out[1])] == kinds
    common.assert_all_close(reference, out, NAMES, common.HALF, 2)


@pytest.mark.parametrize("gate", [slow("none"), slow("head"), "channel"])
@pytest.mark.parametrize("chunk_size", [slow(None), 8, slow(64)])
def test_float64_and_finite_differences(gate, chunk_size):
    with jax.enable_x64():
        inputs, cotangents = make(9, 8, 37, 1, 2, 4, 5, gate, np.float64)
        options = dict(segment_ids=common.document_rows(37), gate=gate)
        agree(inputs, cotangents, chunk_size, tolerances=common.FLOAT64, **options)
        small, _ = make(10, 2, 5, 1, 2, 2, 2, gate, np.float64)
        small = (*small[:4], -jnp.exp(small[4] - 1), small[5])
        options = dict(segment_ids=jnp.array([[1, 1, 1, 1, 1], [1, 1, 0, 2, 2]]), gate=gate)
        run = functools.partial(scan, chunk_size=chunk_size and 4, **options)
        check_grads(jax.jit(run), small, order=1, modes=("rev",), atol=1e-7, rtol=1e-7)


def test_scale_and_omitted_arguments():
    (q, k, v, beta, g, s), _ = make(11, 8, 20, 1, 2, 4, 5, "head")
    full = dict(log_decay=0 * g, scale=4**-0.5 / 3, initial_state=0 * s)
    run = jax.jit(lambda q: (delta_scan(q, k, v, beta), delta_scan(q * 3, k, v, beta, **full)))
    for a, b in zip(*run(q), strict=True):
        common.assert_close(a, b, 1e-6)


def test_states_carry_a_name_for_remat_policies():
    (q, k, v, beta, g, _), _ = make(12, 8, 20, 1, 2, 4, 5, "head")
    loss = lambda q: jnp.sum(delta_scan(q, k, v, beta, g)[0])
    assert "name=delta_scan_states" in str(jax.make_jaxpr(jax.grad(loss))(q))


SHARDED = [("none", 4), slow("channel", 4), slow("head", None), slow("channel", None)]


@pytest.mark.parametrize("gate, chunk_size", SHARDED)
def test_runs_under_shard_map_with_checks(gate, chunk_size):
    (*inputs, _), cotangents = make(13, 8, 10, 1, 2, 4, 5, gate)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    run = lambda *i: scan(*i, None, gate=gate, chunk_size=chunk_size)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    both = (jax.jit(functools.partial(common.everything, f, cotangents))(*inputs) for f in (run, sharded))
    common.assert_all_close(*both, NAMES[:7], common.FLOAT32, 2)


@pytest.mark.parametrize("gate", [slow("none"), slow("head"), "channel"])
def test_vmap_equals_calls_one_by_one(gate):
    # XLA aborts on a CPU at products of arrays of eight dimensions; vmap adds one to those of the operator.
    (*inputs, s), cotangents = make(17, 2, 8, 1, 2, 4, 5, gate)
    everything = functools.partial(common.everything, functools.partial(scan, s=s, gate=gate, chunk_size=4), cotangents)
    batch = [jnp.stack([x, 0.9 * x]) for x in inputs]
    one_by_one = lambda batch: jax.lax.map(lambda i: everything(*i), batch)
    results = jax.jit(lambda *batch: (one_by_one(batch), jax.vmap(everything)(*batch)))(*batch)
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        common.assert_close(a, b, 1e-5)


@pytest.mark.parametrize("gate", ["head", slow("none"), slow("channel")])
def test_temporary_memory_grows_with_time_and_not_faster(gate):
    def temporary(time, implementation="auto"):
        floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        key, head = floats(1, time, 8, 64), floats(1, time, 8)
        run = functools.partial(scan, implementation=implementation, gate=gate)
        loss = lambda *i: sum(jnp.sum(x) for x in run(*i))
        inputs = (key, key, key, head, key if gate == "channel" else head, floats(1, 8, 64, 64))
        compiled = jax.jit(jax.grad(loss, tuple(range(6)))).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    sizes = [temporary(time) for time in (1024, 2048, 4096, 8192)]
    growth = np.diff(sizes) / (1024, 2048, 4096)  # bytes a token
    assert np.ptp(growth) < 0.1 * growth[0], sizes
    assert sizes[-1] < temporary(8192, "reference") / 10, sizes  # which keeps a state a token


def test_auto_takes_xla_and_says_so_once(caplog, monkeypatch):
    (q, k, v, beta, _, _), _ = make(14, 8, 3, 1, 1, 2, 2, "none")
    monkeypatch.setattr(dispatch, "_logged", set())
    with caplog.at_level(logging.INFO, "hyjax.kernels"):
        for _ in range(2):
            jax.eval_shape(delta_scan, q, k, v, beta)
    assert [r.getMessage() for r in caplog.records] == ["delta_scan: implementation 'auto' is 'xla' on cpu"]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=(2, 3, 2, 5)), r"q has shape \(2, 3, 2, 5\), expected .* = \(2, 3, 2, 4\)"),
        (dict(v=(2, 3, 3, 5)), r"\(2, 3, 3, 5\) need T, K >= 1 and HV a multiple of H"),
        (dict(beta=(2, 3, 2)), r"beta has shape \(2, 3, 2\), expected .* = \(2, 3, 4\)"),
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
    shapes = dict(q=(2, 3, 2, 4), k=(2, 3, 2, 4), v=(2, 3, 4, 5), beta=(2, 3, 4))
    shapes |= {name: x for name, x in change.items() if isinstance(x, tuple)}
    options = {name: x for name, x in change.items() if not isinstance(x, tuple)}
    arrays = {n: jnp.zeros(s, jnp.int32 if n == "segment_ids" else jnp.float32) for n, s in shapes.items()}
    with pytest.raises(ValueError, match=message):
        delta_scan(**arrays, **options)
