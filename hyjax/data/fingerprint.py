"""What a run's data is, in a dict that goes through JSON: equal fingerprints give equal batches at every step.

The loader's state is a step number, which alone would let a run resume on other data without a word. The
fingerprint is stored with the checkpoints and compared on resume.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hyjax.data.loader import RowSet
from hyjax.data.mixing import Turns
from hyjax.data.packing import PackedText

# Raised when the same settings give other batches than before (another split, another shuffle).
VERSION = 1

_MEANING = {
    "version": "the way hyjax makes batches",
    "seed": "the seed of the shuffle",
    "batch_size": "the rows a step reads",
    "eos": "the id that ends a document",
    "share": "its part of the rows",
    "train_sha256": "the training tokens",
    "heldout_sha256": "the held-out tokens",
    "python": "the Python whose own files are read",
}


class SummedRows(RowSet, Protocol):
    """Rows that know the checksum of what they are made from."""

    @property
    def checksum(self) -> str: ...


class Sides[R: SummedRows](NamedTuple):
    """One source's rows: its kind (never its path: a corpus may be moved), and both sides."""

    kind: str
    train: R
    heldout: R


def fingerprint(
    config: Mapping[str, Any],
    sources: Sequence[Sides],
    *,
    tokenizer: Mapping[str, Any] | None = None,
    turns: Turns | None = None,
    batch_size: int,
    seed: int,
) -> dict[str, Any]:
    """Settings, sizes and checksums of both sides of every source.

    Numbers of workers and hosts, and paths, are left out: no batch depends on them.

    Args:
      config: the `data` part of a config.
      tokenizer: its identity (name, sha256 of its file, eos); None where the data is no text.
      turns: how the sources are mixed, where there are several.
    """
    result = {"version": VERSION, "source": config["source"], "seed": seed, "batch_size": batch_size}
    if tokenizer is None:
        result |= {key: config[key] for key in ("num_pairs", "num_keys", "num_values")}
    else:
        result["tokenizer"] = tokenizer["name"]
        if tokenizer["sha256"]:  # a file's name may change, a built-in tokenizer has no file
            result |= {"tokenizer": f"sha256:{tokenizer['sha256']}", "eos": tokenizer["eos"]}
        result |= {key: config[key] for key in ("packing", "seq_len", "heldout")}
    if turns is None:
        return result | _one_source(sources[0])
    shares = [f"{count}/{turns.period}" for count in turns.counts]
    result["sources"] = [
        {"source": sides.kind, "share": share, **_one_source(sides)}
        for sides, share in zip(sources, shares, strict=True)
    ]
    return result


def _one_source(sides: Sides) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if sides.kind in ("stdlib", "topics"):
        result["python"] = platform.python_version()
    for side, rows in (("train", sides.train), ("heldout", sides.heldout)):
        result[f"{side}_rows"] = len(rows)
        if isinstance(rows, PackedText):
            result[f"{side}_documents"] = rows.corpus.num_documents
            result[f"{side}_tokens"] = rows.corpus.num_tokens
        result[f"{side}_sha256"] = rows.checksum
    return result


def fingerprint_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One sentence for every entry that differs, with both values; empty where the data is the same.

    Another version of Python is told only together with other tokens, as their cause.
    """
    single = {key: value for key, value in old.items() if key != "sources"}
    sentences = list(_differences("data", single, {key: value for key, value in new.items() if key != "sources"}))
    pairs = (old.get("sources", []), new.get("sources", []))
    was, now = ([entry["source"] for entry in entries] for entries in pairs)
    if was == now:
        for number, (before, after) in enumerate(zip(*pairs, strict=True), 1):
            sentences += _differences(f"data source {number} ({after['source']})", before, after)
    elif was and now:
        sentences.append(f"data sources (in the order of the mixture) were {', '.join(was)} and are {', '.join(now)}.")
    return sentences


def _differences(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    same_tokens = all(old.get(key) == new.get(key) for key in ("train_sha256", "heldout_sha256"))
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) == new.get(key) or (key == "python" and same_tokens):
            continue
        meaning = f" ({_MEANING[key]})" if key in _MEANING else ""
        was, now = (f"{side[key]!r}" if key in side else "absent" for side in (old, new))
        yield f"{what} {key}{meaning} was {was} and is {now}."
