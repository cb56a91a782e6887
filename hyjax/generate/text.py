"""Continuations of texts: prompts to ids, ids back to text as they come, and texts that end before a stop text.

Text is given out only once it is certain. A character may span tokens, so what ends in U+FFFD waits for the rest of it;
a stop text may span tokens too, so what may be its beginning waits until it is not, or is cut away. The pieces of a row
therefore join to the text that the row has when nobody looks in between, however many tokens a look takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from hyjax.generate.generator import Generation, Generator
from hyjax.generate.sampling import Sampling

# Tokens between two looks at what has been drawn, where someone reads along or a stop text is waited for.
BLOCK = 8

# Ids of the prompt that are decoded before the new ones: some tokenizers drop a space in front of the first id.
CONTEXT = 8

# Bytes of a character that may still be missing, each of which may show as a U+FFFD of its own.
UNFINISHED = 3


class Tokenizer(Protocol):
    """What is asked of a tokenizer here; hyjax.data.tokenizers has some."""

    name: str
    eos: int | None

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: Iterable[int]) -> str: ...


@dataclasses.dataclass(frozen=True)
class TextContinuation:
    """What follows a prompt.

    Attributes:
      prompt, text: as given, and what follows; `text` ends before a stop text, and holds no end of document.
      prompt_ids, ids: what the model read and drew, up to the id that ended the text and with it.
      reason: "eos", "stop id", "stop text" or "length".
    """

    prompt: str
    text: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    reason: str


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a prompt; of an empty one what stands before a document: the end of another or, without ends, a space.

    Raises ValueError where that leaves no token to start from.
    """
    try:
        ids = np.asarray(tokenizer.encode(text)).tolist()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt {text!r} is not Unicode text: {error.reason}") from error
    if text and not ids:
        raise ValueError(f"the tokenizer {tokenizer.name} finds no token in the prompt {text!r}")
    if ids:
        return ids
    if tokenizer.eos is not None:
        return [tokenizer.eos]
    space = np.asarray(tokenizer.encode(" ")).tolist()
    if len(space) != 1:
        raise ValueError(
            f"an empty prompt needs a token to start from, and the tokenizer {tokenizer.name} has neither an end of"
            " document nor a token for a space: give a prompt"
        )
    return space


def generate_text(
    generator: Generator, tokenizer: Tokenizer, prompts: Sequence[str], sampling: Sampling
) -> list[TextContinuation]:
    """Each prompt's continuation. Raises ValueError as `prompt_ids` and `Generator.start` do."""
    stream = TextStream(generator, tokenizer, prompts, sampling, BLOCK if sampling.stop else None)
    for _ in stream:
        pass
    return stream.continuations()


class TextStream:
    """Continuations as they come: an iterator over looks, each a list of what is new in every row's text.

    Args:
      block: tokens between two looks; None: one look, when all rows are done.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        sampling: Sampling,
        block: int | None = BLOCK,
    ):
        self._sampling, self._block, self._prompts = sampling, block, list(prompts)
        self._ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
        self._generation = generator.start(self._ids, sampling)
        self._rows = [_RowText(tokenizer, ids, sampling.stop) for ids in self._ids]

    def __iter__(self) -> Iterator[list[str]]:
        going = True
        while going:
            going = self._generation.advance(self._block)
            for row, text in enumerate(self._rows):
                text.read(self._generation, row)
            going = not all(self._generation.done)
            yield [text.new() for text in self._rows]

    @property
    def done(self) -> list[bool]:
        """Which rows will get no more text."""
        return list(self._generation.done)

    def continuations(self) -> list[TextContinuation]:
        """What each prompt got, once the iteration is over."""
        rows = zip(self._prompts, self._rows, self._ids, self._generation.continuations(), strict=True)
        return [
            TextContinuation(prompt, row.text, tuple(ids), found.ids, found.reason) for prompt, row, ids, found in rows
        ]


class _RowText:
    """The text of one row: all that is certain of it, and how much of that has been given out."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, stop
        self._context = list(prompt[-CONTEXT:])
        self._before = tokenizer.decode(self._context)
        self._length = 0  # ids that have been read
        self._given = 0
        self._over = False
        self.text = ""

    def read(self, generation: Generation, row: int) -> None:
        """Takes in what the row has drawn, and stops it where a stop text is complete."""
        if self._over:
            return
        ids, done = generation.ids[row], generation.done[row]
        read, self._length, self._over = self._length, len(ids), done
        if done and generation.reason(row) in ("eos", "stop id"):
            ids = ids[:-1]
        text = self._decode(ids)
        if any(stop in text for stop in self._stop):
            length = next(n for n in range(read + 1, len(ids) + 1) if self._cut(self._decode(ids[:n])) is not None)
            self.text = self._cut(self._decode(ids[:length])) or ""
            generation.stop(row, length, "stop text")
            self._over = True
        else:
            self.text = text if done else self._certain(text)

    def new(self) -> str:
        """What has become certain since the last time."""
        text, self._given = self.text[self._given :], max(self._given, len(self.text))
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        whole = self._tokenizer.decode([*self._context, *ids])
        return whole[len(self._before) :] if whole.startswith(self._before) else self._tokenizer.decode(ids)

    def _cut(self, text: str) -> str | None:
        """The text before the first stop text; None where there is none."""
        places = [text.find(stop) for stop in self._stop if stop in text]
        return text[: min(places)] if places else None

    def _certain(self, text: str) -> str:
        """The text without the end that the next token may change or that may begin a stop text."""
        end = len(text)
        while end and len(text) - end < UNFINISHED and text[end - 1] == "\ufffd":
            end -= 1
        return text[: min(_before_stop(text, self._stop), _before_stop(text[:end], self._stop))]


def _before_stop(text: str, stop: Sequence[str]) -> int:
    """The length of `text` without its end that begins a stop text."""
    begun = [n for word in stop for n in range(1, len(word)) if text.endswith(word[:n])]
    return len(text) - max(begun, default=0)
