"""The whole model: parameters, how a layout is run, the chunked loss, precision, and what it refuses."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyjax.config import load
from hyjax.models import Context, HybridLM, mixers
from hyjax.models.loss import chunked_cross_entropy
from tests.models.common import MODELS, SMALL, context, init, tokens

ROOT = Path(__file__).parents[2]


def shapes(config):
    model = HybridLM(config)
    form = (1, 4, len(config["streams"])) if config.get("streams") else (1, 4)
    return model, jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct(form, jnp.int32))["params"]


def rms(a):
    return jnp.sqrt(jnp.mean(jnp.square(a)))


def batch(length=24, rows=3):
    ids = tokens(rows, length + 1)
    positions, segments = context([[1] * 9 + [2] * (length - 9)] * rows)
    weights = np.ones((rows, length), np.float32)
    weights[0, 5:] = 0
    return dict(tokens=ids[:, :-1], targets=ids[:, 1:], weights=weights, positions=positions, segment_ids=segments)


# ------------------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize("layout, count", [("GGGG", 58_544), ("AAAA", 57_984), ("GGAG", 58_404)])
def test_the_three_matched_stacks(layout, count):
    _, params = shapes(load(f"{ROOT}/configs/recall.py:pairs=64,layout={layout}").model)
    assert sum(a.size for a in jax.tree.leaves(params)) == count


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_axes(name):
    """Each leaf is float32 and has one logical axis for each of its dims, the stack's first among a layer's."""
    model, params = shapes(SMALL | MODELS[name])
    axes = jax.tree_util.tree_flatten_with_path(model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))[0]
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    assert [path for path, _ in axes] == [path for path, _ in leaves]
    for (path, dims), (_, leaf) in zip(axes, leaves, strict=True):
        assert len(dims) == leaf.ndim and leaf.dtype == jnp.float32, path
        assert (dims[0] == "layers") == (path[0].key == "layers"), path


def test_a_draw_depends_on_depth_alone():
    """P13: no two layers are alike, and a layer is the same whatever the others are."""
    mixed, plain = (
        init(HybridLM(SMALL | dict(layout=layout)))["params"]["layers"]["G"]["mixer"]["query"]["kernel"]
        for layout in ("GAG", "GGG")
    )
    assert (mixed[0] == plain[0]).all() and (mixed[1] == plain[2]).all()
    assert not np.allclose(plain[0], plain[1])


def test_tied_embeddings_are_one_leaf():
    model, params = shapes(SMALL | dict(layout="G", tied_embeddings=True))
    assert "head" not in params
    variables = init(model)
    grads = jax.grad(lambda v: model.loss(v, batch())[0])(variables)["params"]["embed"]["embedding"]
    unseen = np.setdiff1d(np.arange(31), batch()["tokens"])
    assert (grads[unseen] != 0).all()  # ids that are never read still take part in every softmax


# ------------------------------------------------------------------------------------------------ running a layout


def test_depth_does_not_grow_the_trace():
    """48 layers of a period trace to as many equations as 4, within a twentieth; unrolled they would not."""

    def equations(layout, **options):
        model, params = shapes(SMALL | dict(layout=layout, remat="full") | options)
        loss = lambda p: model.loss({"params": p}, batch())[0]
        return str(jax.make_jaxpr(jax.grad(loss))(params)).count("\n")

    four, deep = equations("GGAG"), equations("(GGAG)*12")
    assert deep < 1.05 * four + 100
    assert equations("(GGAG)*12", scan=False) > 5 * deep


def test_scan_and_remat_change_nothing():
    """Scanned or not, with any remat policy: the same loss and gradients as the unrolled layers."""
    base = SMALL | dict(layout="(GGA)*2 W", window=5)
    variables = init(HybridLM(base))

    def run(**options):
        model = HybridLM(base | options)
        return jax.jit(jax.value_and_grad(lambda v: model.loss(v, batch())[0]))(variables)

    expected = run(scan=False)
    for options in (dict(), dict(remat="full"), dict(remat="dots"), dict(remat="kernels")):
        jax.tree.map(
            lambda a, b: np.testing.assert_array_less(rms(a - b), 1e-4 * rms(b) + 1e-6), run(**options), expected
        )


# ------------------------------------------------------------------------------------------------ the loss


def plain_loss(model, variables, rows):
    """What `loss` promises, from whole logits."""
    logits = model.apply(variables, rows["tokens"], Context(rows["positions"], rows["segment_ids"])).logits
    lse = jax.nn.logsumexp(logits, axis=-1)
    nats = lse - jnp.take_along_axis(logits, rows["targets"][..., None], -1)[..., 0]
    weights = rows["weights"]
    correct = ((logits.argmax(-1) == rows["targets"]) * weights).sum()
    return (nats * weights).sum(), (lse**2 * weights).sum(), correct


@pytest.mark.parametrize("chunk", [0, 3, 21, 1000])  # whole rows; 1, 7 time steps a chunk; longer than the rows
def test_the_chunked_loss_is_the_plain_one(chunk):
    model = HybridLM(SMALL | dict(layout="G", loss_chunk=chunk, z_loss=0.5, head_bias=True))
    variables = init(model)

    def chunked(v):
        loss, aux = model.loss(v, batch())
        return loss + aux["z_loss"], (loss, aux)

    def plain(v):
        loss, square_lse, correct = plain_loss(model, v, batch())
        return loss + 0.5 * square_lse, (loss, dict(z_loss=0.5 * square_lse, correct=correct))

    (_, (loss, aux)), grads = jax.jit(jax.value_and_grad(chunked, has_aux=True))(variables)
    (_, (expected_loss, expected)), expected_grads = jax.jit(jax.value_and_grad(plain, has_aux=True))(variables)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose([aux[k] for k in expected], list(expected.values()), rtol=1e-5)
    assert aux["weight"] == batch()["weights"].sum()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), grads, expected_grads)


def test_a_large_vocabulary_never_has_all_its_logits():
    """150,000 ids, 4,096 tokens: 2.4 GB of logits; the compiled step's temporaries stay far below."""
    model, params = shapes(dict(layout="-", width=8, heads=1, vocab_size=150_000, ffn_width=8))
    rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((4, 1024), a.dtype), batch())
    step = jax.jit(jax.grad(lambda p, b: model.loss({"params": p}, b)[0]))
    memory = step.lower(params, rows).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 400e6


