"""From the `data` part of a config to loaders: open or read, split, pack, mix, address by step."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

from hyjax.config.errors import lookup, show
from hyjax.data.corpus import Corpus, TokenStream, sides
from hyjax.data.fingerprint import Sides, fingerprint
from hyjax.data.loader import Loader, RowSet
from hyjax.data.mixing import Rows, Turns
from hyjax.data.packing import PackedText
from hyjax.data.sources import SOURCES, read_documents, split
from hyjax.data.store import Store
from hyjax.data.synthetic.recall import RecallSet
from hyjax.data.tokenizers import Tokenizer, get_tokenizer

Host = tuple[int, int]


@dataclass(frozen=True)
class Data:
    """What training and evaluation read.

    heldout            of a mixture, the held-out rows of all sources, one source after the other
    heldout_by_source  of a mixture, each source's alone, by a name for people; else {}
    vocab_size         outputs of the model's head
    streams            vocabulary of each token stream, where tokens are [B, T, streams]; () where they are [B, T]
    tokenizer          None where the data is no text
    fingerprint        see hyjax.data.fingerprint
    description        a line for people; of a mixture one more for each source
    """

    train: Loader
    heldout: Loader
    heldout_by_source: dict[str, Loader]
    tokenizer: Tokenizer | None
    vocab_size: int
    streams: tuple[int, ...]
    fingerprint: dict[str, Any]
    description: str

    @property
    def num_streams(self) -> int:
        return max(1, len(self.streams))

    @property
    def train_corpora(self) -> list[TokenStream]:
        """The training documents of each source; [] where the data is no text."""
        return _corpora(self.train)

    @property
    def heldout_corpora(self) -> list[TokenStream]:
        return _corpora(self.heldout)


def _corpora(loader: Loader) -> list[TokenStream]:
    parts = loader.rows.parts if isinstance(loader.rows, Rows) else [loader.rows]
    return [part.corpus for part in parts if isinstance(part, PackedText)]


def build(config: Mapping[str, Any], *, batch_size: int, seed: int, host: Host = (0, 1)) -> Data:
    """Loaders over the source or sources that `config` (the `data` part of a config, complete) names.

    `host` is (number, how many): each host's loaders give its share of every batch of batch_size rows. The held-out
    set never depends on the seed: runs with different seeds are measured on the same data. Raises ValueError with one
    sentence for anything that can't be served.
    """
    source = config["source"]
    lookup({**SOURCES, "corpus": None, "mixture": None, "recall": None}, source, "data.source")
    if source == "recall":
        return _build_recall(config, batch_size, seed, host)
    turns = Turns(config["weights"]) if source == "mixture" else None
    entries = [entry.partition(":")[::2] for entry in config["mixture"]] if turns else [(source, config["path"])]
    names = _names(entries)
    stores = [Store(path) if kind == "corpus" else None for kind, path in entries]
    tokenizer = _tokenizer(config, [store for store in stores if store])
    sources = []
    for name, (kind, path), store in zip(names, entries, stores, strict=True):
        try:
            sources.append(_source(config, kind, path, store, tokenizer))
        except ValueError as error:
            if turns is None:
                raise
            raise ValueError(f"the source {name}: {error}") from error
    train, heldout = _rows(sources)
    loader = partial(Loader, batch_size=batch_size, workers=config["workers"], host=host)
    by_source = {name: loader(rows.heldout, seed=None) for name, rows in zip(names, sources, strict=True)}
    return Data(
        train=loader(train, seed=seed, turns=turns),
        heldout=loader(heldout, seed=None),
        heldout_by_source=by_source if turns else {},
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        streams=(),
        fingerprint=fingerprint(
            config, sources, tokenizer=tokenizer.identity, turns=turns, batch_size=batch_size, seed=seed
        ),
        description=_describe(config, sources, names, tokenizer, turns),
    )


def _tokenizer(config: Mapping[str, Any], stores: Sequence[Store]) -> Tokenizer:
    """The one that a corpus was made with, else the config's; ValueError where not all of them are the same."""
    chosen = None if stores and config["tokenizer"] == "auto" else get_tokenizer(config["tokenizer"], config["eos"])
    by, remedy = f"data.tokenizer={show(config['tokenizer'])} is", "use data.tokenizer='auto', or tokenize it anew"
    for store in stores:
        if chosen is None:
            chosen, by, remedy = store.tokenizer, f"the corpus {store.path} was made with", "tokenize one of them anew"
        if chosen.identity != store.tokenizer.identity:
            mine, theirs = _known_as(chosen), _known_as(store.tokenizer)
            raise ValueError(f"{by} {mine}, but the corpus {store.path} was made with {theirs}: {remedy}")
    assert chosen is not None
    return chosen


