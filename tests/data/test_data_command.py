"""`hyjax data tokenize` and `train_tokenizer` as they are typed."""

import json

import pytest

from hyjax import exit_codes
from hyjax.cli import main
from hyjax.data.sources import read_documents
from hyjax.data.tokenizers import get_tokenizer
from tests.data.text_files import SEPARATOR, write_texts

TOPICS = [document.text.decode() for document in read_documents("topics")]
TEXTS = [*TOPICS[:12], "", "short", "漢字 🌍", TOPICS[3], "short"]


def test_the_command(tmp_path, capsys):
    book = tmp_path / "book.txt"
    book.write_text(SEPARATOR.join([*TEXTS, ""]))
    command = ["data", "tokenize", f"--input={book}", f"--out={tmp_path / 'out'}", "--workers=1"]
    assert main([*command, f"--separator={SEPARATOR}", "--verify"]) == 0
    told = capsys.readouterr().out
    assert "16 documents, " in told and "; 1 empty ones dropped; " in told and " MB/s\n" in told
    assert main([*command[:3], f"--out={tmp_path / 'one'}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["documents"], result["tokens"], result["bytes"]) == (1, book.stat().st_size + 1, book.stat().st_size)
    assert main([*command[:3], f"--out={tmp_path / 'two'}"]) == 0
    assert "one document: none can be held out beside it" in capsys.readouterr().out


def test_progress_in_lines_and_as_a_bar(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hyjax.data.progress.LINE_SECONDS", 0)
    file = write_texts(tmp_path, "a.jsonl", TEXTS)
    command = ["data", "tokenize", f"--input={file}", "--workers=1", "--json"]
    assert main([*command, f"--out={tmp_path / 'a'}"]) == 0
    told = capsys.readouterr()
    assert told.err.splitlines() == [f"tokenize: {done} of 1 units, 0.0 MB of text" for done in (0, 1)]
    assert json.loads(told.out)["shards"] == 1
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main([*command, f"--out={tmp_path / 'b'}"]) == 0
    told = capsys.readouterr()
    assert "1 of 1 units, 0.0 MB of text" in told.err and "━━━" in told.err
    assert json.loads(told.out)["shards"] == 1


def test_separators_as_they_are_typed(tmp_path):
    from hyjax.cli.data import _separator

    assert _separator(r"a\n\t\\n\0é") == "a\n\t\\n\0é".encode()
    for wrong in (r"\x", "a\\"):
        with pytest.raises(Exception, match="which is none of"):
            _separator(wrong)


def test_training_a_tokenizer_by_command(tmp_path, capsys):
    write_texts(tmp_path / "in", "a.jsonl", TOPICS)
    command = ["data", "train_tokenizer", f"--input={tmp_path / 'in'}", "--eos=<end>", "--vocab_size=400"]
    assert main([*command, f"--out={tmp_path / 'a.json'}"]) == 0
    assert "a.json: 400 tokens from 65 documents, 0.4 MB" in capsys.readouterr().out
    assert main([*command, f"--out={tmp_path / 'b.json'}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 400
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    with pytest.raises(ValueError, match="no well-known token"):
        get_tokenizer(str(tmp_path / "a.json"))
    assert get_tokenizer(str(tmp_path / "a.json"), "<end>").eos == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokenise"], "'tokenise' is nothing that hyjax data does; did you mean tokenize?"),
        (["tokenize", "--out=x"], "--input"),
        (["tokenize", "--input=no.txt", "--out=x"], "no.txt can't be read: no such file"),
        (["tokenize", "--input=no.txt", "--out=x", "--tokenizer=byte"], "did you mean bytes?"),
        (["tokenize", "--input=no.txt", "--out=x", "--worker=2"], "did you mean --workers?"),
        (["tokenize", "--input=no.txt", "--out=x", "--workers=0"], "must be a whole number from 1"),
        (["tokenize", "--input=no.txt", "--out=x", r"--separator=\x"], r"has '\\x', which is none of"),
        (["tokenize", "--input=no.txt", "--out=x", "--format=json"], "did you mean jsonl?"),
        (["train_tokenizer", "--input=no.txt", "--out=x.json", "--vocab_size=300"], "no.txt can't be read"),
        (["train_tokenizer", "--input=no.txt", "--out=x.json"], "--vocab_size"),
    ],
)
def test_commands_that_are_wrong(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *arguments]) == exit_codes.USAGE
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_help_says_what_a_document_is(capsys):
    with pytest.raises(SystemExit):
        main(["data", "tokenize", "--help"])
    assert "cut at the first blank line after every 64 KiB" in capsys.readouterr().out
    assert main(["data", "--help"]) == 0 and main(["data"]) == exit_codes.USAGE
    assert "train_tokenizer" in capsys.readouterr().out
