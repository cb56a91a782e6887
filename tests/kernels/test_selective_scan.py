import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from hyjax.kernels import selective_scan
from hyjax.kernels.selective_scan import block_sizes
from tests.kernels import common

NAMES = ("y", "final_state", "du", "ddelta", "dA", "dB", "dC", "dD", "dinitial_state")
TOKENS = (0, 1, 3, 4)  # u, delta, B, C: what has a time
WALKS = pytest.mark.parametrize("chunk_size", [None, 8], ids=["walk", "chunks"])


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Five tokens a block: rows and chunks of the tests then end inside one."""
    monkeypatch.setitem(block_sizes.SAVED, "cpu", 5)


def make(seed, batch, time, dim, states, dtype=np.float32):
    """Inputs (u, delta, A, B, C, D, initial_state) and cotangents (dy, dfinal)."""
    tokens, state = (batch, time, dim), (batch, dim, states)
    shapes = (tokens, (dim, states), (batch, time, states), (batch, time, states), (dim,), state, tokens, state)
    u, A, B, C, D, s, dy, ds = common.normal(seed, *shapes, dtype=dtype)
    delta = -common.gates(seed, (len(common.REGIMES), time, dim), dtype)[np.arange(batch) % len(common.REGIMES)]
    return (u, delta, -jnp.exp(A / 2), B, C, D, s), (dy, ds)


def scan(u, delta, A, B, C, D, s, **options):
    return selective_scan(u, delta, A, B, C, D, initial_state=s, **options)


def forms(cotangents, inputs, chunk_sizes, **options):
    """Reference, the walk over a row, and chunks side by side of each size, in one compilation."""
    kinds = [dict(implementation="reference"), dict(implementation="xla")]
    kinds += [dict(implementation="xla", chunk_size=c) for c in chunk_sizes]
    run = lambda *i: [common.everything(functools.partial(scan, **k, **options), cotangents, *i) for k in kinds]
    return jax.jit(run)(*inputs)


def agree(inputs, cotangents, chunk_sizes=(8,), tolerances=common.FLOAT32, **options):
    reference, *others = results = forms(cotangents, inputs, chunk_sizes, **options)
    for out in others:
        common.assert_all_close(reference, out, NAMES, tolerances, 2)
    return results


def case(*values):
    """A readable id: B8-T63-D5-N4."""
    return pytest.param(values, id="B{}-T{}-D{}-N{}".format(*values))


CASES = [case(8, 1, 5, 4), case(8, 2, 3, 1), case(8, 63, 1, 3), case(8, 100, 9, 4)]
SLOW_CASES = [
    case(8, time, dim, states)
    for time in (1, 2, 3, 15, 64, 65, 127, 500, 1500)
    for dim, states in ((1, 16), (60, 5), (130, 8))
]


@pytest.mark.parametrize("shape", CASES)
def test_values_and_gradients_in_every_regime(shape):
    agree(*make(0, *shape), (1, 32))


@pytest.mark.slow
@pytest.mark.parametrize("saved", [5, 32])
@pytest.mark.parametrize("shape", SLOW_CASES)
def test_values_and_gradients_over_the_grid(shape, saved, monkeypatch):
    monkeypatch.setitem(block_sizes.SAVED, "cpu", saved)
    reference, *others = agree(*make(1, *shape), (16, 32, 64, 128))
    for i, name in enumerate(NAMES):
        a, *b = ((*values, *grads)[i] for values, grads in (reference, *others))
        print(f"{name}: largest ratio {max(common.ratio(a, x) for x in b):.1e}")


def test_documents_and_poisoned_padding():
    time = 40
    inputs, cotangents = make(2, 8, time, 5, 3)
    ids = common.document_rows(time)
    inputs = [common.poisoned(x, ids) if i in TOKENS else x for i, x in enumerate(inputs)]
    results = forms(cotangents, inputs, (8,), segment_ids=ids)
    for out in results[1:]:
        common.assert_all_close(results[0], out, NAMES, common.FLOAT32, 2)
    poisoned = forms((common.poisoned(cotangents[0], ids), cotangents[1]), inputs, (8,), segment_ids=ids)
    for (y, final), grads in (*results, *poisoned):
        arrays = zip(("y", "du", "ddelta", "dB", "dC"), (y, *(grads[i] for i in TOKENS)), strict=True)
        for name, array in arrays:
            assert not np.any(np.asarray(array)[np.asarray(ids == 0)]), f"{name} at padding is not exactly zero"
        np.testing.assert_array_equal(final[6], inputs[6][6])  # a row of padding hands its state on
        np.testing.assert_array_equal(grads[6][6], cotangents[1][6])
        assert all(np.isfinite(g).all() for g in grads)


@WALKS
def test_packed_documents_equal_documents_alone(chunk_size):
    lengths = (7, 1, 8, 0, 9)  # chunk - 1, 1, chunk, 0 and chunk + 1; starts mid-chunk and on a chunk's edge
    inputs, cotangents = make(3, 8, sum(lengths), 5, 3)
    ids = jnp.asarray(np.repeat(np.arange(1, 1 + len(lengths)), lengths)[None].repeat(8, 0))

    def alone(u, delta, A, B, C, D, s):
        outputs, end = [], np.cumsum(lengths)
        for length, last in zip(lengths, end, strict=True):
            if length:
                ut, dt, bt, ct = (x[:, last - length : last] for x in (u, delta, B, C))
                y, s = scan(ut, dt, A, bt, ct, D, s, implementation="reference")
                outputs.append(y)
                final, s = s, jnp.zeros_like(s)
        return jnp.concatenate(outputs, axis=1), final

    packed = functools.partial(scan, segment_ids=ids, chunk_size=chunk_size)
    run = jax.jit(lambda *i: (common.everything(alone, cotangents, *i), common.everything(packed, cotangents, *i)))
    common.assert_all_close(*run(*inputs), NAMES, common.FLOAT32, 2)


@pytest.mark.parametrize("options", [dict(), dict(chunk_size=8), dict(implementation="reference")], ids=str)
def test_a_document_knows_nothing_of_the_others(options):
    time, mine = 40, slice(16, 27)  # document 2 starts on a chunk's edge and ends inside the next chunk
    inputs, (dy, ds) = make(4, 8, time, 5, 3)
    ids = jnp.asarray(1 + (np.arange(time) >= 16) + (np.arange(time) >= 27))[None].repeat(8, 0)
    dy = dy.at[:, :16].set(0).at[:, 27:].set(0)
    run = jax.jit(lambda *i: common.everything(functools.partial(scan, segment_ids=ids, **options), (dy, 0 * ds), *i))
    outside = np.ones(time, bool)
    outside[mine] = False
    changed = [x.at[:, outside].multiply(1.5) if i in TOKENS else x for i, x in enumerate(inputs)]
    (y, _), grads = run(*inputs)
    (y_changed, _), grads_changed = run(*changed[:6], inputs[6] + 1)
    np.testing.assert_array_equal(y[:, mine], y_changed[:, mine])
    for i, (name, a, b) in enumerate(zip(NAMES[2:], grads, grads_changed, strict=True)):
        if i in TOKENS:
            np.testing.assert_array_equal(a[:, mine], b[:, mine], err_msg=name)
            assert not np.any(np.asarray(a)[:, outside]), f"{name} reaches another document"
        else:  # the weights' gradients come from this document alone
            np.testing.assert_array_equal(a, b, err_msg=name)
    assert not np.any(np.asarray(grads[6])), "dinitial_state reaches from the second document"


EDGES = [[1], [17], list(range(1, 35))]
SLOW_EDGES = [[2], [3], [7], [8], [9], [34], [1, 4, 20, 33]]


@pytest.mark.parametrize("edges", [EDGES, pytest.param(SLOW_EDGES, marks=pytest.mark.slow)], ids=["few", "more"])
@WALKS
def test_any_split_equals_one_call(chunk_size, edges):
    time = 35
    (u, delta, A, B, C, D, s), _ = make(5, 8, time, 5, 3)
    ids = common.document_rows(time).at[:, 20:].set(1).at[:, :20].min(1)  # padding, and one document across each split

    @jax.jit
    def run(s, ids, u, delta, B, C):
        return scan(u, delta, A, B, C, D, s, segment_ids=ids, chunk_size=chunk_size)

    whole = run(s, ids, u, delta, B, C)

    def pieces(edges):
        state, outputs = s, []
        for a, b in zip([0, *edges], [*edges, time], strict=True):
            y, state = run(state, *(x[:, a:b] for x in (ids, u, delta, B, C)))
            outputs.append(y)
        return jnp.concatenate(outputs, axis=1), state

    for split in edges:
        for a, b, name in zip(whole, pieces(split), NAMES[:2], strict=True):
            common.assert_close(a, b, 1e-5, f"{name} split at {split}")


@WALKS
def test_half_precision(chunk_size):
    (u, delta, A, B, C, D, s), cotangents = make(6, 8, 40, 5, 3)
    rounded = [x.astype(jnp.bfloat16) for x in (u, B, C)]
    exact = [x.astype(jnp.float32) for x in rounded]
    both = lambda u, B, C: (u, delta, A, B, C, D, s)
    run = functools.partial(scan, chunk_size=chunk_size)
    reference = functools.partial(scan, implementation="reference")
    reference = jax.jit(lambda *i: common.everything(reference, cotangents, *i))(*both(*exact))
    out = jax.jit(lambda *i: common.everything(run, cotangents, *i))(*both(*rounded))
    half, full = jnp.bfloat16, jnp.float32
    assert [x.dtype for x in (*out[0], *out[1])] == [half, full, half, full, full, half, half, full, full]
    common.assert_all_close(reference, out, NAMES, common.HALF, 2)


def test_float64_and_finite_differences():
    with jax.enable_x64():
        inputs, cotangents = make(7, 8, 37, 5, 3, np.float64)
        agree(inputs, cotangents, tolerances=common.FLOAT64, segment_ids=common.document_rows(37))
        small, _ = make(8, 1, 5, 2, 2, np.float64)
        small = (small[0], jnp.abs(jnp.tanh(small[1])) + 0.1, *small[2:])
        ids = jnp.array([[1, 1, 0, 2, 2]])
        for chunk_size in (None, 2):
            run = functools.partial(scan, segment_ids=ids, chunk_size=chunk_size)
            check_grads(jax.jit(run), small, order=1, modes=("rev",), atol=1e-7, rtol=1e-7)


def test_omitted_state_is_zero():
    (*inputs, s), _ = make(9, 8, 20, 3, 2)
    for a, b in zip(selective_scan(*inputs), scan(*inputs, 0 * s), strict=True):
        np.testing.assert_array_equal(a, b)


def test_states_and_outputs_carry_names_for_remat_policies():
    (u, *weights, _), _ = make(10, 8, 20, 3, 2)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda u: jnp.sum(selective_scan(u, *weights)[0])))(u))
    assert "name=selective_scan_states" in jaxpr and "name=selective_scan_out" in jaxpr


# In blocks of 16 tokens a row saves a state in 16, and the backward pass holds 16 of its T states: 1/8 at T = 256.
# Chunks of 64 hold 16 of 64, a quarter; with a state of each chunk on its way in and out, less than a half.
@pytest.mark.parametrize("chunk_size, factor", [(None, 0.15), (64, 0.45)], ids=["walk", "chunks"])
def test_the_expanded_states_are_never_in_memory(chunk_size, factor, monkeypatch):
    monkeypatch.setitem(block_sizes.SAVED, "cpu", 16)
    batch, dim, states = 2, 64, 32

    def temporary(time, **options):
        inputs, cotangents = jax.eval_shape(lambda: make(0, batch, time, dim, states))
        run = jax.jit(lambda c, *i: jax.vjp(functools.partial(scan, **options), *i)[1](c))
        return run.lower(cotangents, *inputs).compile().memory_analysis().temp_size_in_bytes

    expanded = lambda time: batch * time * dim * states * 4
    sizes = {time: temporary(time, chunk_size=chunk_size) for time in (256, 1024)}
    assert all(size <= factor * expanded(time) for time, size in sizes.items()), sizes
    if chunk_size is None:
        assert temporary(256, implementation="reference") > expanded(256)  # what the bounds would catch


def test_runs_under_shard_map_with_checks():
    inputs, cotangents = make(11, 8, 20, 4, 3)
    devices, axes = jax.devices()[:4], (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=devices, axis_types=axes)
    P = jax.sharding.PartitionSpec
    channels, weight, shared = P("data", None, "tensor"), P("tensor"), P("data")  # B, C and ids know no channels
    ids = common.document_rows(20)
    specs = (channels, channels, weight, shared, shared, weight, shared)

    # Zeros that are born inside vary over nothing.
    def run(u, delta, A, B, C, D, ids, **options):
        return scan(u, delta, A, B, C, D, jnp.zeros((u.shape[0], *A.shape)), segment_ids=ids, **options)

    def results(function):
        return jax.jit(lambda *i: common.everything(lambda *i: function(*i, ids), cotangents, *i))(*inputs[:6])

    expected = results(functools.partial(run, implementation="reference"))
    for chunk_size in (None, 8):
        local = functools.partial(run, chunk_size=chunk_size)
        sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(channels, P("data", "tensor")))
        common.assert_all_close(expected, results(sharded), NAMES[:8], common.FLOAT32, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(u=(2, 3)), r"u has shape \(2, 3\), expected \[B, T, D\]"),
        (dict(A=(4,)), r"A has shape \(4,\), expected \[D, N\]"),
        (dict(A=(5, 4)), r"A has shape \(5, 4\), expected \[D, N\] with u's D = \(4, 4\)"),
        (dict(u=(2, 0, 4)), r"u \(2, 0, 4\) and A \(4, 5\) need T >= 1 and N >= 1"),
        (dict(delta=(2, 3, 1)), r"delta has shape \(2, 3, 1\), expected .* = \(2, 3, 4\)"),
        (dict(B=(2, 3, 4)), r"B has shape \(2, 3, 4\), expected .* = \(2, 3, 5\)"),
        (dict(C=(2, 4, 5)), r"C has shape \(2, 4, 5\), expected .* = \(2, 3, 5\)"),
        (dict(D=(5,)), r"D has shape \(5,\), expected .* = \(4,\)"),
        (dict(initial_state=(2, 5, 4)), r"initial_state has shape \(2, 5, 4\), expected .* = \(2, 4, 5\)"),
        (dict(segment_ids=(3, 2)), r"segment_ids has shape \(3, 2\), expected .* = \(2, 3\)"),
        (dict(chunk_size=0), "chunk_size=0 must be a whole number of at least 1"),
        (dict(implementation="pallas"), "it runs on a TPU or a GPU, not on cpu, and interpret=True runs it here"),
        (dict(implementation="triton"), "'triton' is none of auto, reference, xla, pallas"),
    ],
    ids=lambda a: "-".join(a) if isinstance(a, dict) else "",
)
def test_refusals(change, message):
    shapes = dict(u=(2, 3, 4), delta=(2, 3, 4), A=(4, 5), B=(2, 3, 5), C=(2, 3, 5), D=(4,))
    shapes |= {name: x for name, x in change.items() if isinstance(x, tuple)}
    options = {name: x for name, x in change.items() if not isinstance(x, tuple)}
    arrays = {n: jnp.zeros(s, jnp.int32 if n == "segment_ids" else jnp.float32) for n, s in shapes.items()}
    with pytest.raises(ValueError, match=message):
        selective_scan(**arrays, **options)


def test_refuses_a_complex_state_matrix():
    a, b = jnp.zeros((2, 3, 4)), jnp.zeros((2, 3, 5))
    with pytest.raises(ValueError, match="A has dtype complex64, expected a floating dtype"):
        selective_scan(a, a, jnp.zeros((4, 5), jnp.complex64), b, b, jnp.zeros(4))
