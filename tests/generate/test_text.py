"""Text as it comes: whole characters, stop texts across tokens and looks, and what a prompt becomes.

The rows' ids are scripted here, so that every border can be put anywhere.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.data.tokenizers import ByteTokenizer, LetterTokenizer
from hyjax.generate import Continuation, Sampling, TextStream, generate_text, prompt_ids

EOS = 256


class ScriptedGenerator:
    """Draws what it is told to; an id in `ends` or the script's end ends a row."""

    def __init__(self, scripts, ends=(EOS,)):
        self.scripts, self.ends = scripts, ends

    def start(self, prompts, sampling):
        return ScriptedGeneration(self.scripts, self.ends)


class ScriptedGeneration:
    def __init__(self, scripts, ends):
        self.scripts, self.ends = [list(script) for script in scripts], ends
        self.ids = [[] for _ in scripts]
        self.stopped = [None] * len(scripts)
        self.looks = 0

    def _over(self, row):
        ids = self.ids[row]
        return bool(self.stopped[row]) or len(ids) == len(self.scripts[row]) or (ids and ids[-1] in self.ends)

    @property
    def done(self):
        return [bool(self._over(row)) for row in range(len(self.ids))]

    def advance(self, tokens=None):
        self.looks += 1
        for row, script in enumerate(self.scripts):
            for _ in range(len(script) if tokens is None else tokens):
                if not self._over(row):
                    self.ids[row].append(script[len(self.ids[row])])
        return not all(self.done)

    def stop(self, row, length, reason):
        self.ids[row], self.stopped[row] = self.ids[row][:length], reason

    def reason(self, row):
        return self.stopped[row] or ("eos" if self.ids[row][-1] in self.ends else "length")

    def continuations(self):
        return [Continuation(tuple(ids), self.reason(row)) for row, ids in enumerate(self.ids)]


class Pairs:
    """A tokenizer whose every id is two characters, so that texts begin and end inside tokens."""

    name, eos = "pairs", None
    letters = "ab"

    def encode(self, text):
        return np.array([0], np.int32)

    def decode(self, ids):
        return "".join(self.letters[int(i) // 2] + self.letters[int(i) % 2] for i in ids)


def pieces_of(scripts, block, stop=(), tokenizer=None, prompts=None):
    tokenizer = tokenizer or ByteTokenizer()
    prompts = prompts or ["x"] * len(scripts)
    stream = TextStream(ScriptedGenerator(scripts), tokenizer, prompts, Sampling(stop=stop), block)
    pieces = list(stream)
    return [[look[row] for look in pieces] for row in range(len(scripts))], stream.continuations()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("aß€😀".encode()) | st.integers(0, 256), min_size=1), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 7, None]),
    st.lists(st.text("aß€b", min_size=1, max_size=3), max_size=2).map(tuple),
)  # fmt: skip
def test_pieces_join_to_the_text(scripts, block, stop):
    """Of any bytes, in looks of any length: what is shown, joined, is the text of one look; and stops cut alike."""
    shown, found = pieces_of(scripts, block, stop)
    _, whole = pieces_of(scripts, 1, stop)
    assert found == whole
    assert ["".join(row) for row in shown] == [out.text for out in found]
    for script, out in zip(scripts, found, strict=True):
        assert not any(word in out.text for word in stop)
        ids = script[: script.index(EOS)] if EOS in script else script
        text = ByteTokenizer().decode(ids)
        cuts = [text.find(word) for word in stop if word in text]
        assert (out.reason == "stop text") == bool(cuts)
        if not cuts:
            assert out.text == text and out.ids == tuple(script[: len(ids) + 1])


def test_characters_are_never_shown_in_half():
    """Four bytes of one character, a byte a look."""
    (shown,), _ = pieces_of(["a😀b".encode()], 1)
    assert shown == ["a", "", "", "", "😀", "b"]


def test_bytes_that_are_no_character_are_shown_once_that_is_certain():
    (shown,), (out,) = pieces_of([[0xF0, 0x9F, 0x41, 0xE2]], 1)
    assert shown == ["", "", "\ufffdA", "\ufffd"] and out.text == "\ufffdA\ufffd"


