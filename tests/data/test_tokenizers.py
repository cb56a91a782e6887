"""Ids and back: bytes, letters, and files of the `tokenizers` library."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from hyjax.data.bpe import train_bpe
from hyjax.data.sources import read_documents
from hyjax.data.tokenizers import FileTokenizer, get_tokenizer

TIME_MACHINE = Path(__file__).parents[3] / "shared" / "data" / "timemachine.txt"
TOPICS = [document.text for document in read_documents("topics")]


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = get_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == "int32" and ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eos]) == text
    ids, first_bytes = tokenizer.encode_document(text.encode())
    assert (ids.tolist(), first_bytes) == (([*text.encode(), 256], 1) if text else ([], 0))


def test_bytes_decode_survives_a_cut_character():
    tokenizer = get_tokenizer("bytes")
    assert tokenizer.decode([0xC3, 256, 65]) == "\ufffdA"
    assert (tokenizer.vocab_size, tokenizer.eos) == (257, 256)
    assert get_tokenizer("auto").identity == {"name": "bytes", "sha256": "", "eos": 256}


@given(st.text())
def test_letters_round_trip_of_the_reduced_text(text):
    tokenizer = get_tokenizer("letters")
    ids = tokenizer.encode(text)
    assert set(ids.tolist()) <= {0, *range(2, 28)}
    reduced = tokenizer.decode(ids)
    assert "  " not in reduced
    assert tokenizer.encode(reduced).tolist() == ids.tolist()
    assert reduced.replace(" ", "") == "".join(c for c in text if c.isascii() and c.isalpha()).lower()
    given, first_bytes = tokenizer.encode_document(text.encode())  # a predicted letter counts as a byte
    assert given.tolist() == ids.tolist() and len(text.encode()) - first_bytes == max(0, len(ids) - 1)


def test_letters_by_hand():
    tokenizer = get_tokenizer("letters")
    assert tokenizer.encode("It's  1 Zoé!").tolist() == [10, 21, 0, 20, 0, 27, 16, 0]
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.decode([1])) == (28, None, "<unk>")


@pytest.mark.skipif(not TIME_MACHINE.exists(), reason="the book lies beside the repository only on some machines")
def test_letters_of_the_time_machine():
    ids = get_tokenizer("letters").encode(TIME_MACHINE.read_bytes())
    assert len(ids) == 173_428
    assert ids[:10].tolist() == [21, 9, 6, 0, 21, 10, 14, 6, 0, 14]


def test_unknown_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"data.tokenizer is 'byte', .* did you mean bytes"):
        get_tokenizer("byte")
    with pytest.raises(ValueError, match=r"'some/vocab.txt': a file of the `tokenizers` library ends in .json"):
        get_tokenizer("some/vocab.txt")
    with pytest.raises(ValueError, match=r"data.eos='</s>' names a token of a `tokenizers` file, but 'bytes' ends"):
        get_tokenizer("bytes", "</s>")
    with pytest.raises(ValueError, match="but 'letters' has no end of document"):
        get_tokenizer("letters", "</s>")


# ------------------------------------------------------------------------------------------------ files


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("bpe") / "bpe.json"
    result = train_bpe(TOPICS, file, vocab_size=600)
    assert result == dict(documents=65, bytes=sum(map(len, TOPICS)), vocab_size=600, out=str(file))
    return file


def test_training_is_deterministic(bpe, tmp_path):
    """In another process, with one thread and another order of hashes: the same file."""
    script = "import sys; from hyjax.data.bpe import train_bpe; from hyjax.data.sources import read_documents\n"
    script += "train_bpe([d.text for d in read_documents('topics')], sys.argv[1], vocab_size=600)"
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "b.json")], env=environment, check=True)
    assert (tmp_path / "b.json").read_bytes() == bpe.read_bytes()


@given(text=st.text())
def test_byte_level_bpe_round_trip(bpe, text):
    """Lossless, whatever the text: characters never seen, and the names of special tokens."""
    tokenizer = _loaded(str(bpe))
    for whole in (text, f"{text}<|endoftext|>{text}"):
        ids = tokenizer.encode(whole)
        assert ids.dtype == "int32" and tokenizer.eos not in ids
        assert tokenizer.decode([*ids, tokenizer.eos]) == whole


_cache: dict[str, FileTokenizer] = {}


def _loaded(file: str) -> FileTokenizer:
    return _cache.setdefault(file, FileTokenizer(file))


def test_a_file_as_a_tokenizer(bpe):
    tokenizer = get_tokenizer(str(bpe))
    assert (tokenizer.vocab_size, tokenizer.eos, tokenizer.eos_token) == (600, 0, "<|endoftext|>")
    assert tokenizer.identity == {"name": tokenizer.name, "sha256": tokenizer.sha256, "eos": 0}
    assert tokenizer.name == f"BPE-{tokenizer.sha256[:8]}"
    some = [*TOPICS[:5], b"", "漢字 für 🌍".encode()]
    together = tokenizer.encode_documents(some)
    for text, (ids, first_bytes) in zip(some, together, strict=True):
        alone, first_alone = tokenizer.encode_document(text)
        assert alone.tolist() == ids.tolist() and first_alone == first_bytes
        assert ids.tolist() == ([*tokenizer.encode(text), 0] if text else [])
        assert tokenizer.decode(ids) == text.decode()
    assert len(together[0][0]) < 0.6 * len(TOPICS[0])
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.identity == tokenizer.identity
    assert again.encode("a<|endoftext|>").tolist() == tokenizer.encode("a<|endoftext|>").tolist()


def by_offsets(bpe, tmp_path):
    """The same vocabulary in a file that forces the general way: a normalizer that changes nothing here."""
    settings = json.loads(bpe.read_text()) | {"normalizer": {"type": "NFC"}}
    (tmp_path / "nfc.json").write_text(json.dumps(settings))
    return FileTokenizer(tmp_path / "nfc.json")


@pytest.mark.parametrize(
    ("text", "tokens", "first"),
    [
        ("objects", ["object", "s"], 6),
        (" object é", [" object", " ", "\ufffd", "\ufffd"], 7),
        ("é", ["\ufffd", "\ufffd"], 1),  # two bytes, never seen: a token each
        ("漢字", ["\ufffd"] * 6, 1),  # three bytes a character
        ("🌍", ["\ufffd"] * 4, 1),
        ("    the", ["   ", " the"], 3),
        ("\n   x", ["\n  ", " ", "x"], 3),
    ],
)
def test_first_bytes_by_hand(bpe, tmp_path, text, tokens, first):
    tokenizer, general = FileTokenizer(bpe), by_offsets(bpe, tmp_path)
    assert general._token_bytes is None and tokenizer._token_bytes is not None
    ids, first_bytes = tokenizer.encode_document(text.encode())
    assert [tokenizer.decode([i]) for i in ids[:-1]] == tokens
    assert first_bytes == first
    assert general.encode_document(text.encode())[1] == first


def test_first_bytes_of_a_cut_character(tmp_path):
    """The one merge of this vocabulary joins the last two of the three bytes of a character."""
    train_bpe(["漢".encode()] * 3, tmp_path / "t.json", vocab_size=258)
    exact, general = FileTokenizer(tmp_path / "t.json"), by_offsets(tmp_path / "t.json", tmp_path)
    for tokenizer, first in ((exact, 1), (general, 2)):  # by offsets, two tokens share three bytes
        ids, first_bytes = tokenizer.encode_document("漢a".encode())
        assert ids[1] == 257 and len(ids) == 4 and first_bytes == first


def test_first_bytes_both_ways(bpe, tmp_path):
    tokenizer, general = FileTokenizer(bpe), by_offsets(bpe, tmp_path)
    texts = [text.decode()[at : at + 40].encode() for text in TOPICS for at in range(0, 200, 7)]
    assert [first for _, first in tokenizer.encode_documents(texts)] == [
        first for _, first in general.encode_documents(texts)
    ]


def word_level(**special: bool) -> tokenizers.Tokenizer:
    """Words between white space, and tokens that are special or (false) only added."""
    vocabulary = {"[UNK]": 0, "ab": 1, "cé": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for name, is_special in special.items():
        tokenizer.add_tokens([tokenizers.AddedToken(name, special=is_special)])
    return tokenizer


def test_nothing_is_added_cut_or_padded(tmp_path):
    raw = word_level(**{"[BOS]": True, "</s>": True})
    marks = [("[BOS]", 3), ("</s>", 4)]
    raw.post_processor = tokenizers.processors.TemplateProcessing(single="[BOS] $A </s>", special_tokens=marks)
    raw.enable_truncation(2)
    raw.enable_padding(length=9)
    raw.save(str(tmp_path / "w.json"))
    tokenizer = get_tokenizer(str(tmp_path / "w.json"))
    assert tokenizer.encode("ab ab ab cé").tolist() == [1, 1, 1, 2]
    # The first token is given with the spaces before it; the other three words and spaces are predicted.
    ids, first_bytes = tokenizer.encode_document("  cé ab x".encode())
    assert (ids.tolist(), first_bytes) == ([2, 1, 0, 4], 5)
    assert tokenizer.encode_document(b"  \n ")[0].tolist() == []  # no token, so no document
    assert tokenizer.decode([3, 1, 4]) == "ab"
    assert tokenizer.name.startswith("WordLevel-")


def test_the_end_of_a_document(tmp_path):
    file = tmp_path / "t.json"
    cases = (
        ({"<eos>": True, "[A]": True}, "", "<eos>"),
        ({"<eos>": True, "</s>": True}, "</s>", "</s>"),
        ({"<eos>": True, "[A]": True}, "[A]", "[A]"),
        ({}, "ab", "ab"),  # any token may be it
    )
    for special, eos, expected in cases:
        word_level(**special).save(str(file))
        tokenizer = FileTokenizer(file, eos)
        assert tokenizer.eos_token == expected
        assert tokenizer.eos == tokenizer._tokenizer.token_to_id(expected)
        assert tokenizer.decode([1, tokenizer.eos, 2]) == ("ab cé" if expected != "ab" else "cé")
    word_level(**{"<eos>": True, "</s>": True}).save(str(file))
    with pytest.raises(ValueError, match=r"2 tokens that may end a document: .* special tokens are <eos> </s>"):
        FileTokenizer(file)
    with pytest.raises(ValueError, match=r"data.eos='<eox>' is no token of .*; did you mean <eos>\?"):
        FileTokenizer(file, "<eox>")
    word_level(**{"[PAD]": True}).save(str(file))
    with pytest.raises(ValueError, match=r"no well-known token that ends a document: .* data.eos .* are \[PAD\]"):
        FileTokenizer(file)
    word_level().save(str(file))
    with pytest.raises(ValueError, match="it has no special token"):
        FileTokenizer(file)


@pytest.mark.parametrize("content", ["", "{}", "[1]", "not json", '{"model": 3}', "\udcff"])
def test_files_that_are_no_tokenizer(tmp_path, content):
    file = tmp_path / "bad.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"bad.json is no file of the `tokenizers` library") as caught:
        get_tokenizer(str(file))
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"the tokenizer '.*no.json' can't be read: No such file"):
        get_tokenizer(str(tmp_path / "no.json"))
    with pytest.raises(ValueError, match="can't be read: Is a directory"):
        (tmp_path / "folder.json").mkdir()
        get_tokenizer(str(tmp_path / "folder.json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(vocab_size=256), "--vocab_size=256 must be at least 257"),
        (dict(out="x.txt"), "--out='.*x.txt' must end in .json"),
        (dict(out="no/x.json"), "there is no folder"),
        (dict(eos=""), "--eos is empty"),
        (dict(texts=[b"", b""]), "no text to learn"),
    ],
)
def test_training_refuses(tmp_path, arguments, message):
    given = dict(texts=TOPICS[:1], out="t.json", vocab_size=300) | arguments
    with pytest.raises(ValueError, match=message):
        train_bpe(given.pop("texts"), tmp_path / given.pop("out"), **given)
    assert not list(tmp_path.iterdir())


def test_training_on_little_text_says_how_many_tokens_there_are(tmp_path):
    result = train_bpe([b"ab ab ab"], tmp_path / "t.json", vocab_size=5000)
    assert 257 < result["vocab_size"] < 270
    tokenizer = FileTokenizer(tmp_path / "t.json")
    assert tokenizer.vocab_size == result["vocab_size"] and len(tokenizer.encode(b"ab")) == 1


def test_no_warning_where_a_process_forks(bpe):
    script = "import os, sys; from hyjax.data.tokenizers import FileTokenizer\n"
    script += "t = FileTokenizer(sys.argv[1]); t.encode_documents([b'some text'] * 50)\n"
    script += "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nelse: t.encode_documents([b'some text'] * 50); os._exit(0)"
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", script, str(bpe)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
