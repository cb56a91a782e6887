import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from hyjax.kernels import attention
from hyjax.kernels.attention import block_sizes, xla
from tests.kernels import common

NAMES = ("o", "dq", "dk", "dv", "dsinks")
EVERY_FORM = ("reference", "dense", "blocks")


def make(seed, batch, q_len, kv_len, heads, kv_heads, key_dim=5, value_dim=7, dtype=np.float32):
    """Inputs (q, k, v, sinks) and the cotangent (do,)."""
    key, value = (batch, kv_len, kv_heads, key_dim), (batch, kv_len, kv_heads, value_dim)
    shapes = ((batch, q_len, heads, key_dim), key, value, (heads,), (batch, q_len, heads, value_dim))
    *inputs, do = common.normal(seed, *shapes, dtype=dtype)
    return tuple(inputs), (do,)


def attend(q, k, v, sinks=None, **options):
    return (attention(q, k, v, sinks=sinks, **options),)


@pytest.fixture
def form(monkeypatch):
    """Make the tables choose a form, with blocks so small that a short row has several."""

    def choose(name, queries=8, keys=16):
        sizes = {"dense": (1 << 62, 0), "row": (0, 1), "blocks": (0, 0), "reference": (0, 0)}[name]
        monkeypatch.setitem(block_sizes.DENSE_LOGITS, "cpu", sizes[0])
        monkeypatch.setitem(block_sizes.ROW_QUERIES, "cpu", sizes[1])
        monkeypatch.setattr(block_sizes, "DENSE_QUERIES", 0)
        monkeypatch.setitem(block_sizes.BLOCKS, "cpu", ((1 << 62, queries, keys),))
        return "reference" if name == "reference" else "xla"

    return choose


def run_forms(form, inputs, cotangents, forms=EVERY_FORM, **options):
    """Outputs and gradients of each form, in one compilation."""

    def run(*inputs):
        results = []
        for name in forms:
            function = functools.partial(attend, implementation=form(name), **options)
            results.append(common.everything(function, cotangents, *inputs))
        return results

    return jax.jit(run)(*inputs)


def agree(form, inputs, cotangents, forms=EVERY_FORM, tolerances=common.FLOAT32, **options):
    reference, *others = run_forms(form, inputs, cotangents, forms, **options)
    for out in others:
        common.assert_all_close(reference, out, NAMES[: 1 + len(inputs)], tolerances, 1)
    return reference, *others


def positions(seed, batch, q_len, kv_len):
    """Keys in an order of their own in each row, as in a ring cache; queries at the end."""
    rng = np.random.default_rng(seed)
    keys = np.stack([rng.permutation(kv_len) for _ in range(batch)])
    queries = np.broadcast_to(np.arange(kv_len - q_len, kv_len), (batch, q_len))
    return dict(q_positions=jnp.asarray(queries), kv_positions=jnp.asarray(keys))


CASES = {
    "B2-Tq33-Tk33-H4-Hk2": ((2, 33, 33, 4, 2), dict()),
    "B2-Tq1-Tk1-H2-Hk2": ((2, 1, 1, 2, 2), dict()),
    "B2-Tq33-Tk33-H4-Hk1-window5-sinks": ((2, 33, 33, 4, 1), dict(window=5)),
    "B2-Tq5-Tk40-H4-Hk2-window9": ((2, 5, 40, 4, 2), dict(window=9)),
    "B2-Tq40-Tk33-H4-Hk4-window9-soft_cap": ((2, 40, 33, 4, 4), dict(window=9, soft_cap=1.5)),
    "B2-Tq40-Tk21-H4-Hk4-full-sinks": ((2, 40, 21, 4, 4), dict(causal=False)),
    "B2-Tq17-Tk40-H4-Hk2-positions-soft_cap-sinks": (
        (2, 17, 40, 4, 2),
        dict(window=11, soft_cap=2.0, by_position=True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, form):
    shape, options = CASES[name]
    options = dict(options)
    inputs, cotangents = make(0, *shape)
    if options.pop("by_position", False):
        options |= positions(0, *shape[:3])
    agree(form, inputs if "sinks" in name else inputs[:3], cotangents, **options)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 63, 65, 127, 128, 129, 192])
