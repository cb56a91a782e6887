"""A byte-level BPE tokenizer made from text, as a file of the `tokenizers` library.

Byte-level: the 256 bytes are in the vocabulary, so every text has ids and comes back from them unchanged.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hyjax.config.errors import show

BYTES = 256


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    """Words are counted by several threads in here, unless the environment says otherwise.

    Afterwards the library is told that there are none, or it warns when this process forks.
    """
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = before or "true"
    try:
        yield
    finally:
        os.environ[name] = before or "false"


def train_bpe(
    texts: Iterable[bytes],
    out: str | Path,
    *,
    vocab_size: int,
    eos: str = "<|endoftext|>",
    report: Callable[[int], None] = lambda size: None,
) -> dict[str, Any]:
    """Merge the most frequent pairs of the texts until there are vocab_size tokens; write the tokenizer's file.

    The eos is id 0, then come the bytes, then the merges, most frequent first. The same texts give the same file.
    `report` is called with the bytes read so far.

    Returns {documents, bytes, vocab_size, which is less than asked for where the texts have no more pairs, out}.
    Raises ValueError: a vocabulary that can't hold the bytes and the eos, no text, a file that can't be written.
    """
    file = Path(out).expanduser()
    if file.suffix != ".json":
        raise ValueError(f"--out={show(str(out))} must end in .json, so that data.tokenizer knows it for a file")
    if not eos:
        raise ValueError("--eos is empty: documents need a token that ends them, such as <|endoftext|>")
    if vocab_size < BYTES + 1:
        raise ValueError(f"--vocab_size={vocab_size} must be at least {BYTES + 1}: the {BYTES} bytes and {eos}")
    if not file.parent.is_dir():
        raise ValueError(f"--out={show(str(out))}: there is no folder {file.parent}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    counts = {"documents": 0, "bytes": 0}

    def strings() -> Iterator[str]:
        for text in texts:
            counts["documents"] += bool(text)
            counts["bytes"] += len(text)
            report(counts["bytes"])
            yield text.decode("utf-8")

    with _threads():
        tokenizer.train_from_iterator(strings(), trainer)
    if not counts["bytes"]:
        raise ValueError("these inputs hold no text to learn a vocabulary from")
    other = file.with_name(f"{file.name}.tmp-{os.getpid()}")
    try:
        tokenizer.save(str(other))
        os.replace(other, file)
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"--out={show(str(out))} can't be written: {error}") from error
    finally:
        other.unlink(missing_ok=True)
    return counts | {"vocab_size": tokenizer.get_vocab_size(), "out": str(file)}
