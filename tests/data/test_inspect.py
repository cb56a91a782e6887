"""What `hyjax data inspect` says, counted by hand."""

import json
import re

import numpy as np
import pytest

from hyjax import exit_codes
from hyjax.cli import main
from hyjax.config import check
from hyjax.data import build
from hyjax.data.inspect import describe_step
from hyjax.data.sources import Document, split
from hyjax.data.tokenize import tokenize
from tests.data.text_files import write_texts

TEXTS = [f"Text {i}. " + "word " * (i % 17) for i in range(200)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("inspect")
    tokenize([str(write_texts(folder, "a.jsonl", TEXTS))], folder / "out")
    return str(folder / "out")


def inspect(capsys, *arguments: str) -> str:
    assert main(["data", "inspect", *arguments]) == exit_codes.OK
    return capsys.readouterr().out


def test_a_corpus(corpus, capsys):
    result = json.loads(inspect(capsys, f"--corpus={corpus}", "--json", "--heldout=0.2", "--documents=4", "--verify"))
    lengths = np.array([len(text) + 1 for text in TEXTS])
    assert (result["documents"], result["tokens"], result["bytes"]) == (200, lengths.sum(), lengths.sum() - 200)
    assert result["bytes_per_token"] == pytest.approx(1 - 200 / lengths.sum())
    assert result["bytes_predicted"] == lengths.sum() - 400  # no first byte, no eos
    assert result["tokenizer"]["name"] == "bytes" and result["verified"]
    told = result["lengths"]
    assert (told["min"], told["max"], told["mean"]) == (lengths.min(), lengths.max(), pytest.approx(lengths.mean()))
    assert told["p50"] == int(np.percentile(lengths, 50)) and told["p99"] == int(np.percentile(lengths, 99))
    assert told["histogram"] == [
        {"from": low, "to": 2 * low - 1, "documents": int(((lengths >= low) & (lengths < 2 * low)).sum())}
        for low in (8, 16, 32, 64)
    ]
    heldout = split([Document("", text.encode()) for text in TEXTS], 0.2)[1]
    assert result["heldout"]["documents"] == len(heldout)
    assert result["heldout"]["tokens"] == sum(len(document.text) + 1 for document in heldout)
    assert len(result["sample"]) == 4 and {document["text"] for document in result["sample"]} <= set(TEXTS)


def test_the_sample_is_by_seed(corpus, capsys):
    texts = lambda *more: [
        d["text"] for d in json.loads(inspect(capsys, f"--corpus={corpus}", "--json", *more))["sample"]
    ]
    assert texts() == texts("--seed=0") != texts("--seed=1")
    assert len(texts("--documents=0")) == 0 and sorted(texts("--documents=999")) == sorted(TEXTS)


def test_a_corpus_for_people(corpus, capsys):
    told = inspect(capsys, f"--corpus={corpus}", "--documents=1", "--verify")
    assert (
        "200 documents, " in told
        and "bytes of text (0.98" in told
        and "tokenizer bytes, 257 ids kept as uint16" in told
    )
    assert re.search(r"held out at 0.1: \d+ documents, [\d,]+ tokens \(\d+\.\d%\)", told)
    assert re.search(r"^ +64 to 127 +\d+ +█+ *$", told, re.MULTILINE) and "min 9  p1 " in told
    assert re.search(r"^document \d+ \([0-9a-f]{16}\): \d+ tokens\nText \d+\. ", told, re.MULTILINE)
    assert "every file was read and has the checksum of the manifest" in told


def test_a_long_document_is_shown_in_part(tmp_path, capsys):
    tokenize([str(write_texts(tmp_path, "a.jsonl", ["x" * 1000]))], tmp_path / "out")
    told = inspect(capsys, f"--corpus={tmp_path / 'out'}")
    assert "1,001 tokens, the first 256\n" + "x" * 256 + "\n" in told


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_the_rows_of_a_step(corpus, packing):
    """Every piece is the text of one document, between its neighbours in the row; every token is in one piece."""
    config = check({"data": {"source": "corpus", "path": corpus, "seq_len": 64, "packing": packing}})["data"]
    data = build(config, batch_size=5, seed=3)
    result = describe_step(data, 7, rows=3)
    assert (result["step"], result["batch_size"], result["seq_len"], len(result["rows"])) == (7, 5, 64, 3)
    batch, ends = data.train.batch(7), []
    for row in result["rows"]:
        assert sum(piece["tokens"] for piece in row["pieces"]) + row["padding"] == 64
        weights = [weight for piece in row["pieces"] for weight, places in piece["weights"] for _ in range(places)]
        assert weights + [0.0] * row["padding"] == batch["weights"][row["row"]].tolist()
        for piece in row["pieces"]:
            assert any(piece["text"] in text for text in TEXTS)
            ends.append(piece["ends"])
            assert not piece["ends"] or any(text.endswith(piece["text"]) for text in TEXTS)
    assert any(ends) and (packing == "best_fit" or not all(ends))  # most documents fit a row


def test_a_step_by_command(capsys):
    quickstart = ["--config=configs/quickstart.py", "--config.data.seq_len=32", "--step=2"]
    told = inspect(capsys, *quickstart, "--rows=2")
    assert told.startswith("topics: 65 documents") and "step 2: 16 rows of 32 tokens" in told
    assert "row 0: 1 piece\n── tokens 0 to 31, loss weights 1 x 32 ──\n" in told and "row 1: " in told
    assert "row 2" not in told
    result = json.loads(inspect(capsys, *quickstart, "--json"))
    assert result["rows"][0]["pieces"][0]["text"] in told
    recall = json.loads(inspect(capsys, "--config=configs/recall.py:pairs=4", "--json", "--rows=1"))
    piece = recall["rows"][0]["pieces"][0]
    assert piece["weights"] == [[0.0, 4], [1.0, 4]] and re.fullmatch(r"(\[\d+, \d+\] ?){8}", piece["text"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "looks at a --corpus or at the data of a --config: give one of them"),
        (["--corpus=x", "--config=y"], "give one of them"),
        (["--corpus=nowhere"], "nowhere is no corpus"),
        (["--corpus=x", "--step=1"], "--step goes with --config"),
        (["--config=configs/quickstart.py", "--heldout=0.1"], "--heldout goes with --corpus"),
        (["--config=configs/quickstart.py", "--verify"], "--verify goes with --corpus"),
        (["--corpus=x", "--config.seed=1"], "--config.seed goes with --config"),
        (["--corpus=x", "--heldout=1.5"], "--heldout=1.5 must be a fraction between 0 and 1"),
        (["--corpus=x", "--documents=-1"], "must be a whole number from 0 up"),
        (["--config=configs/quickstart.py", "--step=10_000_000"], "must be a whole number from 0 up"),
        (["--config=configs/quickstart.py", "--step=10000000"], "is past the last of the config: train.steps="),
        (["--config=configs/quickstart.py", "--config.data.heldout=1e-9"], "leaves none of 65 documents to hold out"),
    ],
)
def test_refusals(capsys, arguments, message):
    assert main(["data", "inspect", *arguments]) == exit_codes.USAGE
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
