"""A legend entry's fields: what does not fit together is said by the keys that set it."""

import jax
import jax.numpy as jnp
import pytest

from hyjax.models import HybridLM

SMALL = dict(layout="GA", width=12, heads=4, vocab_size=31)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(width=14), "model.heads=4 must divide model.width=14 where model.head_dim is 0: use 2 or 7 heads, or a"),
        (dict(width=3), "use 3 heads, or a width of 4"),
        (dict(kv_heads=3), "model.kv_heads=3 must divide model.heads=4: nearest are 2 or 4"),
        (dict(kv_heads=8), "model.kv_heads=8 must divide model.heads=4: nearest are 4"),
        (
            dict(legend=dict(G=dict(heads=5))),
            "model.legend.G.heads=5 must divide model.width=12 where model.head_dim is 0: use 4 or 6 heads, or a width "
            "of 10 or 15",
        ),
        (dict(head_dim=2, legend=dict(A=dict(heads=5, head_dim=0))), "where model.legend.A.head_dim is 0"),
        (dict(kv_heads=2, legend=dict(A=dict(heads=3))), "model.kv_heads=2 must divide model.legend.A.heads=3"),
        (dict(legend=dict(A=dict(kv_heads=3))), "model.legend.A.kv_heads=3 must divide model.heads=4"),
        (dict(legend=dict(A=dict(rope_fraction=0.0))), "model.legend.A.rope_fraction must be above 0 and at most 1"),
        (dict(legend=dict(A=dict(rope_fraction=2))), "model.legend.A.rope_fraction must be above 0 and at most 1"),
        (dict(rope_fraction=0.2), "model.rope_fraction=0.2 of 3 dims a head is no pair: use at least 0.67"),
        (
            dict(legend=dict(A=dict(head_dim=1))),
            "model.rope_fraction=1.0 of 1 dims a head is no pair: set model.position to 'none'",
        ),
        (dict(legend=dict(A=dict(position="learned"))), "model.legend.A.position='learned' needs the model's table"),
        (dict(legend=dict(A=dict(width=24))), "model.legend.A.width can't be set"),
        (dict(legend=dict(G=dict(value_dim=-1))), "model.legend.G.value_dim=-1 must be at least 0"),
        (dict(legend=dict(G=dict(conv_width=-4))), "model.legend.G.conv_width=-4 must be at least 0"),
        (dict(legend=dict(G=dict(chunk_size=-8))), "model.legend.G.chunk_size=-8 must be at least 0"),
        (dict(legend=dict(A=dict(dtype="float16"))), "model.legend.A.dtype must be one of float32, bfloat16"),
    ],
)
def test_what_does_not_fit_is_named(config, message):
    with pytest.raises(ValueError) as caught:
        HybridLM(SMALL | config)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_only_the_layers_that_exist_are_checked():
    """Sizes that no layer uses may be anything; each layer's own must fit."""
    HybridLM(dict(SMALL, layout="-", width=14))
    HybridLM(dict(SMALL, width=15, legend=dict(G=dict(heads=5), A=dict(heads=3))))
    HybridLM(dict(SMALL, width=14, head_dim=3))
    HybridLM(dict(SMALL, layout="A", head_dim=1, position="none"))


@pytest.mark.parametrize(("head_dim", "fraction"), [(2, 1.0), (3, 1.0), (7, 1.0), (3, 0.5), (7, 0.5)])
def test_rope_turns_whole_pairs_of_a_head(head_dim, fraction):
    model = HybridLM(dict(SMALL, layout="A", head_dim=head_dim, rope_fraction=fraction, legend=dict(A=dict(ffn=None))))
    tokens = jnp.zeros((1, 3), jnp.int32)
    shapes = jax.eval_shape(lambda: model.apply(model.init(jax.random.key(0), tokens), tokens).logits)
    assert shapes.shape == (1, 3, 31)
    assert 0 < model.layers["A"].mixer.rotated <= head_dim


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_layer_may_compute_in_another_dtype(dtypes):
    """The stream keeps the model's dtype, so layers of several dtypes go under one scan."""
    legend = dict(A=dict(dtype=dtypes[1], state_dtype="bfloat16"))
    model = HybridLM(dict(SMALL, layout="(GA)*2", dtype=dtypes[0], legend=legend))
    tokens = jnp.zeros((1, 3), jnp.int32)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens))
    x, _, _ = jax.eval_shape(model.hidden, variables, tokens)
    assert x.dtype == dtypes[0]
    state = jax.eval_shape(lambda: model.init_state(1, 8))
    assert state.layers["A"].k.dtype == "bfloat16" and state.layers["G"].matrix.dtype == "float32"
