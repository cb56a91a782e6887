"""Corpora on disk: the same whatever the format, the number of processes and the number of times they were stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hyjax import exit_codes
from hyjax.cli import main
from hyjax.data.bpe import train_bpe
from hyjax.data.corpus import Corpus
from hyjax.data.readers import Options
from hyjax.data.sources import Document, read_documents, split
from hyjax.data.store import Store
from hyjax.data.tokenize import tokenize
from hyjax.data.tokenizers import get_tokenizer
from tests.data.text_files import NAMES, options_of, write_texts

TOPICS = [document.text.decode() for document in read_documents("topics")]
TEXTS = [*TOPICS[:12], "", "short", "漢字 🌍", TOPICS[3], "short"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("bpe") / "bpe.json"
    train_bpe([text.encode() for text in TOPICS], file, vocab_size=600)
    return str(file)


@pytest.mark.parametrize("tokenizer", ["bytes", "letters", "bpe"])
def test_a_corpus_gives_the_documents_back(tmp_path, bpe, tokenizer):
    """In order of the digest, as sources.split has them, so that training rows are those of the documents in memory."""
    file = write_texts(tmp_path, "a.jsonl", TEXTS)
    name = bpe if tokenizer == "bpe" else tokenizer
    result = tokenize([str(file)], tmp_path / "out", tokenizer=name)
    documents = [Document(f"{i:03d}", text.encode()) for i, text in enumerate(TEXTS) if text]
    encoder = get_tokenizer(name)
    if tokenizer == "letters":  # which finds one space in text that has no letter
        assert encoder.encode("漢字 🌍").tolist() == [0]
    train, heldout = split(documents, 0.3)
    ranked = [*heldout, *train]
    store = Store(tmp_path / "out")
    assert (result["documents"], result["empty"]) == (len(documents), 1)
    assert store.num_documents == len(ranked) and store.num_bytes == sum(len(d.text) for d in documents)
    assert store.digests.tolist() == [int.from_bytes(d.digest[:8], "big") for d in ranked]
    in_memory = Corpus(ranked, encoder)
    assert store.ends.tolist() == in_memory.ends.tolist()
    assert store.byte_ends[-1] == in_memory.num_bytes
    for i, (start, length) in enumerate(zip(store.starts, store.lengths(), strict=True)):
        ids, first_bytes = encoder.encode_document(ranked[i].text)
        assert store.read(int(start), int(length)).tolist() == ids.tolist()
        assert store.byte_ends[i] - (store.byte_ends[i - 1] if i else 0) == len(ranked[i].text) - first_bytes
        assert tokenizer == "letters" or store.tokenizer.decode(ids) == ranked[i].text.decode()
    # The stream is in the order of the input: what lies between documents in the file lies between them here.
    stored = [encoder.encode_document(d.text)[0] for d in documents]
    assert store.read(0, store.num_tokens).tolist() == np.concatenate(stored).tolist()


@pytest.fixture(scope="module")
def from_jsonl(tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("jsonl")
    tokenize([str(write_texts(folder, "a.jsonl", TEXTS))], folder / "out")
    return Store(folder / "out")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "a.jsonl"])
def test_every_format_gives_the_same_corpus(tmp_path, from_jsonl, name):
    tokenize([str(write_texts(tmp_path, name, TEXTS))], tmp_path / "out", options=options_of(name), shard_bytes=20_000)
    store = Store(tmp_path / "out")
    assert np.array_equal(store.read(0, store.num_tokens), from_jsonl.read(0, store.num_tokens))
    for array in ("digests", "starts", "ends", "byte_ends"):
        assert np.array_equal(getattr(store, array), getattr(from_jsonl, array))
    assert store.manifest["num_empty"] == from_jsonl.manifest["num_empty"] == 1


def test_the_number_of_processes_changes_no_byte(tmp_path, bpe):
    inputs = [str(write_texts(tmp_path / "in", name, [f"{name} {text}" for text in TEXTS])) for name in NAMES]
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        result = tokenize(inputs, out, tokenizer=bpe, options=options_of(".txt"), shard_bytes=20_000, workers=workers)
        assert result["shards"] > 8 and result["documents"] == 17 * len(NAMES)  # no text is empty: its name leads it
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")


def test_how_it_is_cut_into_shards_changes_no_document(tmp_path):
    """Not even where one large text is cut into documents: the places of the cuts are the file's own."""
    file = tmp_path / "large.txt"
    file.write_text("\n\n".join(TOPICS * 4))
    stores = []
    for size in (100_000, 1_000_000, 0):
        tokenize([str(file)], tmp_path / f"out{size}", shard_bytes=size)
        stores.append(Store(tmp_path / f"out{size}"))
    assert [len(store.manifest["shards"]) for store in stores] == [13, 2, 1]
    assert 20 < stores[0].num_documents < 30
    stream = stores[0].read(0, stores[0].num_tokens)
    assert bytes(stream[stream < 256].astype(np.uint8)) == file.read_bytes()
    for store in stores[1:]:
        assert np.array_equal(store.read(0, store.num_tokens), stream)
        assert np.array_equal(store.starts, stores[0].starts) and np.array_equal(store.digests, stores[0].digests)


