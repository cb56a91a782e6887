"""Fingerprints: whatever changes a batch is named with both values, and nothing else is."""

import copy
import json

import pytest

from hyjax.data import fingerprint_diff
from tests.data.settings import make, write_corpus, write_texts

CHANGES = [
    (dict(seed=1), {"seed"}),
    (dict(batch_size=4), {"batch_size"}),
    (dict(seq_len=32), {"seq_len", "train_rows", "heldout_rows"}),
    (dict(packing="best_fit"), {"packing"}),
    (dict(heldout=0.3), {"heldout", "train_sha256", "heldout_sha256", "train_documents"}),
    (dict(tokenizer="letters"), {"tokenizer", "train_sha256", "train_tokens"}),
    (dict(tokenizer="bytes"), set()),
    (dict(workers=2), set()),
    (dict(host=(1, 2)), set()),
]


def told(old, new):
    """{what: sentence}, where what is all that stands before the first "(" or "was"."""
    return {s.removeprefix("data ").split(" was ")[0].split(" (the")[0]: s for s in fingerprint_diff(old, new)}


@pytest.mark.parametrize(("change", "named"), CHANGES, ids=[str(*change) for change, _ in CHANGES])
def test_what_changed_is_named(change, named):
    old = json.loads(json.dumps(make().fingerprint))
    new = make(**change).fingerprint
    assert json.loads(json.dumps(new)) == new
    sentences = told(old, new)
    assert named <= set(sentences) if named else not sentences
    for key in named:
        assert f"was {old[key]!r} and is {new[key]!r}." in sentences[key]


def test_recall_and_another_python():
    old, new = (make(source="recall", seq_len=8, seed=seed).fingerprint for seed in (0, 1))
    assert set(told(old, new)) == {"seed", "train_sha256"}
    topics = make().fingerprint
    assert fingerprint_diff({**topics, "python": "3.11.0"}, topics) == []
    assert len(fingerprint_diff({**topics, "python": "3.11.0", "train_sha256": ""}, topics)) == 2
    assert "absent" in fingerprint_diff(topics, {**topics, "blend": 2})[0]


def test_a_fingerprint_of_before_mixtures_still_holds():
    """What the first version stored for these settings: runs of then go on."""
    found = make().fingerprint
    rest = {key: found.pop(key) for key in ("python", "train_sha256", "heldout_sha256")}
    assert all(rest.values())
    assert {key: value for key, value in found.items() if not key.startswith(("train_", "heldout_"))} == {
        "version": 1,
        "source": "topics",
        "seed": 0,
        "batch_size": 8,
        "tokenizer": "bytes",
        "packing": "windows",
        "seq_len": 64,
        "heldout": 0.2,
    }


# ------------------------------------------------------------------------------------------------ corpora, mixtures


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    root = tmp_path_factory.mktemp("fingerprints")
    texts, corpus = write_texts(root / "texts"), write_corpus(root / "corpus", write_texts(root / "others", seed=1))
    return dict(source="mixture", mixture=("topics", f"text:{texts}", f"corpus:{corpus}"), weights=(0.5, 0.3, 0.2))


def test_a_corpus_is_known_by_its_checksum_and_not_by_its_path(tmp_path):
    texts = write_texts(tmp_path / "texts")
    corpus = write_corpus(tmp_path / "corpus", texts)
    old = make(source="corpus", path=str(corpus)).fingerprint
    assert str(tmp_path) not in json.dumps(old)
    assert old["train_sha256"] == json.loads((corpus / "corpus.json").read_text())["checksum"]
    (texts / "000.txt").write_text("another text")
    new = make(source="corpus", path=str(write_corpus(tmp_path / "new", texts))).fingerprint
    assert {"train_sha256", "heldout_sha256"} <= set(told(old, new))
    same = make(source="corpus", path=str(corpus), workers=2).fingerprint
    assert fingerprint_diff(old, same) == []
    other_side = make(source="corpus", path=str(corpus), heldout=0.4).fingerprint
    assert {"heldout", "train_documents", "heldout_tokens"} <= set(told(old, other_side))


def test_a_tokenizer_of_a_file_is_known_by_its_bytes_and_its_eos(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    def write(path, *words):
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("?", *words))}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["<one>", "<two>"])
        tokenizer.save(str(path))
        return str(path)

    first = write(tmp_path / "first.json", "the", "of")
    old = make(tokenizer=first, eos="<one>").fingerprint
    assert (
        fingerprint_diff(old, make(tokenizer=write(tmp_path / "moved.json", "the", "of"), eos="<one>").fingerprint)
        == []
    )
    assert set(told(old, make(tokenizer=first, eos="<two>").fingerprint)) == {"eos", "train_sha256", "heldout_sha256"}
    # Another file with the same ids for this text is another tokenizer all the same.
    other = told(old, make(tokenizer=write(tmp_path / "other.json", "the", "off"), eos="<one>").fingerprint)
    assert {"tokenizer"} <= set(other) and "was 'sha256:" in other["tokenizer"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(seed=1), {"seed"}),
        (dict(weights=(5.0, 3.0, 2.0)), set()),
        (
            dict(weights=(0.5, 0.2, 0.3)),
            {"source 2 (text) share (its part of the rows)", "source 3 (corpus) share (its part of the rows)"},
        ),
        (dict(seq_len=32), {"seq_len", "source 1 (topics) train_rows", "source 3 (corpus) heldout_rows"}),
        (dict(workers=1, host=(3, 4)), set()),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_of_a_mixture_each_source_is_told(change, named, mixture):
    old = json.loads(json.dumps(make(**mixture).fingerprint))
    sentences = told(old, make(**{**mixture, **change}).fingerprint)
    assert named <= set(sentences) if named else not sentences, sentences


def test_other_sources_of_a_mixture_and_changed_text(mixture, tmp_path):
    names = mixture["mixture"]
    old = make(**mixture).fingerprint
    assert str(names[1].split(":")[1]) not in json.dumps(old)
    swapped = make(**{**mixture, "mixture": (names[0], names[2], names[1])}).fingerprint
    assert fingerprint_diff(old, swapped) == [
        "data sources (in the order of the mixture) were topics, text, corpus and are topics, corpus, text."
    ]
    fewer = make(**{**mixture, "mixture": names[:2], "weights": (1, 1)}).fingerprint
    assert "were topics, text, corpus and are topics, text." in fingerprint_diff(old, fewer)[0]
    others = f"text:{write_texts(tmp_path / 'texts', seed=9)}"
    changed = told(old, make(**{**mixture, "mixture": (names[0], others, names[2])}).fingerprint)
    assert {"source 2 (text) train_sha256", "source 2 (text) heldout_sha256"} <= set(changed)
    assert all(key.startswith("source 2 (text)") for key in changed)
    assert "source" in told(old, make().fingerprint)


def test_another_python_matters_where_its_files_changed(mixture):
    old = make(**mixture).fingerprint
    new = copy.deepcopy(old)
    new["sources"][0]["python"] = "3.11.0"
    assert fingerprint_diff(old, new) == []
    new["sources"][0]["train_sha256"] = "other"
    assert len(fingerprint_diff(old, new)) == 2
