"""Documents out of files: how files are cut for many readers, the formats, and what is said of a file that is wrong."""

import gzip
import io
import os
import sys

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyjax.data import cuts
from hyjax.data.inputs import find_inputs
from hyjax.data.readers import Options, find_pieces, read_piece
from tests.data.text_files import NAMES, options_of, write_texts

TEXTS = ["One.\n", "Zwei, für 漢字 🌍\r\nline", "", "  ", 'quotes "and" \\ <sep>', "last\n\n\n"]


def ranges(size: int, step: int) -> list[tuple[int, int | None]]:
    """[0, step), [step, 2 step), ... as `find_pieces` makes them: the last one has no end."""
    starts = range(0, max(1, size), step)
    return [(start, start + step if start + step < size else None) for start in starts]


def join(cutter, data: bytes, step: int, *arguments: bytes) -> list[tuple[int, bytes]]:
    """Every range read by itself from a file of its own, one after the other."""
    return [doc for start, end in ranges(len(data), step) for doc in cutter(io.BytesIO(data), start, end, *arguments)]


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Constants so small that short texts cross every border."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "SECTION", 8)
        patch.setattr(cuts, "WHOLE", 24)
        patch.setattr(cuts, "CHUNK", 16)
        yield


@settings(deadline=None, max_examples=300)
@given(
    text=st.text(st.sampled_from("ab\n"), max_size=60),
    separator=st.sampled_from(["\n", "\n\n", "aa", "aba", "ab", "\n\n\n", "b" * 20]),
    step=st.integers(1, 40),
)
def test_separators_that_overlap_are_cut_alike_from_everywhere(text, separator, step):
    data, mark = text.encode(), separator.encode()
    found = join(cuts.separated, data, step, mark)
    expected = data.split(mark)
    if not expected[-1]:  # a separator at the end begins no document
        expected.pop()
    assert [document for _, document in found] == expected
    assert all(data[place : place + len(document)] == document for place, document in found)


@settings(deadline=None, max_examples=300)
@given(text=st.text(st.sampled_from("ab \né漢🌍"), max_size=150), cells=st.integers(1, 5), times=st.integers(1, 3))
def test_sections_are_cut_alike_from_everywhere(text, cells, times):
    data = (text * times).encode()
    whole = list(cuts.sections(io.BytesIO(data), 0, None))
    assert b"".join(section for _, section in whole) == data
    if len(data) <= cuts.WHOLE:
        assert whole == [(0, data)]
        return
    # A file that is larger than WHOLE is cut: pieces that are read by themselves give the same.
    assert join(cuts.sections, data, cells * cuts.SECTION) == whole
    for place, section in whole:
        section.decode()
        # A cut is sought for SECTION bytes, and goes on to the end of a character; the last section may be longer.
        assert data[place : place + len(section)] == section and len(section) <= 3 * cuts.SECTION + 3
    for number, (place, _) in enumerate(whole[1:], 1):
        if len(whole) == len(data) // cuts.SECTION:  # where none was empty
            assert number * cuts.SECTION <= place <= (number + 1) * cuts.SECTION + 3


def test_sections_by_hand():
    data = b"aaaa bbbb\n\ncccc dd\nee ffffffffff gggggg"
    assert [section for _, section in cuts.sections(io.BytesIO(data), 0, None)] == [
        b"aaaa bbbb\n\n",  # the blank line after 8
        b"cccc dd\n",  # no blank line in 16 to 24: a line end
        b"ee ff",  # no line end in 24 to 32
        b"ffffffff gggggg",  # the rest, from 24: less than two sections
    ]


@settings(deadline=None)
@given(
    data=st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\xff"]), max_size=60).map(b"".join), step=st.integers(1, 30)
)
def test_lines_are_read_alike_from_everywhere(data, step):
    found = join(cuts.lines, data, step)
    *whole, rest = data.split(b"\n")
    assert [line for _, line in found] == [*(line + b"\n" for line in whole), *([rest] if rest else [])]
    assert all(data[place : place + len(line)] == line for place, line in found)