@pytest.mark.parametrize("keys", [1, 63, 129, 200])
def test_ragged_lengths_at_the_blocks_edges(length, keys, form):
    inputs, cotangents = make(1, 2, length, keys, 4, 2, 60, 33)
    block = functools.partial(form, queries=128, keys=128)
    first = agree(block, inputs[:3], cotangents, ("reference", "blocks"), window=70)
    again = agree(block, inputs[:3], cotangents, ("reference", "blocks"), window=70)
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.parametrize("kind", ["in order", "by position"])
def test_documents_and_poisoned_padding(kind, form):
    time = 40
    (q, k, v, sinks), cotangents = make(2, 8, time, time, 4, 2)
    ids = common.document_rows(time)
    options = positions(2, 8, time, time) if kind == "by position" else dict(window=9)
    q, k, v = (common.poisoned(x, ids) for x in (q, k, v))
    results = agree(form, (q, k, v, sinks), cotangents, segment_ids=ids, **options)
    padding = np.asarray(ids == 0)
    for (o,), grads in results:
        for name, array in zip(("o", "dq", "dk", "dv"), (o, *grads[:3]), strict=True):
            assert not np.any(np.asarray(array)[padding]), f"{name} at padding is not exactly zero"


def test_equals_softmax_with_the_mask_written_out(form):
    time = 24
    (q, k, v, _), cotangents = make(3, 2, time, time, 2, 2)
    ids = jnp.asarray([[1] * 7 + [2] * 10 + [0] * 7, [3] * 24])
    i, j = np.arange(time)[:, None], np.arange(time)
    mask = (ids[:, :, None] == ids[:, None]) & (ids[:, None] != 0) & (j <= i) & (j > i - 6)

    def written_out(q, k, v):
        logits = jnp.einsum("bihd,bjhd->bhij", q, k) * 5**-0.5
        logits = jnp.where(mask[:, None], logits, -1e30)
        p = jnp.where(mask[:, None], jax.nn.softmax(logits, -1), 0)
        return (jnp.einsum("bhij,bjhd->bihd", p, v),)

    expected = jax.jit(lambda *i: common.everything(written_out, cotangents, *i))(q, k, v)
    for out in run_forms(form, (q, k, v), cotangents, segment_ids=ids, window=6):
        common.assert_all_close(expected, out, NAMES[:4], common.FLOAT32, 1)


@pytest.mark.parametrize("window", [1, 2, 16, 17, None])
def test_window_is_exactly_the_last_w_tokens(window, form):
    time, queries = 40, 20
    q, k = jnp.ones((1, queries, 1, 2)), jnp.ones((1, time, 1, 2))
    one_hot = jnp.eye(time)[None, :, None]  # the output shows which keys were read
    place = np.arange(time - queries, time)[:, None]
    expected = (np.arange(time) <= place) & (np.arange(time) > place - (window or time))
    ring = jnp.roll(jnp.arange(time), 13)[None]  # a ring cache isn't in time order

    def read(name):
        call = functools.partial(attention, window=window, implementation=form(name))
        in_ring = call(q, k, one_hot[:, ring[0]], q_positions=jnp.asarray(place.T), kv_positions=ring)
        return call(q, k, one_hot), in_ring

    def decode(i):
        form("row")
        return attention(q[:, :1], k, one_hot[:, ring[0]], window=window, q_positions=i[None, None], kv_positions=ring)[
            0
        ]

    whole, rows = jax.jit(lambda: ([read(n) for n in EVERY_FORM], jax.lax.map(decode, jnp.asarray(place[:, 0]))))()
    for o in [x[0, :, 0] for pair in whole for x in pair] + [rows[:, 0, 0]]:
        np.testing.assert_array_equal(np.asarray(o) > 0, expected)
        np.testing.assert_allclose(np.sum(o, -1), 1, rtol=1e-5)


def test_one_query_against_a_cache(form):
    inputs, cotangents = make(4, 8, 1, 40, 4, 2)
    ids = common.document_rows(40)
    places = positions(4, 8, 1, 40) | dict(segment_ids=jnp.ones((8, 1), jnp.int32), kv_segment_ids=ids)
    inputs = (inputs[0], *(common.poisoned(x, ids) for x in inputs[1:3]), inputs[3])
    agree(form, inputs, cotangents, (*EVERY_FORM, "row"), window=30, soft_cap=2.0, **places)


def test_rows_that_see_nothing_and_rows_of_very_negative_logits(form):
    (q, k, v, sinks), cotangents = make(5, 2, 24, 16, 2, 2, 4, 4)
    k = k.at[:, :, :, 0].set(1)
    q = jnp.zeros_like(q).at[0, :, :, 0].set(-2e5).at[1].set(q[1])  # row 0: logits of -1e5, all alike
    for options in (dict(), dict(window=3), dict(sinks=sinks)):
        for (o,), grads in run_forms(form, (q, k, v), cotangents, **options):
            assert np.all(np.isfinite(o)) and all(np.all(np.isfinite(g)) for g in grads)
            assert not np.any(np.asarray(o)[:, :8]) and not np.any(np.asarray(grads[0])[:, :8])  # Tq - Tk = 8
            if not options:
                common.assert_close(jnp.cumsum(v[0], 0) / jnp.arange(1, 17)[:, None, None], o[0, 8:], 1e-4)
    # jax.nn.dot_product_attention answers the mean of v for a row without keys; ours is zero.
    ids = jnp.zeros((2, 16), jnp.int32)
    for (o,), grads in run_forms(form, (q[:, :16], k, v), (cotangents[0][:, :16],), segment_ids=ids):
        assert not np.any(o) and not any(np.any(g) for g in grads)


