"""What a run's data is, in a dict that goes through JSON: equal fingerprints give equal batches at every step.

The loader's state is a step number, which alone would let a run resume on other data without a word. The
fingerprint is stored with the checkpoints and compared on resume.
"""

import hashlib
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np

from hyjax.data.loader import RowSet
from hyjax.data.packing import PackedText

# Raised when the same settings give other batches than before (another split, another shuffle).
VERSION = 1

_MEANING = {
    "version": "the way hyjax makes batches",
    "seed": "the seed of the shuffle",
    "batch_size": "the rows a step reads",
    "train_sha256": "the training tokens",
    "heldout_sha256": "the held-out tokens",
    "python": "the Python whose own files are read",
}


def fingerprint(
    config: Mapping[str, Any],
    train: RowSet,
    heldout: RowSet,
    *,
    batch_size: int,
    seed: int,
) -> dict[str, Any]:
    """Settings, sizes and checksums of both sets. Worker counts and paths are left out: no batch depends on them."""
    recall = config["source"] == "recall"
    keys = ("num_pairs", "num_keys", "num_values") if recall else ("tokenizer", "packing", "seq_len", "heldout")
    result = {"version": VERSION, "source": config["source"], "seed": seed, "batch_size": batch_size}
    result |= {key: config[key] for key in keys}
    if config["source"] in ("stdlib", "topics"):
        result["python"] = platform.python_version()
    for side, rows in (("train", train), ("heldout", heldout)):
        result[f"{side}_rows"] = len(rows)
        if isinstance(rows, PackedText):
            result[f"{side}_documents"] = rows.corpus.num_documents
            result[f"{side}_tokens"] = rows.corpus.num_tokens
        result[f"{side}_sha256"] = checksum(rows)
    return result


def checksum(rows: RowSet) -> str:
    """sha256 of the tokens and of where documents end (or of tokens and targets), the same on every machine."""
    digest = hashlib.sha256()
    for array in rows.content:
        digest.update(np.ascontiguousarray(array.astype("<i8")).data)
    return digest.hexdigest()


def fingerprint_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One sentence for every entry that differs, with both values; empty where the data is the same.

    Another version of Python is told only together with other tokens, as their cause.
    """
    sentences = []
    same_tokens = all(old.get(key) == new.get(key) for key in ("train_sha256", "heldout_sha256"))
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) == new.get(key) or (key == "python" and same_tokens):
            continue
        meaning = f" ({_MEANING[key]})" if key in _MEANING else ""
        was, now = (f"{side[key]!r}" if key in side else "absent" for side in (old, new))
        sentences.append(f"data {key}{meaning} was {was} and is {now}.")
    return sentences
