"""How the next token is chosen: a penalty, a temperature and three filters, in the order that is common practice.

    repetition penalty (Keskar et al. 2019): logits l of ids that the row holds become l / r, or l · r below 0
    temperature: l / t; 0 takes the most likely id and looks at no filter
    top-k (Fan et al. 2018): the k most likely
    top-p (Holtzman et al. 2020): of those, the fewest most likely whose probabilities sum to at least p
    min-p (Nguyen et al. 2024): those at least p times as likely as the most likely one

What is left is renormalised after each filter. Ids of equal logits stay or go together, so a filter may keep a few more
than it says. All values are traced: other ones need no other program.

Shapes: `B` batch, `V` vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What is asked of a continuation; raises ValueError, one sentence, for a value that means nothing.

    Attributes:
      max_new_tokens: the most tokens that are drawn.
      temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off. repetition_penalty: 1 is off.
      stop: a text that holds one of these ends before it.
      stop_ids: ids that end a text. So does the tokenizer's end of document, unless `ignore_eos`.
      seed: with a prompt's number and how many tokens it has drawn, all that a draw depends on.
    """

    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (kind, words, holds) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
                raise ValueError(f"{name} is {value!r}; it must be {'a whole number' if kind is int else 'a number'}")
            if not (math.isfinite(value) and holds(value)):
                raise ValueError(f"{name} is {value}; it must be {words}")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop is {self.stop!r}; it must be a tuple of texts, none of them empty")
        if not isinstance(self.stop_ids, tuple) or not all(type(i) is int and i >= 0 for i in self.stop_ids):
            raise ValueError(f"stop_ids is {self.stop_ids!r}; it must be a tuple of ids, whole numbers from 0 up")


_RANGES: dict[str, tuple[type, str, Callable[[Any], bool]]] = {
    "max_new_tokens": (int, "at least 1", lambda x: 1 <= x < 2**31),
    "temperature": (float, "at least 0", lambda x: x >= 0),
    "top_k": (int, "at least 1, or 0 for off", lambda x: 0 <= x < 2**31),
    "top_p": (float, "above 0 and at most 1 (off)", lambda x: 0 < x <= 1),
    "min_p": (float, "at least 0 (off) and at most 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": (float, "from 0.01 to 100, where 1 is off", lambda x: 0.01 <= x <= 100),
    "seed": (int, "from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32),
}


@struct.dataclass
class Rule:
    """`Sampling` as the compiled loop takes it: scalars, and which ids end a row, bool [V]."""

    limit: jax.Array  # tokens a row
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    penalty: jax.Array
    ends: jax.Array

    @classmethod
    def of(cls, sampling: Sampling, vocab_size: int, eos: int | None) -> Rule:
        """Raises ValueError where an id that shall end a row is not in the vocabulary."""
        ends = np.zeros(vocab_size, bool)
        for i in (*sampling.stop_ids, *(() if eos is None or sampling.ignore_eos else (eos,))):
            if not 0 <= i < vocab_size:
                raise ValueError(f"stop id {i} is not in the vocabulary of {vocab_size}")
            ends[i] = True
        # a millionth and a million are the limits, greedy and uniform, in all the digits that float32 has
        temperature = min(sampling.temperature, 1e6) if sampling.temperature >= 1e-6 else 0
        return cls(
            limit=jnp.int32(sampling.max_new_tokens),
            temperature=jnp.float32(temperature),
            top_k=jnp.int32(min(sampling.top_k, vocab_size)),
            top_p=jnp.float32(sampling.top_p),
            min_p=jnp.float32(sampling.min_p),
            penalty=jnp.float32(sampling.repetition_penalty),
            ends=jnp.asarray(ends),
        )


def draw(logits: jax.Array, seen: jax.Array, keys: jax.Array, rule: Rule) -> jax.Array:
    """An id a row, int32 [B]: logits float32 [B,V], seen bool [B,V] (ids that the row holds), keys [B].

    A row's draw depends on its own logits and key alone.
    """
    penalised = jnp.where(logits > 0, logits / rule.penalty, logits * rule.penalty)
    logits = jnp.where(seen, penalised, logits)
    greedy = lambda: logits.argmax(axis=-1)
    sample = lambda: jax.vmap(jax.random.categorical)(keys, filtered(logits, rule))
    return lax.cond(rule.temperature == 0, greedy, sample).astype(jnp.int32)


def filtered(logits: jax.Array, rule: Rule) -> jax.Array:
    """Penalised logits [B,V] after temperature and filters: -inf where an id is out, 0 for the most likely."""
    logits = (logits - logits.max(axis=-1, keepdims=True)) / rule.temperature
    # sorting is most of the work where the vocabulary is large, so it is left out where nothing asks for it
    sorts = (rule.top_k > 0) | (rule.top_p < 1)
    logits = lax.cond(sorts, lambda: _most_likely(logits, rule), lambda: logits)
    return jnp.where(logits < jnp.log(rule.min_p), -jnp.inf, logits)


def _most_likely(logits: jax.Array, rule: Rule) -> jax.Array:
    """top-k, then top-p."""
    falling = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    last = jnp.where(rule.top_k > 0, rule.top_k, logits.shape[-1]) - 1
    kth = lax.dynamic_index_in_dim(falling, last, axis=-1)
    falling = jnp.where(falling < kth, -jnp.inf, falling)
    probabilities = jax.nn.softmax(falling, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # of all that are more likely
    inside = (before < rule.top_p) | (rule.top_p >= 1)
    least = jnp.min(jnp.where(inside, falling, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < jnp.maximum(least, kth), -jnp.inf, logits)