@pytest.mark.parametrize("name", EVERY_FORM)
def test_a_document_knows_nothing_of_the_others(name, form):
    time = 40
    (q, k, v, _), (do,) = make(6, 2, time, time, 4, 2)
    ids = jnp.asarray(1 + (np.arange(time) >= 16) + (np.arange(time) >= 17) + (np.arange(time) >= 27))[None].repeat(
        2, 0
    )
    mine = np.asarray(ids[0] == 3)
    do = do.at[:, ~mine].set(0)
    function = functools.partial(attend, segment_ids=ids, implementation=form(name))
    run = jax.jit(lambda *i: common.everything(function, (do,), *i))
    (o,), grads = run(q, k, v)
    (changed,), grads_changed = run(*(x.at[:, ~mine].multiply(3) for x in (q, k, v)))
    np.testing.assert_array_equal(o[:, mine], changed[:, mine])
    for a, b in zip(grads, grads_changed, strict=True):
        np.testing.assert_array_equal(a[:, mine], b[:, mine])
        assert not np.any(np.asarray(a)[:, ~mine])


def test_half_precision(form):
    (q, k, v, _), cotangents = make(7, 2, 40, 40, 4, 2, 16, 16)
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    (reference,) = run_forms(form, [x.astype(jnp.float32) for x in half], cotangents, ("reference",), window=20)
    for out in run_forms(form, half, cotangents, window=20):
        assert all(x.dtype == jnp.bfloat16 for x in (*out[0], *out[1]))
        common.assert_all_close(reference, out, NAMES[:4], common.HALF, 1)


def test_float64_and_finite_differences(form):
    with jax.enable_x64():
        inputs, cotangents = make(8, 8, 30, 30, 4, 2, dtype=np.float64)
        options = dict(window=11, soft_cap=2.0, segment_ids=common.document_rows(30))
        agree(form, inputs, cotangents, tolerances=common.FLOAT64, **options)
        small, _ = make(9, 1, 6, 6, 2, 1, 2, 2, dtype=np.float64)
        form("blocks", 2, 2)
        run = functools.partial(attend, soft_cap=2.0, segment_ids=jnp.array([[1, 1, 0, 2, 2, 2]]))
        check_grads(jax.jit(run), small, order=1, modes=("rev",), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("window", [None, 64])
def test_memory_is_linear_in_time(window, form):
    form("blocks", 64, 64)

    def temporaries(time):
        x = jax.ShapeDtypeStruct((1, time, 2, 8), jnp.float32)
        loss = lambda q, k, v: jnp.sum(attention(q, k, v, window=window) ** 2)
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4096) < 2.5 * temporaries(2048)
    assert temporaries(4096) < 4096 * 4096  # bytes: a sixteenth of one array of logits for both heads and a half


def test_blocks_that_nothing_can_see_are_skipped():
    block, time = 16, 256
    rows = lambda ids=None: xla._blocked_rows(xla.Rows(jnp.arange(time)[None], ids), block)
    visits = lambda rows, options: sum(
        int(jnp.sum(end - first)) for first, end in [xla._block_bounds(rows, rows, options)[0]]
    )
    options = xla.Options(True, None, 1.0, None)
    blocks = time // block
    assert visits(rows(), options) == blocks * (blocks + 1) // 2
    assert visits(rows(), options._replace(causal=False)) == blocks**2
    assert visits(rows(), options._replace(window=17)) == 2 * blocks - 1  # a block's first row sees 16 keys back
    assert visits(rows(), options._replace(window=18)) == 3 * blocks - 3
    ids = jnp.repeat(jnp.arange(4), 64)[None]  # the first document is padding
    assert visits(rows(ids), options) == 3 * 10
    transposed = xla._block_bounds(rows(ids), rows(ids), options)[1]
    assert int(jnp.sum(transposed[1] - transposed[0])) == 3 * 10


