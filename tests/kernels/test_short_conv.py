import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from hyjax.kernels import short_conv
from tests.kernels import common

NAMES = ("y", "final_state", "dx", "dweight", "dbias", "dinitial_state")


def make(seed, batch, time, width, dim, dtype=np.float32):
    """Inputs (x, weight, bias, initial_state) and cotangents (dy, dfinal)."""
    shapes = ((batch, time, dim), (width, dim), (dim,), (batch, width - 1, dim))
    x, weight, bias, state, dy, ds = common.normal(seed, *shapes, shapes[0], shapes[3], dtype=dtype)
    return (x, weight, bias, state), (dy, ds)


def conv(x, weight, bias, state, **options):
    return short_conv(x, weight, bias, initial_state=state, **options)


def both(inputs, cotangents, **options):
    """Reference and xla in one compilation."""
    kinds = ("reference", "xla")
    run = lambda *i: [
        common.everything(functools.partial(conv, implementation=k, **options), cotangents, *i) for k in kinds
    ]
    return jax.jit(run)(*inputs)


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(
    "shape", [(8, 1, 4), (8, 2, 4), (8, 3, 4), (8, 20, 4), (8, 5, 1), (8, 1, 2)], ids=lambda s: "B{}-T{}-W{}".format(*s)
)
def test_values_and_gradients(shape, activation):
    inputs, cotangents = make(0, *shape, 5)
    reference, out = both(inputs, cotangents, activation=activation)
    common.assert_all_close(reference, out, NAMES, common.FLOAT32, 2)


