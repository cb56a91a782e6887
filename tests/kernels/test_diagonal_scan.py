import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from hyjax.kernels import diagonal_scan
from tests.kernels import common

NAMES = ("h", "final_state", "dx", "dlog_decay", "dinitial_state")
KINDS = ("real", "complex")
WALKS = pytest.mark.parametrize("chunk_size", [None, 8], ids=["walk", "chunks"])


def make(seed, batch, time, dim, kind="real", dtype=np.float32):
    """Inputs (x, log_decay, initial_state) and cotangents (dh, dfinal [B, 1, D]), real or complex as pairs of reals.

    A pair is one array with a last dimension of 2, so that everything that is differentiated is real.
    """
    pair = (2,) if kind == "complex" else ()
    sequence, state = (batch, time, dim, *pair), (batch, 1, dim, *pair)
    x, s, dh, ds, phase = common.normal(seed, sequence, state, sequence, state, (batch, time, dim), dtype=dtype)
    g = common.gates(seed, (len(common.REGIMES), time, dim), dtype)[np.arange(batch) % len(common.REGIMES)]
    return (x, jnp.stack([g, 2 * phase], -1) if pair else g, s), (dh, ds)


def scan(x, g, s, **options):
    """diagonal_scan of arrays as `make` returns them."""
    if x.ndim == 3:
        h, final = diagonal_scan(x, g, initial_state=s[:, 0], **options)
        return h, final[:, None]
    pairs = lambda z: jnp.stack([z.real, z.imag], -1)
    h, final = diagonal_scan(*(to_complex(a) for a in (x, g)), initial_state=to_complex(s)[:, 0], **options)
    return pairs(h), pairs(final[:, None])


def to_complex(pair):
    return jax.lax.complex(pair[..., 0], pair[..., 1])


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
    """A readable id: B8-T63-D5-real."""
    return pytest.param(values, id="B{}-T{}-D{}-{}".format(*values))


CASES = [
    case(8, 1, 5, "real"),
    case(8, 2, 3, "complex"),
    case(8, 63, 5, "real"),
    case(8, 65, 1, "complex"),
    case(8, 100, 33, "real"),
]
SLOW_CASES = [
    case(8, time, dim, kind) for time in (1, 2, 3, 15, 64, 65, 127, 500, 1500) for dim in (1, 60, 130) for kind in KINDS
]


@pytest.mark.parametrize("shape", CASES)
def test_values_and_gradients_in_every_gate_regime(shape):
    agree(*make(0, *shape), (1, 32))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SLOW_CASES)
def test_values_and_gradients_over_the_grid(shape):
    reference, *others = agree(*make(1, *shape), (1, 16, 32, 64, 128))
    for i, name in enumerate(NAMES):
        a, *b = ((*values, *grads)[i] for values, grads in (reference, *others))
        print(f"{name}: largest ratio {max(common.ratio(a, x) for x in b):.1e}")


@pytest.mark.parametrize("kind", KINDS)
def test_documents_and_poisoned_padding(kind):
    time = 40
    inputs, cotangents = make(4, 8, time, 5, kind)
    ids = common.document_rows(time)
    inputs = (*(common.poisoned(a, ids) for a in inputs[:2]), inputs[2])
    results = forms(cotangents, inputs, (8,), segment_ids=ids)
    for out in results[1:]:
        common.assert_all_close(results[0], out, NAMES, common.FLOAT32, 2)
    padding = np.asarray(ids == 0)
    poisoned = forms((common.poisoned(cotangents[0], ids), cotangents[1]), inputs, (8,), segment_ids=ids)
    for (h, _), grads in (*results, *poisoned):
        for name, array in zip(("h", "dx", "dg"), (h, *grads[:2]), strict=True):
            assert not np.any(np.asarray(array)[padding]), f"{name} at padding is not exactly zero"
    (_, final), grads = results[2]
    np.testing.assert_array_equal(final[6], inputs[2][6])  # a row of padding hands its state on
    np.testing.assert_array_equal(grads[2][6], cotangents[1][6])


@WALKS
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_documents_alone(kind, chunk_size):
    lengths = (7, 1, 8, 0, 9)  # chunk - 1, 1, chunk, 0 and chunk + 1; starts mid-chunk and on a chunk's edge
    inputs, cotangents = make(5, 8, sum(lengths), 5, kind)
    ids = jnp.asarray(np.repeat(np.arange(1, 1 + len(lengths)), lengths)[None].repeat(8, 0))

    def alone(x, g, s):
        outputs, end = [], np.cumsum(lengths)
        for length, last in zip(lengths, end, strict=True):
            if length:
                piece = slice(last - length, last)
                h, s = scan(x[:, piece], g[:, piece], s, implementation="reference")
                outputs.append(h)
                final, s = s, jnp.zeros_like(s)
        return jnp.concatenate(outputs, axis=1), final

    packed = functools.partial(scan, segment_ids=ids, chunk_size=chunk_size)
    run = jax.jit(lambda *i: (common.everything(alone, cotangents, *i), common.everything(packed, cotangents, *i)))
    common.assert_all_close(*run(*inputs), NAMES, common.FLOAT32, 2)