def test_a_stop_text_across_tokens_and_looks():
    """What may be its beginning waits; it and what follows are cut; the ids end with the token that completes it."""
    (shown,), (out,) = pieces_of([b"one END two"], 1, stop=("END",))
    assert "".join(shown) == out.text == "one " and out.reason == "stop text"
    assert out.ids == tuple(b"one END")
    (shown,), (out,) = pieces_of([b"one ENbody"], 1, stop=("END",))
    assert shown[:8] == ["o", "n", "e", " ", "", "", "ENb", "o"] and out.reason == "length"


def test_a_stop_text_with_a_character_in_pieces():
    """Its first letter waits too, while the bytes of its second come one by one."""
    (shown,), (out,) = pieces_of(["ab€c".encode()], 1, stop=("b€",))
    assert shown == ["a", "", "", "", ""] and out.text == "a"


def test_a_stop_text_inside_a_token():
    """'ab' 'ba' with the stop 'bb': it begins in one token and ends in the next, with a letter after it."""
    for block in (1, 2, None):
        _, (out,) = pieces_of([[1, 2, 0]], block, stop=("bb",), tokenizer=Pairs(), prompts=[" "])
        assert out.text == "a" and out.ids == (1, 2)


def test_the_first_of_several_stop_texts_counts():
    for stop in (("cd", "b"), ("b", "cd")):
        _, (out,) = pieces_of([b"aabcd"], 4, stop=stop)
        assert out.text == "aa" and out.ids == tuple(b"aab")


def test_a_stop_text_ends_one_row_alone():
    shown, found = pieces_of([b"abcdef", b"ghijkl"], 2, stop=("bc",))
    assert [out.text for out in found] == ["a", "ghijkl"]
    assert [out.reason for out in found] == ["stop text", "length"]
    assert ["".join(row) for row in shown] == ["a", "ghijkl"]


def test_the_end_of_a_document_is_no_text():
    _, (out,) = pieces_of([[*b"ab", EOS, *b"cd"]], 8)
    assert out.text == "ab" and out.ids == (*b"ab", EOS) and out.reason == "eos"


def test_a_space_before_the_first_word_stays():
    """Tokenizers of the sentencepiece kind drop the space of the first token that they decode."""

    class Words:
        name, eos = "words", None

        def encode(self, text):
            return np.array([0], np.int32)

        def decode(self, ids):
            return " ".join(("one", "two", "three")[int(i)] for i in ids)

    (shown,), (out,) = pieces_of([[1, 2]], 1, tokenizer=Words())
    assert shown == [" two", " three"] and out.text == " two three"


def test_generate_text_is_the_stream():
    scripts, stop = ["wörd, stop".encode(), b"nothing"], ("stop",)
    found = generate_text(ScriptedGenerator(scripts), ByteTokenizer(), ["a", "b"], Sampling(stop=stop))
    assert found == pieces_of(scripts, 3, stop, prompts=["a", "b"])[1]
    assert found[0].text == "wörd, " and found[0].prompt == "a" and found[0].prompt_ids == (97,)


# ------------------------------------------------------------------------------------------------ prompts


def test_an_empty_prompt_starts_as_training_shows_it():
    """The end of another document; a space where documents just end."""
    assert prompt_ids(ByteTokenizer(), "") == [256]
    assert prompt_ids(LetterTokenizer(), "") == [0]
    assert prompt_ids(ByteTokenizer(), "é") == [0xC3, 0xA9]
    endless = SimpleNamespace(name="odd", eos=None, encode=lambda text: np.array([], np.int32))
    with pytest.raises(ValueError, match="the tokenizer odd has neither an end of document nor a token for a space"):
        prompt_ids(endless, "")


def test_prompts_that_are_no_text():
    with pytest.raises(ValueError, match=r"the prompt 'a\\udc80' is not Unicode text: surrogates not allowed"):
        prompt_ids(ByteTokenizer(), "a\udc80")
    nothing = SimpleNamespace(name="odd", eos=3, encode=lambda text: np.array([], np.int32))
    with pytest.raises(ValueError, match="the tokenizer odd finds no token in the prompt 'ab'"):
        prompt_ids(nothing, "ab")
