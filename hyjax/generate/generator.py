"""Continuations of prompts, as ids: the host's side of `Decoder`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hyjax.generate.decoder import Decoder, Rows, start
from hyjax.generate.sampling import Rule, Sampling
from hyjax.models import HybridLM

# Tokens of a prompt that are read at once. Reading the weights is paid once a piece, padding up to a whole one.
PREFILL_CHUNK = 128

Ids = Sequence[int] | np.ndarray

# (params, prompt [B,T], key) -> tokens [B,new_tokens]
Sampler = Callable[[Any, jax.typing.ArrayLike, jax.Array], jax.Array]


class NonFiniteLogitsError(RuntimeError):
    """The model gave logits that are not finite: its parameters are not, or its arithmetic overflowed."""


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What follows a prompt.

    Attributes:
      ids: every id drawn, the one that ended the text included.
      reason: "eos", "stop id", "stop text" or "length" (as many tokens as were asked for).
    """

    ids: tuple[int, ...]
    reason: str


class Generator:
    """Continues prompts of any lengths, several at once.

    Two programs are compiled for a number of prompts, whatever their lengths and the sampling: one reads a piece of the
    prompts, the other draws tokens.

    Args:
      model, params: the model and its parameters, {"embed": ..., "layers": ..., ...}, of whose layers a copy is made.
      room: tokens that a row may hold, its prompt's and the new ones but the last (which no one reads).
      eos: the id that ends a text; None where there is none.
      prefill_chunk: tokens of a prompt that are read at once. No value depends on it beyond rounding.
      apart: whether layers are compiled one by one (see `Decoder`); None: where they are not too many.
    """

    def __init__(
        self,
        model: HybridLM,
        params: dict[str, Any],
        room: int,
        *,
        eos: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        apart: bool | None = None,
    ):
        for name, value in (("room", room), ("prefill_chunk", prefill_chunk)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number from 1 up")
        self.decoder = Decoder(model, apart)
        self.room, self.eos, self.prefill_chunk = room, eos, prefill_chunk
        self.vocab_size: int = model.config["vocab_size"]
        self.max_positions: int | None = (
            model.config["max_positions"] if model.config["position"] == "learned" else None
        )
        self.params = jax.jit(self.decoder.params)(params)
        self.init_state = jax.jit(self.decoder.init_state, static_argnums=(0, 1))
        self.prefill = jax.jit(self.decoder.prefill, donate_argnums=1)
        self.decode = jax.jit(self.decoder.decode, donate_argnums=1)

    def generate(
        self, prompts: Sequence[Ids], sampling: Sampling, numbers: Sequence[int] | None = None
    ) -> list[Continuation]:
        """Each prompt's continuation; see `start`. `sampling.stop` needs text: see hyjax.generate.text."""
        if sampling.stop:
            raise ValueError(f"stop is {sampling.stop!r}; ids have no text to look for it in: use generate_text")
        generation = self.start(prompts, sampling, numbers)
        generation.advance()
        return generation.continuations()

    def start(self, prompts: Sequence[Ids], sampling: Sampling, numbers: Sequence[int] | None = None) -> Generation:
        """Reads the prompts, ids each, and draws nothing yet.

        Args:
          numbers: each prompt's number, which with the seed makes its random key; None: 0, 1, … So a prompt that is
            given twice is continued in two ways, and prompt i alone as in the batch where its number is i.

        Raises:
          ValueError: no prompt, an empty one, an id outside the vocabulary, or too little room.
        """
        rows = [np.asarray(prompt) for prompt in prompts]
        self._check(rows, sampling)
        numbers = range(len(rows)) if numbers is None else numbers
        if len(numbers) != len(rows):
            raise ValueError(f"there are {len(numbers)} numbers for {len(rows)} prompts")
        rule = Rule.of(sampling, self.vocab_size, self.eos)
        state, overflow = self._read([row[:-1] for row in rows])
        seen = np.zeros((len(rows), self.vocab_size), bool)
        for row, ids in zip(seen, rows, strict=True):
            row[ids] = True
        last = np.array([row[-1] for row in rows], np.int32)
        key = jax.random.key(sampling.seed)
        keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.asarray(numbers, jnp.uint32))
        return Generation(self, start(state, overflow, jnp.asarray(last), jnp.asarray(seen), keys, self.room), rule)

    def _check(self, prompts: list[np.ndarray], sampling: Sampling) -> None:
        if not prompts:
            raise ValueError("there is no prompt")
        for i, ids in enumerate(prompts):
            which = f"prompt {i + 1}" if len(prompts) > 1 else "the prompt"
            if not len(ids):
                raise ValueError(f"{which} holds no token; the model needs one to start from")
            if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
                raise ValueError(f"{which} must be a row of whole numbers; got {ids.dtype} {list(ids.shape)}")
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                wrong = ids.min() if ids.min() < 0 else ids.max()
                raise ValueError(f"{which} holds id {wrong}, which is not in the vocabulary of {self.vocab_size}")
            new = sampling.max_new_tokens
            need = len(ids) + new - 1
            for room, what in ((self.max_positions, "model.max_positions is"), (self.room, "there is room for")):
                if room is not None and need > room:
                    most = f"at most {room + 1 - len(ids)} new ones" if room >= len(ids) else "none"
                    raise ValueError(
                        f"{which} of {len(ids)} tokens and {new} new ones need {need} places; {what} {room}: {most} fit"
                    )

    def _read(self, prompts: list[np.ndarray]):
        """The state after these ids, and overflow [B]: pieces of one length, the last ones padded."""
        batch, size = len(prompts), self.prefill_chunk
        state = self.init_state(batch, self.room)
        overflow = jnp.zeros((batch,), bool)
        length = np.array([len(ids) for ids in prompts])
        whole = np.zeros((batch, -(-int(length.max()) // size) * size), np.int32)
        for row, ids in zip(whole, prompts, strict=True):
            row[: len(ids)] = ids
        for first in range(0, whole.shape[1], size):
            valid = np.arange(first, first + size) < length[:, None]
            state, full = self.prefill(self.params, state, whole[:, first : first + size], valid)
            overflow |= full
        return state, overflow


class Generation:
    """A call under way: what has been drawn, and drawing more.

    Attributes:
      ids: the ids that each row has drawn.
      stopped: what ended a row from outside, by `stop`.
    """

    def __init__(self, generator: Generator, rows: Rows, rule: Rule):
        self.generator, self.rows, self.rule = generator, rows, rule
        self._ends = np.asarray(rule.ends)
        self.ids: list[list[int]] = [[] for _ in range(rows.count.shape[0])]
        self.done = [False] * len(self.ids)
        self.stopped: list[str | None] = [None] * len(self.ids)

    def advance(self, tokens: int | None = None) -> bool:
        """Draws up to so many more tokens a row (None: all that are asked for); False once every row is done.

        Raises NonFiniteLogitsError where the model's logits are no numbers to draw from.
        """
        if all(self.done):
            return False
        most = self.rule.limit if tokens is None else np.int32(tokens)
        self.rows = self.generator.decode(self.generator.params, self.rows, self.rule, most)
        drawn, count, done, overflow, finite = jax.device_get(
            (self.rows.tokens, self.rows.count, self.rows.done, self.rows.overflow, self.rows.finite)
        )
        if not finite.all():
            raise NonFiniteLogitsError(f"the model's logits after prompt {int(finite.argmin()) + 1} are not finite")
        if overflow.any():
            raise RuntimeError(f"prompt {int(overflow.argmax()) + 1} found no room in the state, which was checked")
        for row, (ids, n) in enumerate(zip(drawn, count, strict=True)):
            if self.stopped[row] is None:
                self.ids[row] = ids[:n].tolist()
        self.done = done.tolist()
        return not all(self.done)

    def stop(self, row: int, length: int, reason: str) -> None:
        """Ends a row after its first `length` ids; what it drew past them is forgotten."""
        self.ids[row] = self.ids[row][:length]
        self.stopped[row], self.done[row] = reason, True
        self.rows = dataclasses.replace(self.rows, done=jnp.asarray(self.done))

    def continuations(self) -> list[Continuation]:
        """What each row drew, once all are done."""
        return [Continuation(tuple(ids), self.reason(row)) for row, ids in enumerate(self.ids)]

    def reason(self, row: int) -> str:
        """Why a row is done."""
        if (why := self.stopped[row]) is not None:
            return why
        last = self.ids[row][-1]
        if not self._ends[last]:
            return "length"
        return "eos" if last == self.generator.eos else "stop id"


def make_sampler(model: HybridLM, new_tokens: int, temperature: float) -> Sampler:
    """Jitted `sample(params, prompt, key)`: `new_tokens` (at least 1) ids that follow each row of int32 prompts [B,T].

    One program that reads the prompt at once and ends no row before; for texts of one length, such as those that
    training shows of itself. Temperature 0 takes the most likely id. Rows are independent.
    """
    decoder = Decoder(model, apart=False)  # compiled as fast as can be: it is run a few times
    vocab_size = model.config["vocab_size"]
    rule = Rule.of(Sampling(new_tokens, float(temperature)), vocab_size, None)

    @jax.jit
    def sample(params: Any, prompt: jax.Array, key: jax.Array) -> jax.Array:
        batch, length = prompt.shape
        state = decoder.init_state(batch, length + new_tokens)
        if length > 1:
            state, _ = decoder.prefill(params, state, prompt[:, :-1], jnp.ones((batch, length - 1), bool))
        none, seen = jnp.zeros((batch,), bool), jnp.zeros((batch, vocab_size), bool)
        rows = start(state, none, prompt[:, -1], seen, jax.random.split(key, batch), new_tokens)
        return decoder.decode(params, rows, rule, new_tokens).tokens

    return sample