# ------------------------------------------------------------------------------------------------ formats


def read(patterns, size: int = 1 << 20, options: Options | None = None, format: str = "auto") -> list[str]:
    inputs = find_inputs([str(pattern) for pattern in patterns], format)
    options = options or options_of(" ".join(item.name for item in inputs))
    pieces = find_pieces(inputs, size, options)
    return [text.decode() for piece in pieces for text in read_piece(piece, options)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 30, 1 << 20])
def test_every_format_gives_the_same_documents(tmp_path, name, size):
    file = write_texts(tmp_path, name, TEXTS)
    assert read([file], size) == TEXTS
    other = write_texts(tmp_path / "other", name, TEXTS, field="body")
    if ".txt" not in name:
        assert read([other], size, Options(field="body")) == TEXTS
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"/{name}", file.read_bytes())
    try:
        assert read([f"memory://{name}"], size) == TEXTS
    finally:
        memory.rm(f"/{name}")


def test_pieces_are_as_small_as_asked(tmp_path):
    def count(name: str, size: int) -> int:
        inputs = find_inputs([str(write_texts(tmp_path, name, TEXTS))])
        return len(find_pieces(inputs, size, options_of(name)))

    assert [count(name, 1 << 20) for name in NAMES] == [1, 1, 1, 1, 1, 1, 3, 1]
    assert all(count(name, 10) > 1 for name in ("a.jsonl", "a.array_record"))


def test_inputs_are_sorted_and_read_once(tmp_path):
    for name in ("b.txt", "sub/a.txt", "c.jsonl", ".hidden/x.txt", "sub/.y.txt", "[z].txt"):
        write_texts(tmp_path, name, [name])
    every = ["[z].txt", "b.txt", "c.jsonl", "sub/a.txt"]
    assert read([tmp_path]) == every
    assert read([tmp_path / "sub", tmp_path / "b.txt", f"{tmp_path}/*.txt", f"{tmp_path}/**/*.txt"]) == [
        text for text in every if text != "c.jsonl"
    ]
    assert read([f"{tmp_path}/.h*/*"]) == [".hidden/x.txt"]
    assert read([tmp_path / "[z].txt"]) == ["[z].txt"]  # a file's name comes before what it would match
    assert read([os.path.relpath(tmp_path / "b.txt")]) == ["b.txt"]


def test_null_is_an_empty_document(tmp_path):
    write_texts(tmp_path, "a.parquet", ["a", None, "b"])
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "c"}\r\n\n  \n{"text": null}\n{"text": "d"}')
    assert read([tmp_path]) == ["a", "", "b", "c", "", "d"]


def make(folder, name: str, content: bytes):
    (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"fine\ncaf\xe9 au lait", r"a.txt is not UTF-8 text: byte 0xe9 at 8"),
        ("a.txt", "é".encode()[:1], r"a.txt is not UTF-8 text: byte 0xc3 at 0"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a.jsonl, line 2: not JSON: Expecting ',' delimiter at"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}', r"a.jsonl, line 3: not UTF-8 text: byte 0xff at 10"),
        ("a.jsonl", b'{"txet": "a", "n": 1}', r"a.jsonl, line 1: no field 'text' but 'txet', 'n'; did you mean txet\?"),
        ("a.jsonl", b'{"text": ["a"]}', r"a.jsonl, line 1: field 'text' is no text but \['a'\]"),
        ("a.jsonl", b"[1]", r"a.jsonl, line 1: not an object with a field 'text' but \[1\]"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a.jsonl, line 1: field 'text' is not UTF-8 text: .*surrogates"),
        (
            "a.jsonl",
            b'{"text": ' + b"9" * 5000 + b"}",
            r"a.jsonl, line 1: not JSON that can be read: .*\(4300",
        ),
        ("a.jsonl", b'{"text": ' + b"[" * 200_000, r"a.jsonl, line 1: not JSON that can be read: .*recursion"),
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 9, mtime=0)[:-12], r"a.jsonl.gz is cut short|line 1: no field"),
        ("a.jsonl.gz", gzip.compress(b"\n" * 9999, mtime=0)[:-12], r"a.jsonl.gz is cut short"),
        ("a.txt.gz", b"not gzip", r"a.txt.gz can't be read: Not a gzipped file"),
        ("a.txt.zst", b"not zstd", r"a.txt.zst can't be read: "),
        ("a.parquet", b"not parquet", r"a.parquet can't be read: "),
        ("a.array_record", b"not records", r"a.array_record (is no ArrayRecord file|can't be read)"),
        ("a.json", b"{}", r"a.json may be one text or a document a line: say --format=text or --format=jsonl"),
        ("a.parquet.gz", b"", r"a.parquet.gz: a parquet file is compressed inside"),
    ],
)
def test_files_that_are_wrong(tmp_path, name, content, message):
    make(tmp_path, name, content)
    with pytest.raises(ValueError, match=message) as caught:
        read([tmp_path / name])
    assert "\n" not in str(caught.value)


