"""The `data` part of a config for tests, and corpora on disk of a few documents."""

import random
from pathlib import Path

from hyjax.config import DEFAULTS
from hyjax.data import Data, build
from hyjax.data.tokenize import tokenize

SMALL = dict(source="topics", seq_len=64, heldout=0.2, num_pairs=4, train_sequences=50, heldout_sequences=20)


def make(batch_size: int = 8, seed: int = 0, host: tuple[int, int] = (0, 1), **changes) -> Data:
    return build({**DEFAULTS["data"], **SMALL, **changes}, batch_size=batch_size, seed=seed, host=host)


def write_texts(folder: Path, count: int = 60, seed: int = 0) -> Path:
    """`count` files of 1 to 60 words."""
    words = ["the", "of", "and", "time", "was", "a", "traveller", "machine", "Filby", "labor\u00e9"]
    rng = random.Random(seed)
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03d}.txt").write_text(" ".join([str(number), *rng.choices(words, k=rng.randint(1, 60))]))
    return folder


def write_corpus(folder: Path, texts: Path, tokenizer: str = "bytes") -> Path:
    tokenize([str(texts)], folder, tokenizer=tokenizer, shard_bytes=2000)
    return folder
