"""What data looks like, for people: a corpus's documents and their lengths, the rows of the batch that a step reads."""

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyjax.data.build import Data
from hyjax.data.store import Store
from hyjax.data.tokenizers import Tokenizer

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
SAMPLE_TOKENS = 256  # of a sample document
BAR = 40  # characters of the longest bar

Result = dict[str, Any]


def describe_corpus(store: Store, *, documents: int, seed: int, heldout: float) -> Result:
    """Sizes, lengths in tokens, the held-out share at `heldout`, and so many documents drawn with the seed."""
    lengths = store.lengths()
    # As `sources.split` decides it: the digests are in order, so that the held-out documents come first.
    count = int(np.searchsorted(np.asarray(store.digests) / 2**64, heldout, side="left"))
    tokens = int(store.ends[count - 1]) if count else 0
    chosen = np.random.default_rng(seed).choice(len(lengths), min(documents, len(lengths)), replace=False)
    return {
        "corpus": str(store.path),
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "bytes": store.num_bytes,
        "bytes_per_token": store.num_bytes / store.num_tokens,
        "bytes_predicted": int(store.byte_ends[-1]),
        "tokenizer": store.manifest["tokenizer"],
        "dtype": store.manifest["dtype"],
        "shards": len(store.manifest["shards"]),
        "inputs": len(store.manifest["inputs"]),
        "checksum": store.checksum,
        "lengths": {
            "min": int(lengths.min()),
            "mean": float(lengths.mean()),
            **{f"p{p}": int(v) for p, v in zip(PERCENTILES, np.percentile(lengths, PERCENTILES), strict=True)},
            "max": int(lengths.max()),
            "histogram": _histogram(lengths),
        },
        "heldout": {"fraction": heldout, "documents": count, "tokens": tokens},
        "sample": [_document(store, int(place), int(lengths[place])) for place in np.sort(chosen)],
    }


def _histogram(lengths: np.ndarray) -> list[Result]:
    """Documents by length, a bin a power of two: [{"from", "to", "documents"}], bounds included."""
    exponents = np.frexp(lengths)[1] - 1  # the power of two at or below
    counts = np.bincount(exponents)
    first = int(exponents.min())
    return [{"from": 2**e, "to": 2 ** (e + 1) - 1, "documents": int(counts[e])} for e in range(first, len(counts))]


def _document(store: Store, place: int, length: int) -> Result:
    shown = min(length, SAMPLE_TOKENS)
    text = store.tokenizer.decode(store.read(int(store.starts[place]), shown))
    return {
        "place": place,
        "digest": f"{int(store.digests[place]):016x}",
        "tokens": length,
        "tokens_shown": shown,
        "text": text,
    }


def show_corpus(result: Result) -> None:
    console, lengths, heldout = Console(highlight=False, soft_wrap=True), result["lengths"], result["heldout"]
    told = result["tokenizer"]
    console.print(
        f"{result['documents']:,} documents, {result['tokens']:,} tokens, {result['bytes']:,} bytes of text"
        f" ({result['bytes_per_token']:.3f} a token) in {result['shards']} shards of {result['inputs']} files\n"
        f"tokenizer {told['name']}, {told['vocab_size']:,} ids kept as {result['dtype']},"
        f" documents end with {told['eos_token'] or told['eos']}\n"
        f"held out at {heldout['fraction']}: {heldout['documents']:,} documents, {heldout['tokens']:,} tokens"
        f" ({heldout['tokens'] / result['tokens']:.1%})\n",
        markup=False,
    )
    table = Table("tokens a document", "documents", "", box=None, pad_edge=False)
    most = max(row["documents"] for row in lengths["histogram"])
    for row in lengths["histogram"]:
        bar = "█" * round(BAR * row["documents"] / most) or ("▏" if row["documents"] else "")
        table.add_row(f"{row['from']:,} to {row['to']:,}", f"{row['documents']:,}", bar)
    table.columns[0].justify = table.columns[1].justify = "right"
    console.print(table)
    named = ("min", *(f"p{p}" for p in PERCENTILES), "max")
    console.print("  ".join(f"{name} {lengths[name]:,}" for name in named) + f"  mean {lengths['mean']:,.1f}\n")
    for document in result["sample"]:
        cut = "" if document["tokens_shown"] == document["tokens"] else f", the first {document['tokens_shown']}"
        head = f"document {document['place']:,} ({document['digest']}): {document['tokens']:,} tokens{cut}"
        console.print(Text(head, "bold"))
        console.print(Text(document["text"]))
        console.print()


# ------------------------------------------------------------------------------------------------ batches


def describe_step(data: Data, step: int, rows: int) -> Result:
    """The first rows of the batch that `step` reads: in each row its pieces, a run of one document's tokens each."""
    batch = data.train.batch(step)
    shown: list[Result] = []
    for row in range(min(rows, len(batch["tokens"]))):
        segments = batch["segment_ids"][row]
        pieces = [_piece(data.tokenizer, batch, row, segment) for segment in range(1, int(segments.max()) + 1)]
        shown.append({"row": row, "pieces": pieces, "padding": int((segments == 0).sum())})
    return {"step": step, "batch_size": len(batch["tokens"]), "seq_len": batch["tokens"].shape[1], "rows": shown}


def _piece(tokenizer: Tokenizer | None, batch: dict[str, np.ndarray], row: int, segment: int) -> Result:
    """Where a piece lies, its loss weights as runs of (weight, places), its text, and whether its document ends in it.

    A document's eos is a piece's last token, or what that predicts.
    """
    at = np.flatnonzero(batch["segment_ids"][row] == segment)
    ids, targets, weights = (batch[key][row, at] for key in ("tokens", "targets", "weights"))
    edges = np.flatnonzero(np.diff(weights, prepend=np.nan))
    runs = [[float(weights[i]), int(n)] for i, n in zip(edges, np.diff(edges, append=len(at)), strict=True)]
    result: Result = {"first": int(at[0]), "tokens": len(at), "weights": runs}
    if tokenizer is None:
        return result | {"text": " ".join(str(place.tolist()) for place in ids)}
    if tokenizer.eos is not None:
        result["ends"] = bool(ids[-1] == tokenizer.eos or (weights[-1] > 0 and targets[-1] == tokenizer.eos))
    return result | {"text": tokenizer.decode(ids)}


def show_step(result: Result, description: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(description))
    console.print(f"step {result['step']}: {result['batch_size']} rows of {result['seq_len']} tokens\n")
    for row in result["rows"]:
        padding = f", {row['padding']} of padding" if row["padding"] else ""
        kind = "piece" if len(row["pieces"]) == 1 else "pieces"
        console.print(Text(f"row {row['row']}: {len(row['pieces'])} {kind}{padding}", "bold"))
        for piece in row["pieces"]:
            span = f"{piece['first']} to {piece['first'] + piece['tokens'] - 1}"
            runs = ", ".join(f"{weight:g} x {places}" for weight, places in piece["weights"])
            end = ", and its document ends" if piece.get("ends") else ""
            text = f"── tokens {span}, loss weights {runs}{end} ──"
            console.print(Text(text, "cyan"))
            console.print(Text(piece["text"]))
        console.print()