def test_runs_under_shard_map_with_checks(form):
    (q, k, v, _), cotangents = make(10, 2, 20, 20, 2, 2)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    for name in ("dense", "blocks"):
        run = functools.partial(attend, implementation=form(name), window=9)
        sharded = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec,))
        out, expected = (jax.jit(lambda *i, f=f: common.everything(f, cotangents, *i))(q, k, v) for f in (sharded, run))
        common.assert_all_close(expected, out, NAMES[:4], common.FLOAT32, 1)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(k=(2, 4, 2, 6)), r"k has shape \(2, 4, 2, 6\), expected .* = \(2, 4, 2, 5\)"),
        (dict(v=(2, 3, 2, 7)), r"v has shape \(2, 3, 2, 7\), expected .* = \(2, 4, 2, 7\)"),
        (dict(q=(2, 3, 3, 5)), r"q \(2, 3, 3, 5\) and k \(2, 4, 2, 5\) need .* q's heads a multiple of k's"),
        (dict(sinks=(2,)), r"sinks has shape \(2,\), expected \[Hq\] = \(4,\)"),
        (dict(q_positions=(2, 3)), "q_positions and kv_positions come together"),
        (dict(q_positions=(2, 4), kv_positions=(2, 4)), r"q_positions has shape \(2, 4\), expected .* = \(2, 3\)"),
        (dict(segment_ids=(2, 3)), r"segment_ids \(2, 3\) don't name the 4 keys; give kv_segment_ids"),
        (dict(kv_segment_ids=(2, 4)), r"kv_segment_ids \(2, 4\) came without segment_ids"),
        (dict(window=0), "window=0 must be a whole number of at least 1"),
        (dict(window=3, causal=False), "needs causal=True"),
        (dict(soft_cap=0.0), "soft_cap=0.0 must be positive"),
        (dict(implementation="pallas"), "it runs on a TPU or a GPU, not on cpu, and interpret=True runs it here"),
        (dict(interpret=True), "interpret=True modifies implementation='pallas' only"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_refusals(change, message):
    shapes = dict(q=(2, 3, 4, 5), k=(2, 4, 2, 5), v=(2, 4, 2, 7))
    shapes |= {name: x for name, x in change.items() if isinstance(x, tuple)}
    options = {name: x for name, x in change.items() if not isinstance(x, tuple)}
    integer = ("q_positions", "kv_positions", "segment_ids", "kv_segment_ids")
    arrays = {n: jnp.zeros(s, jnp.int32 if n in integer else jnp.float32) for n, s in shapes.items()}
    with pytest.raises(ValueError, match=message):
        attention(**arrays, **options)


def test_positions_may_be_unsigned():
    """Positions are subtracted: of an unsigned dtype they must not wrap round and let the future in."""
    q, k, v = (jax.random.normal(key, (1, 6, 2, 4)) for key in jax.random.split(jax.random.key(0), 3))
    positions = jnp.arange(6)[None]
    call = lambda dtype, implementation: attention(
        q, k, v, window=3, implementation=implementation,
        q_positions=positions.astype(dtype), kv_positions=positions.astype(dtype),
    )  # fmt: skip
    for implementation in ("reference", "xla"):
        np.testing.assert_array_equal(call(jnp.uint8, implementation), call(jnp.int32, implementation))


def test_a_sink_of_nothing_beside_rows_that_see_nothing(form):
    """A logit of -inf weighs nothing, and a block of queries that meets no key keeps gradients finite."""
    (q, k, v, sinks), cotangents = make(11, 1, 40, 40, 2, 1)
    ids = jnp.asarray([[1] * 16 + [0] * 16 + [1] * 8])
    agree(form, (q, k, v, sinks.at[0].set(-jnp.inf)), cotangents, segment_ids=ids)


def test_sixty_four_bits_of_ids_are_not_cut_by_kernels():
    """An id and one that is equal to it in 32 bits: XLA compares them whole, and kernels refuse them."""
    (q, k, v, _), _ = make(12, 1, 4, 4, 1, 1)
    with jax.enable_x64(True):
        ids = jnp.asarray([[1, 1, 2**32 + 1, 2**32]])
        with pytest.raises(ValueError, match="segment ids have dtype int64, and it takes up to 32 bits"):
            attention(q, k, v, segment_ids=ids, implementation="pallas", interpret=True)
        whole, cut = (attention(q, k, v, segment_ids=x, implementation="xla") for x in (ids, ids.astype(jnp.int32)))
    assert not jnp.array_equal(whole[:, 2], cut[:, 2])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_an_empty_batch_is_an_empty_result(implementation):
    (q, k, v, _), _ = make(13, 0, 4, 4, 1, 1)
    assert attention(q, k, v, implementation=implementation).shape == (0, 4, 1, 7)
    with pytest.raises(ValueError, match=r"an array of shape \(0, 4, 1, 5\) is empty"):
        attention(q, k, v, implementation="pallas", interpret=True)


def test_a_traced_scale_is_refused():
    (q, k, v, _), _ = make(14, 1, 4, 4, 1, 1)
    with pytest.raises(ValueError, match="scale must be a number that is known when tracing"):
        jax.jit(lambda s: attention(q, k, v, scale=s))(0.5)
