"""attention by kernels that JAX ships: what they are asked, and what they are not."""

import functools

import jax
import jax.numpy as jnp
import pytest

from hyjax.kernels import attention, dispatch
from hyjax.kernels.attention import libraries, xla
from tests.kernels import aot, common
from tests.kernels.test_attention import NAMES, attend, make


@pytest.mark.parametrize("case", ["segments-sinks", "window-soft_cap-longer", "longer", "full"])
def test_splash_agrees(case):
    (q, k, v, sinks), cotangents = make(0, 1, 128, 256 if "longer" in case else 128, 4, 2, 128, 128)
    ids = jnp.repeat(jnp.asarray([[1, 2, 0, 3]]), 32, axis=1) if "segments" in case else None
    sinks = sinks if "sinks" in case else None
    options = dict(causal=case != "full", soft_cap=2.0 if "cap" in case else None)
    options |= dict(window=100 if "window" in case else None)
    splash = xla.Options(scale=128**-0.5, **options)
    run = lambda q, k, v: (libraries.splash(q, k, v, ids, sinks, splash, interpret=True),)
    expected = functools.partial(attend, sinks=sinks, segment_ids=ids, implementation="reference", **options)
    out, expected = (jax.jit(lambda *i, f=f: common.everything(f, cotangents, *i))(q, k, v) for f in (run, expected))
    common.assert_all_close(expected, out, NAMES[:4], common.FLOAT32, 1)


@pytest.mark.parametrize("window", [None, 1, 9])
def test_cudnn_is_asked_the_same_question(window, monkeypatch):
    """There is no cuDNN here: JAX's plain form of the call that it would get."""
    library = jax.nn.dot_product_attention
    asked = []

    def plain(*arrays, implementation, **options):
        asked.append(implementation)
        return library(*arrays, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    monkeypatch.setattr(dispatch, "device", lambda: ("gpu", "a GPU"))
    (q, k, v, _), _ = make(1, 2, 40, 40, 4, 2, 16, 16)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    run = functools.partial(attention, q, k, v, window=window, scale=0.3)
    common.assert_close(run(implementation="reference"), run(implementation="cudnn"), common.HALF[1])
    assert asked == ["cudnn"]


@pytest.mark.parametrize(
    "implementation, platform, options, message",
    [
        ("splash", "cpu", dict(), "it runs on TPU, not on cpu"),
        ("splash", "tpu", dict(q_len=100), "multiples of 128, not Tq=100, Tk=128"),
        ("splash", "tpu", dict(q_len=256), "Tq=256 exceeds Tk=128"),
        ("splash", "tpu", dict(by_position=True), "goes by place in the row"),
        ("cudnn", "tpu", dict(), "it runs on GPU, not on tpu"),
        ("cudnn", "gpu", dict(packed=True), "knows no segment ids"),
        ("cudnn", "gpu", dict(soft_cap=2.0), "knows no soft cap"),
        ("cudnn", "gpu", dict(q_len=64), "Tq=64 is not Tk=128"),
        ("cudnn", "gpu", dict(dtype="float32"), "all bfloat16 or all float16, not float32"),
        ("cudnn", "gpu", dict(dim=12), "a multiple of 8 up to 128, not K=12"),
    ],
)  # fmt: skip
def test_refusals(implementation, platform, options, message, monkeypatch):
    monkeypatch.setattr(dispatch, "device", lambda: (platform, "a device"))
    dim, dtype, length = (options.get(n, d) for n, d in dict(dim=16, dtype="bfloat16", q_len=128).items())
    q, k = jnp.zeros((1, length, 2, dim), dtype), jnp.zeros((1, 128, 2, dim), dtype)
    rows = dict(segment_ids=jnp.ones((1, length), jnp.int32)) if options.get("packed") else {}
    if options.get("by_position"):
        rows |= dict(q_positions=jnp.arange(length)[None], kv_positions=jnp.arange(128)[None])
    with pytest.raises(ValueError, match=message):
        attention(q, k, k, soft_cap=options.get("soft_cap"), implementation=implementation, **rows)


@aot.needs_tpu
def test_splash_compiles():
    loss = lambda q, k, v: jnp.sum(attention(q, k, v, implementation="splash").astype(jnp.float32))
    shapes = {name: ((1, 512, 2, 128), "bfloat16") for name in "qkv"}
    program = aot.compile_for("v5e", lambda q, k, v: jax.grad(loss, (0, 1, 2))(q, k, v), shapes)
    assert len(program.kernels) == 3