# ------------------------------------------------------------------------------------------------ stopped and again


def start(arguments: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "hyjax.cli", "data", "tokenize", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in found.read_text().split()] if found.exists() else []


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_stopped_in_the_middle_and_started_again(tmp_path, stop):
    """Units that were done are kept, the result is the one that was never stopped, and no process is left behind."""
    file = write_texts(tmp_path, "a.jsonl", [f"{i} {text}" for i in range(15) for text in TOPICS])
    out = tmp_path / "out"
    process = start([f"--input={file}", f"--out={out}", "--tokenizer=letters", "--shard_mb=1", "--workers=2"])
    wait_for(lambda: list(out.glob("unfinished/unit-*.json")) or process.poll() is not None)
    workers = children(process.pid)
    if stop == signal.SIGKILL:
        process.kill()
        assert process.wait(timeout=30) == -stop
    else:
        os.killpg(process.pid, stop)  # as a terminal does
        assert process.wait(timeout=30) == exit_codes.INTERRUPTED
        # a worker that is only just starting may leave a traceback of its own before
        said = process.stderr.read()
        assert said.endswith("hyjax: stopped; the same command goes on from the units that are done\n")
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    done = len(list(out.glob("unfinished/unit-*.json")))
    assert 1 <= done < 7 and not (out / "corpus.json").exists()
    with pytest.raises(ValueError, match=r"out is a corpus half made: run its `hyjax data tokenize` again"):
        Store(out)
    # A process that was killed as it wrote leaves the file that it wrote.
    (out / "shard-00006-of-00007.array_record.tmp-1").write_bytes(b"half a file")

    again = tokenize([str(file)], out, tokenizer="letters", shard_bytes=1_000_000, workers=2)
    assert (again["state"], again["units_kept"], again["shards"]) == ("made", done, 7)
    straight = tmp_path / "straight"
    tokenize([str(file)], straight, tokenizer="letters", shard_bytes=1_000_000)
    assert contents(out) == contents(straight)


def half_made(tmp_path, file: Path) -> Path:
    """A corpus of three units whose second can't be read."""
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:1200], b"{oops" + lines[1200][5:], *lines[1201:]]))
    stamp = file.stat()
    with pytest.raises(ValueError, match=r"line 1201: not JSON"):
        tokenize([str(file)], tmp_path / "out", shard_bytes=1_000_000)
    file.write_bytes(b"".join(lines))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    return tmp_path / "out"


def test_a_unit_that_was_damaged_since_is_made_anew(tmp_path):
    file = write_texts(tmp_path, "a.jsonl", [f"{i:04d}" + "x" * 996 for i in range(2500)])
    out = half_made(tmp_path, file)
    first = out / "shard-00000-of-00003.array_record"
    assert [path.name for path in out.glob("unfinished/unit-*.json")] == ["unit-00000.json"]
    data = bytearray(first.read_bytes())
    data[70_000] ^= 1
    first.write_bytes(data)
    result = tokenize([str(file)], out, shard_bytes=1_000_000)
    assert result["units_kept"] == 0
    tokenize([str(file)], tmp_path / "straight", shard_bytes=1_000_000)
    assert contents(out) == contents(tmp_path / "straight")


