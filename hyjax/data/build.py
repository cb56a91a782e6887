"""From the `data` part of a config to loaders: read, split, tokenize, pack, address by step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyjax.config.errors import lookup
from hyjax.data.fingerprint import fingerprint
from hyjax.data.loader import Loader
from hyjax.data.packing import Corpus, PackedText
from hyjax.data.sources import SOURCES, read_documents, split
from hyjax.data.synthetic.recall import RecallSet
from hyjax.data.tokenizers import Tokenizer, get_tokenizer


@dataclass(frozen=True)
class Data:
    """What training and evaluation read.

    vocab_size   outputs of the model's head
    streams      vocabulary of each token stream, where tokens are [B, T, streams]; () where they are [B, T]
    tokenizer    None where the data is no text
    fingerprint  see hyjax.data.fingerprint
    description  one line for people
    """

    train: Loader
    heldout: Loader
    tokenizer: Tokenizer | None
    vocab_size: int
    streams: tuple[int, ...]
    fingerprint: dict[str, Any]
    description: str

    @property
    def num_streams(self) -> int:
        return max(1, len(self.streams))

    @property
    def train_corpus(self) -> Corpus | None:
        """The training documents' tokens; None where the data is no text."""
        return self.train.rows.corpus if isinstance(self.train.rows, PackedText) else None

    @property
    def heldout_corpus(self) -> Corpus | None:
        return self.heldout.rows.corpus if isinstance(self.heldout.rows, PackedText) else None


def build(config: Mapping[str, Any], *, batch_size: int, seed: int) -> Data:
    """Loaders over the source that `config` (the `data` part of a config, complete) names.

    The held-out set never depends on the seed: runs with different seeds are measured on the same data. Raises
    ValueError with one sentence for anything that can't be served.
    """
    lookup({**SOURCES, "recall": None}, config["source"], "data.source")
    if config["source"] == "recall":
        return _build_recall(config, batch_size, seed)
    tokenizer = get_tokenizer(config["tokenizer"])
    documents = read_documents(config["source"], path=config["path"], checksum=config["checksum"], glob=config["glob"])
    sides = split(documents, config["heldout"])
    train, heldout = (PackedText(Corpus(side, tokenizer), config["packing"], config["seq_len"]) for side in sides)
    tokens = train.corpus.num_tokens + heldout.corpus.num_tokens
    description = (
        f"{config['source']}: {train.corpus.num_documents + heldout.corpus.num_documents:,} documents,"
        f" {tokens:,} tokens ({tokenizer.name}); held out {heldout.corpus.num_documents:,} documents,"
        f" {heldout.corpus.num_tokens:,} tokens ({heldout.corpus.num_tokens / tokens:.1%});"
        f" {len(train):,} rows of {config['seq_len']} ({config['packing']}),"
        f" {train.num_targets / (len(train) * config['seq_len']):.1%} of places predict"
    )
    return Data(
        train=Loader(train, batch_size, seed=seed, workers=config["workers"]),
        heldout=Loader(heldout, batch_size, seed=None, workers=config["workers"]),
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        streams=(),
        fingerprint=fingerprint(config, train, heldout, batch_size=batch_size, seed=seed),
        description=description,
    )


def _build_recall(config: Mapping[str, Any], batch_size: int, seed: int) -> Data:
    pairs, keys, values = config["num_pairs"], config["num_keys"], config["num_values"]
    if config["seq_len"] != 2 * pairs:
        raise ValueError(
            f"data.seq_len={config['seq_len']}, but recall sequences of num_pairs={pairs} have {2 * pairs} tokens"
        )
    # The second number tells the two sets' random streams apart for every seed.
    train = RecallSet(config["train_sequences"], pairs, keys, values, seed=(seed, 1))
    heldout = RecallSet(config["heldout_sequences"], pairs, keys, values, seed=(0, 2))
    return Data(
        train=Loader(train, batch_size, seed=seed, workers=config["workers"]),
        heldout=Loader(heldout, batch_size, seed=None, workers=config["workers"]),
        tokenizer=None,
        vocab_size=values,
        streams=(keys, values + 1),
        fingerprint=fingerprint(config, train, heldout, batch_size=batch_size, seed=seed),
        description=(
            f"recall: {pairs} pairs of {keys} keys and {values} values, {len(train):,} sequences of {2 * pairs}"
            f" tokens, {len(heldout):,} held out; chance {1 / values:.3f}"
        ),
    )
