"""The models that the tests of this folder share: one for each mixer with its options, and a hybrid of all."""

import functools

import jax
import numpy as np

from hyjax.models import HybridLM

SMALL = dict(width=16, heads=4, vocab_size=31, ffn="gelu", ffn_width=16, norm_eps=1e-6)
# chunks of 8 put several chunk borders, and document borders inside chunks, into rows of 20 tokens
G = dict(mixer="gated_linear_attention", ffn=None, chunk_size=8, gate_bias=-2.0)
MODELS = {
    "attention": dict(layout="A", legend=dict(A=dict(ffn=None))),
    "attention-options": dict(
        layout="A", kv_heads=2, qk_norm=True, rope_fraction=0.5, legend=dict(A=dict(gated=True, head_dim=6))
    ),
    "attention-learned": dict(layout="A", position="learned", max_positions=64),
    "window": dict(layout="W", window=5, kv_heads=2),
    "gated-linear": dict(layout="G", legend=dict(G=G)),
    "gated-linear-options": dict(layout="G", legend=dict(G=G | dict(conv_width=4, gated=True, value_dim=6))),
    "gla": dict(layout="V", legend=dict(V=dict(ffn=None, chunk_size=8, conv_width=3, gate_rank=3, gate_bias=-1.0))),
    "deltanet": dict(layout="N", legend=dict(N=dict(ffn=None, chunk_size=8, negative_eigenvalues=True))),
    "gated-deltanet": dict(layout="D", legend=dict(D=dict(ffn=None, chunk_size=8, key_heads=2, value_dim=6))),
    "kimi-delta": dict(layout="K", legend=dict(K=dict(ffn=None, chunk_size=8, conv_width=0))),
    "mamba2": dict(
        layout="M",
        legend=dict(M=dict(ffn=None, chunk_size=8, ssm_head_dim=4, state_dim=5, groups=2, step_limit=0.05)),
    ),
    "mamba1": dict(layout="S", legend=dict(S=dict(ffn=None, state_dim=3))),
    "rg-lru": dict(layout="R", legend=dict(R=dict(ffn=None, inner=12))),
    "hybrid": dict(layout="(GAW)*2 -", window=5, legend=dict(G=dict(conv_width=3, chunk_size=8))),
}


def init(model: HybridLM):
    return jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))


@functools.cache
def build(name: str):
    """(model, variables, jitted apply) of one of `MODELS`."""
    model = HybridLM(SMALL | MODELS[name])
    return model, init(model), jax.jit(model.apply)


def tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SMALL["vocab_size"], (batch, length), dtype=np.int32)


def context(ids) -> tuple[np.ndarray, np.ndarray]:
    """(positions, segment_ids) of rows of ids, plainly: positions count a document's tokens from 0."""
    ids = np.asarray(ids, np.int32)
    positions = np.zeros_like(ids)
    for row, out in zip(ids, positions, strict=True):
        last, count = 0, 0
        for t, segment in enumerate(row):
            if segment:
                count = count + 1 if segment == last else 0
                last, out[t] = segment, count
    return positions, ids