def test_a_line_far_into_a_file_has_its_number(tmp_path):
    lines = [b'{"text": "line %d"}' % i for i in range(1, 50_000)]
    lines[34_567 - 1] = b"{oops"
    make(tmp_path, "a.jsonl", b"\n".join(lines))
    with pytest.raises(ValueError, match=r"a.jsonl, line 34567: not JSON: Expecting property name"):
        read([tmp_path / "a.jsonl"], 100_000)


def test_columns_and_records_that_are_wrong(tmp_path):
    write_texts(tmp_path, "a.parquet", [1, 2])
    with pytest.raises(ValueError, match=r"a.parquet, row 0 of row group 0: column 'text' is no text but 1"):
        read([tmp_path / "a.parquet"])
    with pytest.raises(ValueError, match=r"a.parquet has no column 'body' but id, text \(--field\)"):
        read([tmp_path / "a.parquet"], options=Options("body"))
    write_texts(tmp_path, "b.parquet", [["a"], ["b"]])
    with pytest.raises(ValueError, match=r"b.parquet: column 'text' is no text but list"):
        read([tmp_path / "b.parquet"])
    write_texts(tmp_path, "a.array_record", ["{", "x"])
    with pytest.raises(ValueError, match=r"a.array_record, record 0: not JSON"):
        read([tmp_path / "a.array_record"], options=Options("body"))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("no/such/file.txt", r"no/such/file.txt can't be read: no such file or folder"),
        ("no/*.txt", r"--input='.*no/\*.txt' names no file"),
        ("", r"names no file"),  # an empty folder
    ],
)
def test_patterns_that_name_nothing(tmp_path, pattern, message):
    with pytest.raises(ValueError, match=message):
        find_inputs([str(tmp_path / pattern)])


def test_urls_that_nothing_reads():
    with pytest.raises(ValueError, match=r"'gs://bucket/a.txt' needs a package that is not installed: .*gcsfs"):
        find_inputs(["gs://bucket/a.txt"])
    with pytest.raises(ValueError, match=r"'s3://bucket/a.txt' needs a package that is not installed: .*s3fs"):
        find_inputs(["s3://bucket/a.txt"])
    with pytest.raises(ValueError, match=r"Protocol not known: s33; did you mean s3\?"):
        find_inputs(["s33://bucket/a.txt"])
    with pytest.raises(ValueError, match=r"is a chain of URLs"):
        find_inputs(["zip://a.txt::b.zip"])


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")])
def test_packages_that_are_not_installed(tmp_path, monkeypatch, name, package):
    file = write_texts(tmp_path, name, TEXTS)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"{name} needs the package {package}, which is not installed"):
        read([file])


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(tmp_path):
    file = write_texts(tmp_path, "a.txt", TEXTS)
    file.chmod(0)
    with pytest.raises(ValueError, match=r"a.txt can't be read: Permission denied"):
        read([file])