@pytest.mark.parametrize("rows", ["padding between", "padding at the end"])
@pytest.mark.parametrize("width", [2, 4])
def test_documents_and_poisoned_padding(width, rows):
    time = 24
    (x, *rest), cotangents = make(1, 8, time, width, 5)
    ids = common.document_rows(time)
    if rows == "padding at the end":  # the path that moves nothing
        ids = jnp.sort(ids == 0, axis=1).astype(jnp.int32) ^ 1
        ids = ids * (1 + jnp.arange(time) // 5)
    x = common.poisoned(x, ids)
    reference, out = both((x, *rest), cotangents, segment_ids=ids)
    common.assert_all_close(reference, out, NAMES, common.FLOAT32, 2)
    padding = np.asarray(ids == 0)
    for (y, _), grads in (reference, out):
        assert not np.any(np.asarray(y)[padding]) and not np.any(np.asarray(grads[0])[padding])


def test_padding_is_as_if_absent():
    (x, weight, bias, state), _ = make(2, 1, 12, 4, 5)
    ids = jnp.array([[0, 1, 0, 0, 1, 1, 0, 2, 2, 0, 2, 0]])
    run = jax.jit(lambda x, ids: short_conv(x, weight, bias, initial_state=state, segment_ids=ids))
    y, final = run(x, ids)
    keep = np.asarray(ids[0] != 0)
    dense, dense_final = run(x[:, keep], ids[:, keep])
    np.testing.assert_array_equal(y[:, keep], dense)
    np.testing.assert_array_equal(final, dense_final)
    np.testing.assert_array_equal(final, x[:, [7, 8, 10]])


def test_final_state_of_a_young_document_is_zero_before_it():
    (x, weight, bias, state), _ = make(3, 3, 6, 4, 5)
    ids = jnp.array([[1, 1, 1, 2, 2, 0], [0, 0, 3, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    _, final = jax.jit(conv, static_argnames="activation")(x, weight, bias, state, segment_ids=ids)
    np.testing.assert_array_equal(final[0], jnp.stack([0 * x[0, 0], x[0, 3], x[0, 4]]))
    np.testing.assert_array_equal(final[1], jnp.stack([state[1, 1], state[1, 2], x[1, 2]]))
    np.testing.assert_array_equal(final[2], state[2])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_document_knows_nothing_of_the_others(implementation):
    time = 16
    (x, *rest), (dy, ds) = make(4, 2, time, 4, 5)
    ids = jnp.asarray(1 + (np.arange(time) >= 5) + (np.arange(time) >= 6) + (np.arange(time) >= 11))[None].repeat(2, 0)
    mine = np.asarray(ids[0] == 3)
    dy = dy.at[:, ~mine].set(0)
    run = functools.partial(conv, segment_ids=ids, implementation=implementation)
    run = jax.jit(lambda *i, run=run: common.everything(run, (dy, 0 * ds), *i))
    (y, _), grads = run(x, *rest)
    (changed, _), grads_changed = run(x.at[:, ~mine].multiply(3), *rest)
    np.testing.assert_array_equal(y[:, mine], changed[:, mine])
    np.testing.assert_array_equal(grads[0][:, mine], grads_changed[0][:, mine])
    assert not np.any(np.asarray(grads[0])[:, ~mine]) and not np.any(np.asarray(grads[3]))


@pytest.mark.parametrize("lengths", [(1,) * 7, (2, 2, 3), (3, 1, 3), (4, 3)], ids=str)
def test_chained_pieces_equal_one_call_with_gradients(lengths):
    inputs, cotangents = make(5, 8, 7, 4, 5)
    ids = jnp.asarray(np.array([[1, 1, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 1, 1]]).repeat(4, 0))

    def chained(x, weight, bias, state):
        outputs, start = [], 0
        for length in lengths:
            piece = slice(start, start + length)
            y, state = conv(x[:, piece], weight, bias, state, segment_ids=ids[:, piece])
            outputs.append(y)
            start += length
        return jnp.concatenate(outputs, axis=1), state

    whole = functools.partial(conv, segment_ids=ids)
    run = jax.jit(lambda *i: [common.everything(f, cotangents, *i) for f in (whole, chained)])
    common.assert_all_close(*run(*inputs), NAMES, (1e-5, 1e-5), 2)


def test_half_precision():
    (x, weight, bias, state), cotangents = make(6, 8, 20, 4, 5)
    half = x.astype(jnp.bfloat16)
    reference, _ = both((half.astype(jnp.float32), weight, bias, state), cotangents)
    out = jax.jit(lambda *i: common.everything(conv, cotangents, *i))(half, weight, bias, state)
    assert [a.dtype for a in (*out[0], *out[1][:2])] == [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.float32]
    common.assert_all_close(reference, out, NAMES, common.HALF, 2)
    assert short_conv(half, weight)[1].dtype == jnp.bfloat16  # the state holds inputs


def test_float64_and_finite_differences():
    with jax.enable_x64():
        inputs, cotangents = make(7, 8, 20, 4, 5, np.float64)
        reference, out = both(inputs, cotangents, segment_ids=common.document_rows(20))
        common.assert_all_close(reference, out, NAMES, common.FLOAT64, 2)
        small, _ = make(8, 1, 5, 3, 2, np.float64)
        run = functools.partial(conv, segment_ids=jnp.array([[1, 0, 1, 2, 2]]))
        check_grads(jax.jit(run), small, order=1, modes=("rev",), atol=1e-7, rtol=1e-7)


def test_without_bias_and_state():
    (x, weight, bias, state), _ = make(9, 2, 6, 4, 5)
    a = short_conv(x, weight)
    b = short_conv(x, weight, 0 * bias, initial_state=0 * state)
    common.assert_close(a[0], b[0], 1e-6)
    common.assert_close(a[0], short_conv(x, weight, implementation="reference")[0], 1e-6)
    np.testing.assert_array_equal(a[1], b[1])


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(weight=(4, 6)), r"weight has shape \(4, 6\), expected .* = \(4, 5\)"),
        (dict(bias=(4,)), r"bias has shape \(4,\), expected \[D\] = \(5,\)"),
        (dict(initial_state=(2, 4, 5)), r"initial_state has shape \(2, 4, 5\), expected .* = \(2, 3, 5\)"),
        (dict(segment_ids=(2, 4)), r"segment_ids has shape \(2, 4\), expected .* = \(2, 3\)"),
        (dict(activation="gelu"), "activation='gelu' is neither 'silu' nor None"),
        (dict(implementation="pallas"), "no Pallas kernel serves this operator"),
        (dict(interpret=True), "interpret=True modifies implementation='pallas' only"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refusals(change, message):
    shapes = dict(x=(2, 3, 5), weight=(4, 5)) | {name: x for name, x in change.items() if isinstance(x, tuple)}
    options = {name: x for name, x in change.items() if not isinstance(x, tuple)}
    arrays = {n: jnp.zeros(s, jnp.int32 if n == "segment_ids" else jnp.float32) for n, s in shapes.items()}
    with pytest.raises(ValueError, match=message):
        short_conv(**arrays, **options)