def test_the_same_command_on_a_finished_corpus_verifies_it(tmp_path, capsys):
    file = write_texts(tmp_path, "a.jsonl", TEXTS)
    command = ["data", "tokenize", f"--input={file}", f"--out={tmp_path / 'out'}", "--workers=1"]
    assert main([*command, "--verify"]) == 0
    before = contents(tmp_path / "out")
    capsys.readouterr()
    assert main(command) == 0
    told = capsys.readouterr()
    assert "was finished before and is whole, verified by checksum: 16 documents" in told.out and not told.err
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished before"
    assert contents(tmp_path / "out") == before
    shard = tmp_path / "out" / "shard-00000-of-00001.array_record"
    shard.write_bytes(b"\0" + shard.read_bytes()[1:])
    assert main(command) == exit_codes.USAGE
    assert "shard-00000-of-00001.array_record is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("finished", [True, False])
def test_another_request_in_the_same_folder_is_refused(tmp_path, bpe, finished):
    file = write_texts(tmp_path, "a.jsonl", [f"{i:04d}" + "x" * 996 for i in range(2500)])
    out = tmp_path / "out" if finished else half_made(tmp_path, file)
    if finished:
        tokenize([str(file)], out, shard_bytes=1_000_000)
    how = "was made" if finished else "was begun"
    other = write_texts(tmp_path, "b.jsonl", TEXTS)

    def refused(message: str, patterns=(file,), **options) -> None:
        with pytest.raises(ValueError, match=f"out {how} {message}: use another --out, or remove that folder"):
            tokenize([str(pattern) for pattern in patterns], out, **{"shard_bytes": 1_000_000, **options})

    refused(r"from other inputs \(.*b.jsonl is new\)", (file, other))
    refused(r"from other inputs \(.*a.jsonl is no longer among them\)", (other,))
    refused(r"with another tokenizer \(name 'bytes', now 'letters'\)", tokenizer="letters")
    refused(r"with another tokenizer \(name 'bytes', now 'BPE-\w+'\)", tokenizer=bpe)
    refused(r"with other options \(field '', now 'text'\)", options=Options("text"))
    refused(r"with other options \(shard_bytes 1000000, now 0\)", shard_bytes=0)
    refused(r"from other inputs \(.*a.jsonl has format 'jsonl', now 'text'\)", format="text")
    stamp = file.stat()
    os.utime(file, (stamp.st_atime, stamp.st_mtime + 1))
    refused(r"from other inputs \(.*a.jsonl has modified '[\d.]+', now '[\d.]+'\)")
    with file.open("a") as opened:
        opened.write("\n")
    refused(r"from other inputs \(.*a.jsonl has size \d+, now \d+\)")


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_a_full_disk(tmp_path):
    """A limit on the size of files stands in for it. What is done is kept, and the same command goes on."""
    file = write_texts(tmp_path, "a.jsonl", [f"{i:04d}" + "x" * 996 for i in range(2500)])
    out = tmp_path / "out"
    arguments = [f"--input={file}", f"--out={out}", "--shard_mb=1", "--workers=2"]
    limited = "import resource, sys; from hyjax.cli import main\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))\n"
    limited += "if __name__ == '__main__': sys.exit(main(['data', 'tokenize', *sys.argv[1:]]))"
    script = tmp_path / "limited.py"
    script.write_text(limited)
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == exit_codes.USAGE, done.stderr
    assert done.stderr.count("\n") == 1 and "can't be written: File too large; what is done is kept" in done.stderr
    assert not (out / "corpus.json").exists() and not list(out.rglob("*.tmp-*"))
    tokenize([str(file)], out, shard_bytes=1_000_000)
    Store(out).verify()


