"""Reading a corpus on disk: any range, from any thread, and never one that is not whole."""

import json
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.data import store as stores
from hyjax.data.bpe import train_bpe
from hyjax.data.store import BLOCK, BlockWriter, Store, digest_order
from hyjax.data.tokenize import tokenize
from tests.data.text_files import write_texts

# Documents from one token to several blocks; the stream crosses shards and blocks, and ends inside a block.
TEXTS = [chr(97 + i % 26) * (i * i * 7 % 9000 + 1) + f" {i}" for i in range(60)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    tokenize([str(write_texts(folder, "a.jsonl", TEXTS))], folder / "out", shard_bytes=50_000)
    return folder / "out"


@pytest.fixture(scope="module")
def store(corpus) -> Store:
    return Store(corpus)


@pytest.fixture(scope="module")
def stream() -> np.ndarray:
    return np.concatenate([[*text.encode(), 256] for text in TEXTS])


def test_what_it_says_of_itself(store, stream):
    assert (store.num_documents, store.num_tokens, store.num_bytes) == (60, len(stream), len(stream) - 60)
    assert (store.tokenizer.name, store.dtype) == ("bytes", np.dtype("<u2"))
    shards = [shard["tokens"] for shard in store.manifest["shards"]]
    assert len(shards) == 3 and sum(shards) == len(stream) and all(tokens % BLOCK for tokens in shards)
    assert store.starts.dtype == store.ends.dtype == store.byte_ends.dtype == np.int64
    assert store.digests.dtype == np.uint64 and np.all(np.diff(store.digests.astype(float)) >= 0)
    assert isinstance(store.ends, np.memmap)
    assert len(store.checksum) == 64


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_any_range(store, stream, data):
    start = data.draw(st.integers(0, len(stream)))
    length = data.draw(st.integers(0, len(stream) - start) | st.integers(0, min(300, len(stream) - start)))
    found = store.read(start, length)
    assert found.dtype == store.dtype and np.array_equal(found, stream[start : start + length])


def test_every_border(store, stream):
    edges = np.cumsum([0] + [shard["tokens"] for shard in store.manifest["shards"]])
    for edge in (*edges, *range(BLOCK, len(stream), BLOCK)):
        for start in range(max(0, edge - 2), min(edge + 2, len(stream))):
            for length in (0, 1, 2, 3, BLOCK, 3 * BLOCK):
                if start + length <= len(stream):
                    assert np.array_equal(store.read(start, length), stream[start : start + length])


def test_past_the_ends(store, stream):
    for start, length in ((-1, 1), (0, -1), (0, len(stream) + 1), (len(stream), 1)):
        with pytest.raises(IndexError, match=f"of {len(stream)}"):
            store.read(start, length)


def test_many_threads_and_a_pickled_store(corpus, stream):
    store = pickle.loads(pickle.dumps(Store(corpus)))  # whose readers no thread has opened yet
    wrong = []

    def reads(seed: int) -> None:
        for start in np.random.default_rng(seed).integers(0, len(stream) - 257, 400):
            if not np.array_equal(store.read(int(start), 257), stream[start : start + 257]):
                wrong.append(start)

    threads = [threading.Thread(target=reads, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_checksum_is_of_the_tokens_and_the_bounds(tmp_path):
    def checksum(name: str, texts: list[str], **options) -> str:
        tokenize([str(write_texts(tmp_path, f"{name}.jsonl", texts))], tmp_path / name, **options)
        return Store(tmp_path / name).checksum

    same = checksum("a", ["one text", "another"])
    assert checksum("b", ["one text", "another"]) == same  # another file, another time
    different = {same, checksum("c", ["one texu", "another"]), checksum("d", ["one tex", "tanother"])}
    different |= {checksum("e", ["another", "one text"]), checksum("f", ["one text", "another"], tokenizer="letters")}
    assert len(different) == 5


def test_the_order_of_digests_where_the_first_word_is_shared():
    digests = np.array([[5, 0, 0, 2], [1, 0, 0, 0], [5, 0, 0, 1], [5, 0, 0, 2], [0, 9, 9, 9]], np.uint64)
    assert digest_order(digests).tolist() == [4, 1, 2, 0, 3]
    same = np.array([[7, 1, 1, 1], [3, 0, 0, 0], [7, 1, 1, 1]], np.uint64)
    assert digest_order(same).tolist() == [1, 0, 2]
    assert digest_order(same[:0]).tolist() == []


def test_ids_are_kept_in_the_narrowest_type(tmp_path):
    for largest, dtype in ((255, "u1"), (256, "<u2"), (65_535, "<u2"), (65_536, "<u4")):
        writer = BlockWriter(tmp_path / "x", np.min_scalar_type(largest))
        writer.write(np.array([0, largest]))
        writer.close()
        assert writer.dtype == np.dtype(dtype)


# ------------------------------------------------------------------------------------------------ what is not whole


def copy(corpus, folder):
    folder.mkdir()
    for file in corpus.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


SHARD = "shard-00001-of-00003.array_record"


@pytest.mark.parametrize("name", [SHARD, "digests.npy", "starts.npy", "ends.npy", "byte_ends.npy"])
def test_a_flipped_bit_anywhere_is_found(corpus, tmp_path, name):
    folder = copy(corpus, tmp_path / "c")
    Store(folder).verify()
    data = bytearray((folder / name).read_bytes())
    data[len(data) * 2 // 3] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(
        ValueError, match=f"{name} is damaged .*: copy it again, or remove the corpus and tokenize again"
    ):
        Store(folder).verify()


def test_a_damaged_block_is_not_read(corpus, tmp_path, stream):
    folder = copy(corpus, tmp_path / "c")
    data = bytearray((folder / SHARD).read_bytes())
    data[70_000] ^= 4
    (folder / SHARD).write_bytes(data)
    store = Store(folder)
    first = store.manifest["shards"][0]["tokens"]
    assert np.array_equal(store.read(0, first), stream[:first])
    with pytest.raises(ValueError, match=f"{SHARD} is damaged \\(Corrupted"):
        store.read(first, store.manifest["shards"][1]["tokens"])


@pytest.mark.parametrize("name", [SHARD, "ends.npy"])
def test_a_file_that_is_short_or_gone(corpus, tmp_path, name):
    folder = copy(corpus, tmp_path / "c")
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(ValueError, match=f"{name} is damaged \\(it has {len(data) - 1} bytes, not {len(data)}\\)"):
        Store(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing from the corpus"):
        Store(folder)


def test_folders_that_are_no_corpus(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is no corpus .*: it is no local folder"):
        Store(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is no corpus that `hyjax data tokenize` made: it has no corpus.json"):
        Store(tmp_path)
    folder = copy(corpus, tmp_path / "c")
    manifest = json.loads((folder / stores.MANIFEST).read_text())
    for content, message in (
        ("{", r"corpus.json can't be read: Expecting"),
        ("{}", r"corpus.json is no manifest of a corpus"),
        (json.dumps(manifest | {"version": 2}), r"is a corpus of version 2, and this hyjax reads 1"),
        (
            json.dumps(manifest | {"num_tokens": 3}),
            r"corpus.json is damaged \(its checksum is not",
        ),
    ):
        (folder / stores.MANIFEST).write_text(content)
        with pytest.raises(ValueError, match=message):
            Store(folder)


def test_another_tokenizer_in_its_place(tmp_path):
    train_bpe([b"some text"], tmp_path / "t.json", vocab_size=300)
    tokenize([str(write_texts(tmp_path, "a.jsonl", TEXTS))], tmp_path / "c", tokenizer=str(tmp_path / "t.json"))
    store = Store(tmp_path / "c")
    assert store.tokenizer.decode(store.read(0, 5)) == "a 0b"
    (tmp_path / "t.json").unlink()  # the corpus has its own
    assert Store(tmp_path / "c").tokenizer.identity == store.tokenizer.identity
    train_bpe([b"other text, other pairs"], tmp_path / "c" / "tokenizer.json", vocab_size=300)
    with pytest.raises(ValueError, match=r"tokenizer.json is not the tokenizer that the corpus was made with"):
        Store(tmp_path / "c")
