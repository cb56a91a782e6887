"""Small models of several layouts with their generators; a row's uncached continuation."""

import functools
from typing import Any

import jax
import numpy as np

from hyjax.generate import Generator
from hyjax.models import HybridLM

VOCAB, ROOM, PIECE = 31, 40, 8
SMALL = dict(width=16, heads=4, vocab_size=VOCAB, ffn="gelu", ffn_width=16, window=5)
CONVOLVED = dict(conv_width=3, gated=True, chunk_size=4)
LAYOUTS: dict[str, dict[str, Any]] = {
    "GA": dict(layout="GA", legend=dict(G=CONVOLVED)),
    "GW": dict(layout="GW", position="learned", max_positions=ROOM),
    "AAAA": dict(layout="AAAA", kv_heads=2, qk_norm=True),
    "GGAG": dict(layout="GGAG", kv_heads=1, legend=dict(G=CONVOLVED)),
}
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (3, 7, 20)]


@functools.cache
def build(name: str) -> tuple[HybridLM, dict[str, Any], Generator]:
    """(model, params, a generator) of one of LAYOUTS."""
    model = HybridLM(SMALL | LAYOUTS[name])
    params = jax.jit(model.init)(jax.random.key(3), np.zeros((1, 4), np.int32))["params"]
    return model, params, Generator(model, params, ROOM, prefill_chunk=PIECE)


@functools.cache
def apply(name: str):
    """The jitted `model.apply`."""
    return jax.jit(build(name)[0].apply)


@functools.cache
def forward(name: str):
    """The jitted forward pass without a state: tokens [B,T] -> logits."""
    model, params, _ = build(name)
    return jax.jit(lambda tokens: model.apply({"params": params}, tokens).logits)


def padded(rows: list[list[int]], length: int = ROOM) -> np.ndarray:
    """Rows with zeros after them: causality keeps those out of what stands before."""
    whole = np.zeros((len(rows), length), np.int32)
    for out, row in zip(whole, rows, strict=True):
        out[: len(row)] = row
    return whole


def states(generator: Generator, rows: Any, row: int | slice = slice(None)) -> Any:
    """The model's state of a row (or of all), stacked as the model has it, without its clock's capacity."""
    layers = generator.decoder.stacked(rows.state.layers)
    return jax.tree.map(lambda a: np.asarray(a)[:, row], layers), jax.tree.map(
        lambda a: np.asarray(a)[row], rows.state.clock
    )


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)