def test_a_token_without_weight_has_no_gradient():
    """What the head reads may be NaN there: value and gradients are those of the other tokens."""
    head = jnp.ones((4, 7))
    weights = jnp.array([[1.0, 0.0, 1.0]])

    def loss(x, head):
        return chunked_cross_entropy(x, jnp.zeros((1, 3), int), weights, lambda x: x @ head, 2)["loss"]

    x = jnp.arange(12.0).reshape(1, 3, 4)
    poisoned = x.at[0, 1].set(jnp.nan)
    (value, grads), (expected, plain) = (jax.value_and_grad(loss, (0, 1))(a, head) for a in (poisoned, x))
    assert value == expected
    jax.tree.map(np.testing.assert_array_equal, grads, plain)
    assert (grads[0][0, 1] == 0).all()


def test_a_token_without_weight_may_have_any_target():
    model = HybridLM(SMALL | dict(layout="G"))
    variables = init(model)
    rows = batch()
    other = dict(rows, targets=np.where(rows["weights"] > 0, rows["targets"], 7))
    assert model.loss(variables, rows)[0] == model.loss(variables, other)[0]


# ------------------------------------------------------------------------------------------------ precision


def test_bfloat16_stays_near_float32():
    """bf16 compute on the same float32 masters; the logits come out in float32 and near the float32 ones."""
    config = SMALL | dict(layout="GAW", width=64, heads=4, window=6, legend=dict(G=dict(conv_width=4, gated=True)))
    variables = init(HybridLM(config))
    full, half = (
        jax.jit(HybridLM(config | dict(dtype=dtype)).apply)(variables, tokens(4, 32)).logits
        for dtype in ("float32", "bfloat16")
    )
    assert full.dtype == half.dtype == jnp.float32
    assert 1e-4 < rms(full - half) / rms(full) < 0.03