@pytest.mark.parametrize("options", [dict(), dict(chunk_size=8), dict(implementation="reference")], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_knows_nothing_of_the_others(kind, options):
    time, mine = 40, slice(16, 27)  # document 2 starts on a chunk's edge and ends inside the next chunk
    inputs, (dh, ds) = make(6, 8, time, 5, kind)
    ids = jnp.asarray(1 + (np.arange(time) >= 16) + (np.arange(time) >= 27))[None].repeat(8, 0)
    dh = dh.at[:, :16].set(0).at[:, 27:].set(0)
    run = jax.jit(lambda *i: common.everything(functools.partial(scan, segment_ids=ids, **options), (dh, 0 * ds), *i))
    outside = np.ones(time, bool)
    outside[mine] = False
    changed = [a.at[:, outside].multiply(1.5).at[:, outside].add(-0.1) for a in inputs[:2]]
    (h, _), grads = run(*inputs)
    (h_changed, _), grads_changed = run(*changed, inputs[2] + 1)
    np.testing.assert_array_equal(h[:, mine], h_changed[:, mine])
    for name, a, b in zip(NAMES[2:4], grads[:2], grads_changed[:2], strict=True):
        np.testing.assert_array_equal(a[:, mine], b[:, mine], err_msg=name)
        assert not np.any(np.asarray(a)[:, outside]), f"{name} reaches another document"
    assert not np.any(np.asarray(grads[2])), "dinitial_state reaches from the second document"


EDGES = [[1], [17], list(range(1, 35))]
SLOW_EDGES = [[2], [3], [7], [8], [9], [34], [1, 4, 20, 33]]


@pytest.mark.parametrize("edges", [EDGES, pytest.param(SLOW_EDGES, marks=pytest.mark.slow)], ids=["few", "more"])
@WALKS
def test_any_split_equals_one_call(chunk_size, edges):
    time = 35
    (x, g, s), _ = make(7, 8, time, 5)
    ids = common.document_rows(time).at[:, 20:].set(1).at[:, :20].min(1)  # padding, and one document across each split
    run = jax.jit(functools.partial(diagonal_scan, chunk_size=chunk_size))
    whole = run(x, g, initial_state=s[:, 0], segment_ids=ids)

    def pieces(edges):
        state, outputs = s[:, 0], []
        for a, b in zip([0, *edges], [*edges, time], strict=True):
            h, state = run(x[:, a:b], g[:, a:b], initial_state=state, segment_ids=ids[:, a:b])
            outputs.append(h)
        return jnp.concatenate(outputs, axis=1), state

    for split in edges:
        for a, b, name in zip(whole, pieces(split), NAMES[:2], strict=True):
            common.assert_close(a, b, 1e-5, f"{name} split at {split}")


@WALKS
def test_half_precision(chunk_size):
    (x, g, s), cotangents = make(8, 8, 40, 5)
    rounded = x.astype(jnp.bfloat16)
    reference = jax.jit(
        lambda *i: common.everything(functools.partial(scan, implementation="reference"), cotangents, *i)
    )(rounded.astype(jnp.float32), g, s)
    run = functools.partial(scan, chunk_size=chunk_size)
    out = jax.jit(lambda *i: common.everything(run, cotangents, *i))(rounded, g, s)
    dtypes = [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.float32, jnp.float32]
    assert [a.dtype for a in (*out[0], *out[1])] == dtypes
    common.assert_all_close(reference, out, NAMES, common.HALF, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_float64_and_finite_differences(kind):
    with jax.enable_x64():
        inputs, cotangents = make(9, 8, 37, 5, kind, np.float64)
        agree(inputs, cotangents, tolerances=common.FLOAT64, segment_ids=common.document_rows(37))
        (x, g, s), _ = make(10, 1, 5, 2, kind, np.float64)
        ids = jnp.array([[1, 1, 0, 2, 2]])
        for chunk_size in (None, 2):
            run = functools.partial(scan, segment_ids=ids, chunk_size=chunk_size)
            check_grads(jax.jit(run), (x, -jnp.exp(g - 1), s), order=1, modes=("rev",), atol=1e-7, rtol=1e-7)


def test_one_complex_input_makes_all_complex():
    (x, g, s), _ = make(11, 8, 20, 3)
    turning = jax.lax.complex(g, jnp.ones_like(g))
    run = jax.jit(lambda x, g, s: diagonal_scan(x, g, initial_state=s))
    expected = run(x + 0j, turning, s[:, 0] + 0j)
    for out in (run(x, turning, s[:, 0]), jax.jit(diagonal_scan)(x.at[:, 0].add(jnp.exp(g[:, 0]) * 0), turning)):
        assert [a.dtype for a in out] == [jnp.complex64, jnp.complex64]
    for a, b in zip(expected, run(x, turning, s[:, 0]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_omitted_state_is_zero():
    (x, g, s), _ = make(12, 8, 20, 3)
    for a, b in zip(diagonal_scan(x, g), diagonal_scan(x, g, initial_state=0 * s[:, 0]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_is_saved_but_the_decays_and_the_outputs():
    (x, g, s), _ = make(13, 8, 64, 128)
    _, pullback = jax.vjp(lambda *i: diagonal_scan(*i, initial_state=s[:, 0]), x, g)
    assert sum(a.nbytes for a in jax.tree.leaves(pullback)) <= 2 * x.nbytes + s.nbytes
    loss = lambda x: jnp.sum(diagonal_scan(x, g)[0])
    assert "name=diagonal_scan_out" in str(jax.make_jaxpr(jax.grad(loss))(x))


# The walk keeps h; chunks keep h, dx and dg until they are cut to the row's length.
@pytest.mark.parametrize("chunk_size, factor", [(None, 1.05), (64, 3.2)], ids=["walk", "chunks"])
def test_temporary_memory_is_linear_in_time_with_a_small_factor(chunk_size, factor):
    batch, dim = 2, 128

    def temporary(time):
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(batch, time, dim)] * 3]
        run = jax.jit(lambda dh, *i: jax.vjp(lambda *i: diagonal_scan(*i, chunk_size=chunk_size)[0], *i)[1](dh))
        return run.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    for time in (512, 1024, 2048):
        assert temporary(time) <= factor * batch * time * dim * 4, f"{temporary(time)} bytes at T={time}"


def test_runs_under_shard_map_with_checks():
    (x, g, _), cotangents = make(14, 8, 20, 4)
    mesh = jax.make_mesh(
        (2, 2), ("data", "tensor"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    spec, ids = jax.sharding.PartitionSpec("data", None, "tensor"), common.document_rows(20)
    for chunk_size in (None, 8):
        # Zeros that are born inside vary over nothing; ids over the batch alone.
        run = lambda x, g, ids, c=chunk_size: scan(
            x, g, jnp.zeros((x.shape[0], 1, x.shape[2])), segment_ids=ids, chunk_size=c
        )
        specs = (spec, spec, jax.sharding.PartitionSpec("data"))
        sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=spec)
        out, expected = (
            jax.jit(lambda *i, f=f: common.everything(lambda x, g: f(x, g, ids), cotangents, *i))(x, g)
            for f in (sharded, run)
        )
        common.assert_all_close(expected, out, NAMES[:4], common.FLOAT32, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=(2, 3)), r"x has shape \(2, 3\), expected \[B, T, D\]"),
        (dict(x=(2, 0, 4), log_decay=(2, 0, 4)), r"x \(2, 0, 4\) needs T >= 1"),
        (dict(log_decay=(2, 3, 1)), r"log_decay has shape \(2, 3, 1\), expected .* = \(2, 3, 4\)"),
        (dict(initial_state=(2, 3)), r"initial_state has shape \(2, 3\), expected \[B, D\] = \(2, 4\)"),
        (dict(segment_ids=(3, 2)), r"segment_ids has shape \(3, 2\), expected .* = \(2, 3\)"),
        (dict(chunk_size=0), "chunk_size=0 must be a whole number of at least 1"),
        (dict(implementation="pallas"), "it runs on a TPU or a GPU, not on cpu, and interpret=True runs it here"),
        (dict(implementation="triton"), "'triton' is none of auto, reference, xla, pallas"),
    ],
    ids=lambda a: "-".join(a) if isinstance(a, dict) else "",
)
def test_refusals(change, message):
    shapes = dict(x=(2, 3, 4), log_decay=(2, 3, 4)) | {n: a for n, a in change.items() if isinstance(a, tuple)}
    options = {name: a for name, a in change.items() if not isinstance(a, tuple)}
    arrays = {n: jnp.zeros(s, jnp.int32 if n == "segment_ids" else jnp.float32) for n, s in shapes.items()}
    with pytest.raises(ValueError, match=message):
        diagonal_scan(**arrays, **options)


def test_refuses_integers():
    with pytest.raises(ValueError, match="x has dtype int32, expected a floating or complex dtype"):
        diagonal_scan(jnp.zeros((2, 3, 4), jnp.int32), jnp.zeros((2, 3, 4)))
