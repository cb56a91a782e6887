"""A language model of a few numbers with the interface that the training code uses, and batches for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCAB, WIDTH, LENGTH = 11, 8, 6

# The optimizer's part of a config.
BASE = dict(
    learning_rate=1e-2,
    schedule="constant",
    warmup_steps=0,
    decay_steps=0,
    final_fraction=0.1,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.0,
    decay=("kernel",),
    clip_norm=0.0,
)


class Bigram:
    """Embedding, a gated layer and a head; leaf names as in a real model, those that never decay included."""

    def init(self, seed: int = 0) -> Any:
        keys = iter(jax.random.split(jax.random.key(seed), 16))

        def normal(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.float32) * 0.5

        return {
            "embed": {"embedding": normal(VOCAB, WIDTH)},
            "layers": {
                "G": {
                    "mixer": {
                        "A_log": normal(WIDTH),
                        "dt_bias": normal(WIDTH),
                        "D": normal(WIDTH),
                        "conv": {"weight": normal(4, WIDTH), "bias": normal(WIDTH)},
                        "q": {"kernel": normal(WIDTH, WIDTH)},
                    },
                    "norm": {"scale": 1 + normal(WIDTH)},
                }
            },
            "head": {"kernel": normal(WIDTH, VOCAB), "bias": normal(VOCAB)},
        }

    def loss(self, variables: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        params = variables["params"]
        layer = params["layers"]["G"]
        mixer = layer["mixer"]
        x = params["embed"]["embedding"][batch["tokens"]]
        gate = jnp.exp(-jnp.exp(mixer["A_log"])) * mixer["conv"]["weight"].sum(0) + mixer["conv"]["bias"]
        x = x + jnp.tanh(x @ mixer["q"]["kernel"] * layer["norm"]["scale"] * gate + mixer["dt_bias"]) * mixer["D"]
        logits = x @ params["head"]["kernel"] + params["head"]["bias"]
        weights = batch["weights"]
        log_z = jax.nn.logsumexp(logits, axis=-1)
        target = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        aux = {
            "z_loss": 1e-3 * jnp.sum(weights * log_z**2),
            "weight": jnp.sum(weights),
            "correct": jnp.sum(weights * (jnp.argmax(logits, axis=-1) == batch["targets"])),
        }
        return jnp.sum(weights * (log_z - target)), aux


def make_batch(valid: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """One row per entry of `valid`, which says how many of the row's first tokens count."""
    rng = np.random.default_rng(seed)
    valid = np.asarray(valid)
    shape = (len(valid), LENGTH)
    return {
        "tokens": rng.integers(0, VOCAB, shape).astype(np.int32),
        "targets": rng.integers(0, VOCAB, shape).astype(np.int32),
        "weights": (np.arange(LENGTH) < valid[:, None]).astype(np.float32),
    }