def test_state_dtype_narrows_storage_alone():
    config = SMALL | dict(layout="GAW", window=6, state_dtype="bfloat16", legend=dict(G=dict(conv_width=4)))
    model = HybridLM(config)
    variables = init(model)
    state = model.init_state(2, 24)
    assert {a.dtype for a in jax.tree.leaves(state.layers)} == {jnp.dtype("bfloat16")}
    apply = jax.jit(model.apply)
    out = apply(variables, tokens(2, 12), None, state)
    assert jax.tree.map(lambda a: a.dtype, out.state.layers) == jax.tree.map(lambda a: a.dtype, state.layers)
    again = apply(variables, tokens(2, 12, seed=1), None, out.state).logits
    whole = apply(variables, np.concatenate([tokens(2, 12), tokens(2, 12, seed=1)], 1)).logits[:, 12:]
    assert rms(again - whole) / rms(whole) < 0.02


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(layout="GXG"), "'X'"),
        (dict(layout="GTG"), "model.legend.T.mixer is 'lightning_attention', not one of attention"),
        (dict(layout="G", legend=dict(G=dict(mixer="atention"))), "did you mean attention"),
        (dict(layout="G", legend=dict(G=dict(conv_widht=4))), "conv_widht.*did you mean conv_width"),
        (dict(layout="G", legend=dict(G=dict(conv_width="4"))), "conv_width is '4'; it must be of type int"),
        (dict(layout="G", legend=dict(G=dict(gated=1))), "gated is 1; it must be of type bool"),
        (dict(layout="G", widht=3), "widht"),
        (dict(layout="G", legend=dict(A=dict(kv_hedas=2))), "kv_hedas.*did you mean kv_heads"),  # though no A is laid
        (dict(layout="G", legend=dict(G=dict(mixer=None, ffn=None))), "'G' is neither mixer nor FFN"),
    ],
)
def test_configs_that_mean_nothing(config, message):
    with pytest.raises(ValueError, match=message):
        HybridLM(SMALL | config)


def test_shapes_that_do_not_fit():
    model = HybridLM(SMALL | dict(layout="G"))
    variables = init(model)
    with pytest.raises(ValueError, match=r"tokens must be integers \[batch, time\]; got int32 \[1, 4, 2\]"):
        model.apply(variables, np.zeros((1, 4, 2), np.int32))
    with pytest.raises(ValueError, match="got float32"):
        model.apply(variables, np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match=r"ctx.segment_ids has shape \(1, 5\)"):
        model.apply(variables, tokens(1, 4), Context(np.zeros((1, 4), np.int32), np.ones((1, 5), np.int32)))
    with pytest.raises(ValueError, match="the state is of 2 rows; the tokens are of 1"):
        model.apply(variables, tokens(1, 4), None, model.init_state(2, 8))


def test_a_learned_table_ends():
    """A look-up past it would read its last row: it raises, or says so in `overflow` where positions are traced."""
    model = HybridLM(SMALL | dict(layout="G", position="learned", max_positions=8))
    variables = init(model)
    with pytest.raises(ValueError, match=r"position 8 is not in the table of model.max_positions=8"):
        model.apply(variables, tokens(1, 9))
    apply = jax.jit(model.apply)
    out = apply(variables, tokens(1, 8), None, model.init_state(1, 9))
    assert not out.aux["overflow"].any()
    assert apply(variables, tokens(1, 1), None, out.state).aux["overflow"].all()
    packed = Context(*context([[1] * 8 + [2] * 8]))
    assert apply(variables, tokens(1, 16), packed).logits.shape == (1, 16, 31)
    with pytest.raises(ValueError, match="position -1 is not in"):
        model.apply(variables, tokens(1, 1), Context(np.array([[-1]]), np.array([[1]])))
    with pytest.raises(ValueError, match="position 8 is not in"):
        model.apply(variables, tokens(1, 1), None, out.state)


def test_segment_ids_are_any_numbers_but_zero():
    """Negative ids name documents as others do; no ids is one document."""
    model = HybridLM(SMALL | dict(layout="GA"))
    variables, ids = init(model), tokens(1, 6)
    positions, segments = context([[1, 1, 1, 2, 2, 2]])
    apply = jax.jit(model.apply)
    signed = apply(variables, ids, Context(positions, np.where(segments == 1, -7, 5))).logits
    np.testing.assert_array_equal(signed, apply(variables, ids, Context(positions, segments)).logits)
    whole = apply(variables, ids, Context(np.arange(6)[None], None)).logits
    np.testing.assert_allclose(whole, apply(variables, ids).logits, rtol=1e-5, atol=1e-5)


def test_a_window_over_contiguous_documents_goes_by_place(monkeypatch):
    """The same logits, and no positions among what the operator gets: kernels that skip blocks take no positions."""
    model = HybridLM(SMALL | dict(layout="W", window=3))
    variables, ids = init(model), tokens(1, 12)
    rows = context([[0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2]])
    given = []
    operator = mixers.attention.attention
    monkeypatch.setattr(mixers.attention, "attention", lambda *a, **k: (given.append(set(k)), operator(*a, **k))[1])
    by_time, by_place = (
        model.apply(variables, ids, Context(*rows, contiguous=contiguous)).logits for contiguous in (False, True)
    )
    assert ["q_positions" in options for options in given] == [True, False]
    valid = rows[1] != 0
    np.testing.assert_allclose(by_place[valid], by_time[valid], rtol=1e-5, atol=1e-5)
