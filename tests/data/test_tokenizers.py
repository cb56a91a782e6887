"""Ids and back."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyjax.data.tokenizers import get_tokenizer

TIME_MACHINE = Path(__file__).parents[3] / "shared" / "data" / "timemachine.txt"


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = get_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == "int32" and ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eos]) == text


def test_bytes_decode_survives_a_cut_character():
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.decode([0xC3, 256, 65]) == "\ufffdA"
    assert (tokenizer.vocab_size, tokenizer.eos) == (257, 256)
    assert tokenizer.token_bytes.sum() == 256 and tokenizer.token_bytes[256] == 0


@given(st.text())
def test_letters_round_trip_of_the_reduced_text(text):
    tokenizer = get_tokenizer("letters")
    ids = tokenizer.encode(text)
    assert set(ids.tolist()) <= {0, *range(2, 28)}
    reduced = tokenizer.decode(ids)
    assert "  " not in reduced
    assert tokenizer.encode(reduced).tolist() == ids.tolist()
    assert reduced.replace(" ", "") == "".join(c for c in text if c.isascii() and c.isalpha()).lower()


def test_letters_by_hand():
    tokenizer = get_tokenizer("letters")
    assert tokenizer.encode("It's  1 Zoé!").tolist() == [10, 21, 0, 20, 0, 27, 16, 0]
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.decode([1])) == (28, None, "<unk>")


@pytest.mark.skipif(not TIME_MACHINE.exists(), reason="the book lies beside the repository only on some machines")
def test_letters_of_the_time_machine():
    ids = get_tokenizer("letters").encode(TIME_MACHINE.read_bytes())
    assert len(ids) == 173_428
    assert ids[:10].tolist() == [21, 9, 6, 0, 21, 10, 14, 6, 0, 14]


def test_unknown_tokenizer():
    with pytest.raises(ValueError, match=r"data.tokenizer is 'byte', .* did you mean bytes"):
        get_tokenizer("byte")
