"""FLOPs per token: matrix products against the traced program, what passes between tokens against its definition."""

import jax
import jax.numpy as jnp
import pytest

from hyjax.cost import flops_per_token
from hyjax.models import HybridLM
from tests.cost.common import MIXED, RECALL


def matrix_product_flops(jaxpr) -> int:
    """FLOPs of all products with a matrix that has no batch dims (a parameter), those of sub-programs included."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), (batch, _) = equation.params["dimension_numbers"]
            left, right = (operand.aval.shape for operand in equation.invars)
            if not batch and len(right) == 2:
                size = 1
                for dim in equation.outvars[0].aval.shape:
                    size *= dim
                for dim in contracted:
                    size *= left[dim]
                total += 2 * size
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += matrix_product_flops(inner)
    return total


@pytest.mark.parametrize(
    "config",
    [
        RECALL | dict(layout="GGAG"),
        MIXED,
        MIXED | dict(tied_embeddings=True, layout="A", legend={}, ffn="gelu"),
        dict(layout="G-W", width=16, heads=2, vocab_size=50, ffn_width=37),
    ],
    ids=["recall", "mixed", "tied", "small"],
)
def test_parameter_products_equal_the_traced_ones(config):
    model = HybridLM(config | dict(scan=False, implementation="reference"))
    streams = len(model.config["streams"])
    tokens = jax.ShapeDtypeStruct((2, 7, streams) if streams else (2, 7), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    traced = matrix_product_flops(jax.make_jaxpr(lambda p, t: model.apply(p, t).logits)(params, tokens).jaxpr)
    flops = flops_per_token(config, 7)["model"]
    gated_layers = [letter for letter in model.letters if letter == "G"]
    conv = sum(2 * model.layers["G"].mixer.conv_width * model.layers["G"].mixer.channels for _ in gated_layers)
    assert (flops["projections"] - conv + flops["ffn"] + flops["head"]) * 2 * 7 == traced


@pytest.mark.parametrize(("context", "window"), [(64, 16), (64, 64), (64, 500), (1, 1), (63, 5)])
def test_attention_counts_the_pairs_that_are_seen(context, window):
    config = dict(layout="WA", width=32, heads=4, window=window)
    flops = flops_per_token(config, context)["model"]
    # token t (from 0) sees t tokens before it and, by convention, half of itself
    seen = [t + 0.5 for t in range(context)]
    in_window = [min(pairs, window) for pairs in seen]
    expected = 4 * 32 * (sum(seen) + sum(in_window)) / context
    assert flops["attention"] == pytest.approx(expected, rel=1e-12)


def test_recurrence_is_flat_and_the_rest_adds_up():
    config = RECALL | {"layout": "GGAG"}
    short, long = (flops_per_token(config, context)["model"] for context in (128, 4096))
    assert short["recurrence"] == long["recurrence"] == 3 * 4 * 4 * 8 * 8
    assert short["attention"] == 4 * 32 * 64 and long["attention"] == 4 * 32 * 2048
    for flops in (short, long):
        assert flops["total"] == sum(value for name, value in flops.items() if name != "total")
    assert {name: long[name] for name in ("projections", "ffn", "head")} == {
        name: short[name] for name in ("projections", "ffn", "head")
    }


@pytest.mark.parametrize("context", [0, -1, 2.0, "8", True])
def test_bad_context(context):
    with pytest.raises(ValueError, match="context must be a whole number"):
        flops_per_token({}, context)