def _known_as(tokenizer: Tokenizer) -> str:
    return f"the tokenizer {tokenizer.name} of {tokenizer.vocab_size} ids and eos {tokenizer.eos}"


def _source(
    config: Mapping[str, Any], kind: str, path: str, store: Store | None, tokenizer: Tokenizer
) -> Sides[PackedText]:
    """Both sides of one source, packed."""
    streams: Sequence[TokenStream]
    if store is not None:
        streams = sides(store, config["heldout"])
    else:
        documents = read_documents(kind, path=path, checksum=config["checksum"], glob=config["glob"])
        streams = [Corpus(side, tokenizer) for side in split(documents, config["heldout"])]
    train, heldout = (PackedText(stream, config["packing"], config["seq_len"]) for stream in streams)
    return Sides(kind, train, heldout)


def _rows(sources: Sequence[Sides[PackedText]]) -> tuple[RowSet, RowSet]:
    """(train, heldout) rows of all sources."""
    if len(sources) == 1:
        return sources[0].train, sources[0].heldout
    return Rows([source.train for source in sources]), Rows([source.heldout for source in sources])


def _names(entries: Sequence[tuple[str, str]]) -> list[str]:
    """A name for each source of a mixture: its kind and, of those that have a path, its last part; each but once."""
    names = [f"{kind}:{PurePath(path).name or path}" if path else kind for kind, path in entries]
    often = Counter(names)
    return [f"{name}#{number}" if often[name] > 1 else name for number, name in enumerate(names, 1)]


def _describe(
    config: Mapping[str, Any],
    sources: Sequence[Sides[PackedText]],
    names: Sequence[str],
    tokenizer: Tokenizer,
    turns: Turns | None,
) -> str:
    if turns is None:
        return f"{config['source']}: {_describe_source(config, sources[0], tokenizer)}"
    lines = [f"mixture of {len(sources)} sources, in turns that repeat after {turns.period:,} rows"]
    for name, count, source in zip(names, turns.counts, sources, strict=True):
        lines.append(f"  {count / turns.period:.2%} {name}: {_describe_source(config, source, tokenizer)}")
    return "\n".join(lines)


def _describe_source(config: Mapping[str, Any], source: Sides[PackedText], tokenizer: Tokenizer) -> str:
    train, heldout = source.train, source.heldout
    tokens = train.corpus.num_tokens + heldout.corpus.num_tokens
    return (
        f"{train.corpus.num_documents + heldout.corpus.num_documents:,} documents,"
        f" {tokens:,} tokens ({tokenizer.name}); held out {heldout.corpus.num_documents:,} documents,"
        f" {heldout.corpus.num_tokens:,} tokens ({heldout.corpus.num_tokens / tokens:.1%});"
        f" {len(train):,} rows of {config['seq_len']} ({config['packing']}),"
        f" {train.num_targets / (len(train) * config['seq_len']):.1%} of places predict"
    )


def _build_recall(config: Mapping[str, Any], batch_size: int, seed: int, host: Host) -> Data:
    pairs, keys, values = config["num_pairs"], config["num_keys"], config["num_values"]
    if config["seq_len"] != 2 * pairs:
        raise ValueError(
            f"data.seq_len={config['seq_len']}, but recall sequences of num_pairs={pairs} have {2 * pairs} tokens"
        )
    # The second number tells the two sets' random streams apart for every seed.
    train = RecallSet(config["train_sequences"], pairs, keys, values, seed=(seed, 1))
    heldout = RecallSet(config["heldout_sequences"], pairs, keys, values, seed=(0, 2))
    return Data(
        train=Loader(train, batch_size, seed=seed, workers=config["workers"], host=host),
        heldout=Loader(heldout, batch_size, seed=None, workers=config["workers"], host=host),
        heldout_by_source={},
        tokenizer=None,
        vocab_size=values,
        streams=(keys, values + 1),
        fingerprint=fingerprint(config, [Sides("recall", train, heldout)], batch_size=batch_size, seed=seed),
        description=(
            f"recall: {pairs} pairs of {keys} keys and {values} values, {len(train):,} sequences of {2 * pairs}"
            f" tokens, {len(heldout):,} held out; chance {1 / values:.3f}"
        ),
    )
