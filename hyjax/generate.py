"""Text from a model: one prefill over the prompt, then a compiled loop of single steps with a fixed-size state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hyjax.models import HybridLM

# (params, prompt [B,T], key) -> tokens [B,new_tokens]
Sampler = Callable[[Any, jax.typing.ArrayLike, jax.Array], jax.Array]


def make_sampler(model: HybridLM, new_tokens: int, temperature: float) -> Sampler:
    """Jitted `sample(params, prompt, key)`: `new_tokens` (at least 1) ids that follow each row of int32 prompts [B,T].

    Each is drawn from softmax(logits / temperature); temperature 0 takes the most likely. Rows are independent.
    """

    def draw(logits: jax.Array, key: jax.Array) -> jax.Array:
        if temperature == 0:
            return logits.argmax(axis=-1).astype(jnp.int32)
        return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)

    @jax.jit
    def sample(params: Any, prompt: jax.Array, key: jax.Array) -> jax.Array:
        variables = {"params": params}
        state = model.init_state(prompt.shape[0], prompt.shape[1] + new_tokens)
        out = model.apply(variables, prompt, None, state)
        keys = jax.random.split(key, new_tokens)
        token = draw(out.logits[:, -1], keys[0])

        def step(carry: tuple[Any, jax.Array], key: jax.Array) -> tuple[tuple[Any, jax.Array], jax.Array]:
            state, token = carry
            out = model.apply(variables, token[:, None], None, state)
            return (out.state, draw(out.logits[:, -1], key)), token

        (_, last), tokens = lax.scan(step, (out.state, token), keys[1:])
        return jnp.concatenate([tokens, last[None]]).T

    return sample