def test_a_process_that_is_killed(tmp_path, bpe):
    """By a kernel that is out of memory, for instance: one sentence, and no waiting for ever."""
    file = write_texts(tmp_path, "a.jsonl", [f"{i} {text}" for i in range(5) for text in TOPICS])
    out = tmp_path / "out"
    process = start([f"--input={file}", f"--out={out}", f"--tokenizer={bpe}", "--shard_mb=1", "--workers=2"])
    wait_for(lambda: len(list(out.glob("*.tmp-*"))) == 2 or process.poll() is not None)
    writing = {int(path.name.rpartition("-")[2]) for path in out.glob("*.tmp-*")}
    os.kill(min(writing & set(children(process.pid))), signal.SIGKILL)
    assert process.wait(timeout=30) == exit_codes.USAGE
    assert "a process was killed, perhaps for want of memory" in process.stderr.read()


def test_two_at_once(tmp_path, bpe):
    file = write_texts(tmp_path, "a.jsonl", [f"{i} {text}" for i in range(5) for text in TOPICS])
    out = tmp_path / "out"
    process = start([f"--input={file}", f"--out={out}", f"--tokenizer={bpe}", "--shard_mb=1", "--workers=1"])
    try:
        wait_for(lambda: list(out.glob("*.tmp-*")) or process.poll() is not None)
        with pytest.raises(ValueError, match=r"out' is being written by another process now"):
            tokenize([str(file)], out, tokenizer=bpe, shard_bytes=1_000_000)
    finally:
        process.kill()
        process.wait()


def test_folders_that_are_no_place_for_a_corpus(tmp_path):
    file = write_texts(tmp_path, "a.jsonl", TEXTS)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("keep me")
    with pytest.raises(ValueError, match=r"--out='.*taken' holds other files: give a new or an empty folder"):
        tokenize([str(file)], tmp_path / "taken")
    with pytest.raises(ValueError, match=r"--out='.*a.jsonl' is a file; a corpus is a folder"):
        tokenize([str(file)], file)
    with pytest.raises(ValueError, match=r"can't be written: Not a directory"):
        tokenize([str(file)], file / "below")
    with pytest.raises(ValueError, match=r"these inputs hold no text: 2 empty documents in 1 files"):
        tokenize([str(write_texts(tmp_path, "b.jsonl", ["", ""]))], tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match=r"memory:// is seen by this process only: use --workers=1"):
        import fsspec

        fsspec.filesystem("memory").pipe_file("/x.txt", b"x")
        tokenize(["memory://x.txt"], tmp_path / "none", workers=2)
    with pytest.raises(ValueError, match=r"--separator is for text files, and none of the inputs is one"):
        tokenize([str(file)], tmp_path / "none", options=options_of(".txt"))
    with pytest.raises(ValueError, match=r"--field='body' is for records and tables, and all of the inputs are text"):
        tokenize([str(write_texts(tmp_path, "d.txt", TEXTS))], tmp_path / "none", options=Options("body"))
    (tmp_path / "empty").mkdir()
    assert tokenize([str(file)], tmp_path / "empty")["state"] == "made"
    assert (tmp_path / "taken" / "mine.txt").read_text() == "keep me"


def test_more_shards_than_a_reader_can_keep_open(tmp_path, monkeypatch):
    monkeypatch.setattr("hyjax.data.tokenize.MOST_SHARDS", 3)
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text("x" * 2_100_000)
    with pytest.raises(ValueError, match=r"--shard_mb makes 11 shards, more than 3: at least 5 does not"):
        tokenize([f"{tmp_path}/*.txt"], tmp_path / "out", shard_bytes=1_000_000, options=Options(separator=b"."))
    assert tokenize([f"{tmp_path}/*.txt"], tmp_path / "out", shard_bytes=4_000_000)["shards"] == 3


def test_a_request_of_which_nothing_is_done_may_be_changed(tmp_path):
    file = write_texts(tmp_path, "a.jsonl", TEXTS, field="body")
    with pytest.raises(ValueError, match=r"line 1: no field 'text'"):
        tokenize([str(file)], tmp_path / "out")
    assert tokenize([str(file)], tmp_path / "out", options=Options("body"))["documents"] == 16
