"""`hyjax data`: tokenised corpora and tokenizers on disk, and a look at what training reads."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hyjax import exit_codes
from hyjax.cli.parser import CONFIG_HELP, Parser, UserError, load_config, positive, split_overrides, user_facing
from hyjax.config.errors import near

HELP = """usage: hyjax data tokenize|inspect|train_tokenizer ...

  tokenize         files of text to a corpus on disk: once, in parallel, ever after read by step
  inspect          documents and lengths of a corpus, or the rows that a step of a config reads
  train_tokenizer  a byte-level BPE vocabulary from files of text

`hyjax data tokenize --help` and so on explain each."""

TEXT_RULE = """what is a document:
  jsonl, ndjson    a line's --field
  parquet          a row's --field
  array_record     a record; with --field, the record is JSON
  anything else    text. With --separator, what lies between two of them. Without, a file up to 1 MiB is one document,
                   and a larger one is cut at the first blank line after every 64 KiB, else at a line end, else between
                   two characters. .gz and .zst are decompressed.
Empty documents are dropped and counted. Inputs are read in sorted order of their names, each once.
"""

TOKENIZE_EPILOG = f"""{TEXT_RULE}
The corpus depends on the inputs and these options alone, not on --workers. Killed, the same command keeps what is done;
finished, it verifies the corpus.

example:
  hyjax data tokenize --input='books/*.txt' --input=gs://bucket/web/ --out=corpora/mine --tokenizer=bpe.json
  hyjax train --config=configs/quickstart.py --config.data.source=corpus --config.data.path=corpora/mine ..."""


def data(argv: Sequence[str]) -> int:
    """Make a tokenised corpus, train a tokenizer, look at the data."""
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "tokenize": _tokenize,
        "inspect": _inspect,
        "train_tokenizer": _train_tokenizer,
    }
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return exit_codes.OK if argv else exit_codes.USAGE
    if argv[0] not in commands:
        raise UserError(f"{argv[0]!r} is nothing that hyjax data does{near(argv[0], commands)} (see hyjax data --help)")
    try:
        return commands[argv[0]](argv[1:])
    except KeyboardInterrupt:
        kept = "; the same command goes on from the units that are done" if argv[0] == "tokenize" else ""
        print(f"hyjax: stopped{kept}", file=sys.stderr)
        return exit_codes.INTERRUPTED


def _add_inputs(parser: Parser) -> None:
    parser.add_argument(
        "--input", action="append", required=True, metavar="PATH",
        help="a file, folder, glob or URL (gs://, s3://, ... by fsspec and its packages); may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=("auto", "text", "jsonl", "parquet", "array_record"), default="auto",
        help="what all inputs are (auto: by the name of each)",
    )  # fmt: skip
    parser.add_argument("--field", default="", metavar="NAME", help="the field that holds the text (text)")
    parser.add_argument(
        "--separator", type=_separator, default=b"", metavar="TEXT",
        help=r"what stands between the documents of a text file, such as '<|endoftext|>' or '\n\n\n'",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _separator(text: str) -> bytes:
    r"""The text's bytes, with \n, \t, \r, \0 and \\ for what a shell won't let pass."""
    known = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}
    if unknown := re.search(r"\\([^ntr0\\]|$)", re.sub(r"\\\\", "", text)):
        raise argparse.ArgumentTypeError(rf"has {unknown[0]!r}, which is none of \n, \t, \r, \0 and \\")
    return re.sub(r"\\(.)", lambda match: known[match[1]], text).encode("utf-8", "surrogateescape")


# ------------------------------------------------------------------------------------------------ tokenize


def _tokenize(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="hyjax data tokenize",
        description="Turn files of text into a tokenised corpus on disk, once, in parallel.",
        epilog=TOKENIZE_EPILOG,
    )
    _add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="the corpus: a folder of its own")
    parser.add_argument(
        "--tokenizer", default="bytes", metavar="NAME", help="bytes, letters or a FILE.json of `tokenizers` (bytes)"
    )
    parser.add_argument("--eos", default="", metavar="TOKEN", help="the token of that file that ends a document")
    parser.add_argument("--workers", type=positive, metavar="N", help="processes (one a processor)")
    parser.add_argument(
        "--shard_mb", type=positive, metavar="N",
        help="input that a shard is made of, in MB (a 512th of all, at least 8); a killed worker loses as much",
    )  # fmt: skip
    parser.add_argument("--verify", action="store_true", help="read everything back before the corpus is finished")
    args = parser.read(argv)
    from hyjax.data.progress import console
    from hyjax.data.readers import Options
    from hyjax.data.tokenize import tokenize

    with user_facing(), console() as report:
        result = tokenize(
            args.input,
            args.out,
            tokenizer=args.tokenizer,
            eos=args.eos,
            options=Options(args.field, args.separator),
            format=args.format,
            shard_bytes=(args.shard_mb or 0) * 1_000_000,
            workers=args.workers or _processors(),
            verify=args.verify,
            report=report,
        )
    print(json.dumps(result, indent=2) if args.json else _tokenized(args.out, result))
    return exit_codes.OK


def _processors() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tokenized(out: str, result: dict[str, Any]) -> str:
    what = (
        f"{result['documents']:,} documents, {result['tokens']:,} tokens ({result['tokenizer']}),"
        f" {result['bytes'] / 1e6:,.1f} MB of text, {result['bytes'] / result['tokens']:.3f} bytes a token"
    )
    if result["state"] != "made":
        return f"{out} was finished before and is whole, verified by checksum: {what}"
    empty = f"; {result['empty']:,} empty ones dropped" if result["empty"] else ""
    kept = f"; {result['units_kept']} of {result['shards']} units kept from before" if result["units_kept"] else ""
    lines = [f"{out}: {what}{empty}{kept}; {result['seconds']:.1f} s, {result['mb_per_second']:.1f} MB/s"]
    if result["documents"] == 1:
        lines.append("one document: none can be held out beside it, so give --separator to cut it before you train")
    return "\n".join([*lines, f"look at it: hyjax data inspect --corpus={out}"])


# ------------------------------------------------------------------------------------------------ inspect


def _inspect(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="hyjax data inspect",
        description="Look at a tokenised corpus, or at the rows of the batch that a step of a config reads.",
        epilog="example:\n  hyjax data inspect --corpus=corpora/mine --documents=5 --verify\n"
        "  hyjax data inspect --config=configs/quickstart.py --step=100",
    )
    parser.add_argument("--corpus", metavar="DIR", help="a folder that `hyjax data tokenize` made")
    parser.add_argument("--documents", type=_natural, metavar="N", help="documents to show, drawn at random (3)")
    parser.add_argument("--seed", type=_natural, metavar="N", help="of the drawing (0)")
    parser.add_argument("--heldout", type=float, metavar="X", help="the fraction that is held out (0.1)")
    parser.add_argument("--verify", action="store_true", help="read everything and compare the checksums")
    parser.add_argument("--config", metavar="FILE[:arg]", help=CONFIG_HELP)
    parser.add_argument("--step", type=_natural, metavar="N", help="whose batch to show (0)")
    parser.add_argument("--rows", type=positive, metavar="N", help="rows of it (2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    rest, overrides = split_overrides(argv)
    args = parser.read(rest)
    if (args.corpus is None) == (args.config is None):
        raise UserError("hyjax data inspect looks at a --corpus or at the data of a --config: give one of them")
    of_corpus, of_config = ("documents", "seed", "heldout"), ("step", "rows")
    for flag in of_config if args.corpus else of_corpus:
        if getattr(args, flag) is not None:
            raise UserError(f"--{flag} goes with --{'config' if args.corpus else 'corpus'}")
    if args.verify and not args.corpus:
        raise UserError("--verify goes with --corpus")
    if overrides and not args.config:
        raise UserError(f"{overrides[0].split('=')[0]} goes with --config")
    return _inspect_corpus(args) if args.corpus else _inspect_step(args, overrides)


def _natural(text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 up, not {text!r}")
    return int(text)


def _inspect_corpus(args: argparse.Namespace) -> int:
    heldout = 0.1 if args.heldout is None else args.heldout
    if not 0 < heldout < 1:
        raise UserError(f"--heldout={heldout} must be a fraction between 0 and 1")
    from hyjax.data import inspect
    from hyjax.data.store import Store

    with user_facing():
        store = Store(args.corpus)
        if args.verify:
            store.verify()
        documents = 3 if args.documents is None else args.documents
        result = inspect.describe_corpus(store, documents=documents, seed=args.seed or 0, heldout=heldout)
    if args.json:
        print(json.dumps(result | {"verified": args.verify}, indent=2))
        return exit_codes.OK
    inspect.show_corpus(result)
    if args.verify:
        print("every file was read and has the checksum of the manifest")
    return exit_codes.OK


def _inspect_step(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    config = load_config(args.config, overrides)
    from hyjax.data import build, inspect

    with user_facing():
        data = build(config.data, batch_size=config.train.batch_size, seed=config.seed)
        step = args.step or 0
        if step >= config.train.steps:
            raise UserError(f"--step={step} is past the last of the config: train.steps={config.train.steps}")
        result = inspect.describe_step(data, step, args.rows or 2)
    if args.json:
        print(json.dumps(result | {"data": data.description}, indent=2))
    else:
        inspect.show_step(result, data.description)
    return exit_codes.OK


# ------------------------------------------------------------------------------------------------ train_tokenizer


def _train_tokenizer(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="hyjax data train_tokenizer",
        description="Learn a byte-level BPE vocabulary; the same text gives the same file.",
        epilog=f"{TEXT_RULE}\nexample:\n  hyjax data train_tokenizer --input=books/ --out=bpe.json --vocab_size=4096",
    )
    _add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="FILE.json", help="what data.tokenizer is to name")
    parser.add_argument("--vocab_size", type=positive, required=True, metavar="N", help="tokens, 257 at least")
    parser.add_argument("--eos", default="<|endoftext|>", metavar="TOKEN", help="what ends a document (<|endoftext|>)")
    args = parser.read(argv)
    from hyjax.data.bpe import train_bpe
    from hyjax.data.inputs import find_inputs
    from hyjax.data.progress import LINE_SECONDS
    from hyjax.data.readers import Options, find_pieces, read_piece

    started, last = time.monotonic(), time.monotonic()

    def report(size: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"train_tokenizer: {size / 1e6:,.1f} MB read", file=sys.stderr, flush=True)

    with user_facing():
        options = Options(args.field, args.separator)
        pieces = find_pieces(find_inputs(args.input, args.format), 1 << 62, options)
        texts = (text for piece in pieces for text in read_piece(piece, options))
        result = train_bpe(texts, args.out, vocab_size=args.vocab_size, eos=args.eos, report=report)
    if args.json:
        print(json.dumps(result, indent=2))
        return exit_codes.OK
    fewer = result["vocab_size"] < args.vocab_size
    missing = f" ({args.vocab_size:,} were asked for: the text has no more pairs)" if fewer else ""
    print(
        f"{result['out']}: {result['vocab_size']:,} tokens{missing} from"
        f" {result['documents']:,} documents, {result['bytes'] / 1e6:,.1f} MB, {time.monotonic() - started:.1f} s"
    )
    return exit_codes.OK
