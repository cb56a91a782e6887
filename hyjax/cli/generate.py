"""`hyjax generate`: prompts in, continuations out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyjax import exit_codes
from hyjax.cli.parser import Parser, UserError, positive, user_facing

if TYPE_CHECKING:
    from hyjax.generate import Sampling, TextStream
    from hyjax.generate.text import Tokenizer
    from hyjax.train.export import Run

EPILOG = """\
The next token: the repetition penalty is applied to the logits, then the temperature, top-k, top-p and min-p, in this
order. The same command gives the same text; each prompt has random numbers of its own, from --seed and its place.

example:
  hyjax generate --workdir=runs/quickstart --prompt="The import statement" --max_new_tokens=100 --top_p=0.9"""


def _parser() -> Parser:
    parser = Parser(prog="hyjax generate", description="Continue prompts with a trained model.", epilog=EPILOG)
    add = parser.add_argument
    add("--workdir", required=True, metavar="DIR", help="the run whose model it is, or an export of it")
    add("--step", type=int, metavar="N", help="the checkpoint of that step (the newest)")
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="what is continued; may be given again; may be empty",
    )
    add("--prompt_file", metavar="FILE", help="more prompts, one a line (empty lines are left out); - reads stdin")
    add("--max_new_tokens", type=int, metavar="N", help="the most tokens that follow (200)")
    add("--temperature", type=float, metavar="T", help="0 always takes the most likely token (0.8)")
    add("--top_k", type=int, metavar="K", help="only the K most likely tokens (0: all)")
    add("--top_p", type=float, metavar="P", help="only the fewest tokens whose probabilities sum to P (1: all)")
    add(
        "--min_p",
        type=float,
        metavar="P",
        help="only tokens at least P times as likely as the most likely one (0: all)",
    )
    add("--repetition_penalty", type=float, metavar="R", help="above 1: tokens that were there become less likely (1)")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    add("--stop_id", action="append", type=int, metavar="ID", help="end at this token; may be given again")
    add("--ignore_eos", action="store_true", default=None, help="go on after the end of a document")
    add("--seed", type=int, metavar="N", help="another seed, another text (0)")
    add("--prefill_chunk", type=positive, metavar="N", help="tokens of a prompt that are read at once (128)")
    add("--no_stream", action="store_true", help="print a text once it is complete, not as it comes")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def generate(argv: Sequence[str]) -> int:
    """Continue prompts with a trained model."""
    args = _parser().read(argv)
    prompts = [*args.prompt, *_read_prompts(args.prompt_file)]
    if not prompts:
        raise UserError("there is no prompt: give --prompt=TEXT (--prompt= starts from nothing) or --prompt_file=FILE")
    from hyjax.generate import NonFiniteLogitsError

    try:
        return _generate(args, prompts)
    except NonFiniteLogitsError as error:
        print(f"hyjax: stopped: {error}", file=sys.stderr)
        return exit_codes.NOT_FINITE
    except KeyboardInterrupt:
        print()
        return exit_codes.INTERRUPTED


def _generate(args: argparse.Namespace, prompts: list[str]) -> int:
    with user_facing():
        sampling = _sampling(args)
        run = _load(args.workdir, args.step)
        stream = _stream(run, prompts, sampling, args)
    start = time.perf_counter()
    if args.json:
        for _ in stream:
            pass
    else:
        _print(stream, prompts)
    seconds, results = time.perf_counter() - start, stream.continuations()
    if args.json:
        print(json.dumps(_report(args.workdir, run.step, sampling, results), indent=2))
    tokens, reasons = sum(len(result.ids) for result in results), dict.fromkeys(result.reason for result in results)
    print(f"{tokens} tokens in {seconds:.1f} s, compiling included; ended by {', '.join(reasons)}", file=sys.stderr)
    return exit_codes.OK


def _sampling(args: argparse.Namespace) -> Sampling:
    from hyjax.generate import Sampling

    numbers = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos", "seed")
    given: dict[str, Any] = {name: getattr(args, name) for name in numbers}
    given |= {"stop": args.stop and tuple(args.stop), "stop_ids": args.stop_id and tuple(args.stop_id)}
    return Sampling(**{name: value for name, value in given.items() if value is not None})


def _read_prompts(name: str | None) -> list[str]:
    if name is None:
        return []
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"--prompt_file={name} can't be read: {reason}") from error
    prompts = [line for line in text.splitlines() if line]
    if not prompts:
        raise UserError(f"--prompt_file={name} holds no prompt")
    return prompts


def _load(workdir: str, step: int | None) -> Run:
    import jax

    from hyjax.train.export import load_run

    cache = Path(workdir) / "compilation_cache"
    if cache.is_dir():  # training's own: the second command on this machine compiles nothing
        jax.config.update("jax_compilation_cache_dir", str(cache.absolute()))
    return load_run(workdir, step)


def _stream(run: Run, prompts: list[str], sampling: Sampling, args: argparse.Namespace) -> TextStream:
    from hyjax.generate import Generator, TextStream, prompt_ids
    from hyjax.generate.generator import PREFILL_CHUNK
    from hyjax.generate.text import BLOCK

    if run.tokenizer is None:
        raise ValueError(f"the model of {args.workdir} was trained on {run.config['data']['source']}, which is no text")
    ids = [prompt_ids(run.tokenizer, prompt) for prompt in prompts]
    need = max(map(len, ids)) + sampling.max_new_tokens - 1
    room = 1 << max(8, (need - 1).bit_length())  # few sizes, so that most commands find their programs compiled
    _check_memory(run.model, len(prompts), room, sampling.max_new_tokens)
    chunk = args.prefill_chunk or PREFILL_CHUNK
    generator = Generator(run.model, run.params, room, eos=run.tokenizer.eos, prefill_chunk=chunk)
    looks = not (args.json or args.no_stream) or sampling.stop
    stream = TextStream(generator, run.tokenizer, prompts, sampling, BLOCK if looks else None)
    _notes(run.tokenizer, prompts, ids, max(map(len, ids)) + sampling.max_new_tokens, run.config["data"]["seq_len"])
    return stream


def _notes(tokenizer: Tokenizer, prompts: list[str], ids: list[list[int]], longest: int, trained: int) -> None:
    """What a person may not expect, on stderr."""
    for prompt, found in zip(prompts, ids, strict=True):
        if prompt and (read := tokenizer.decode(found)) != prompt:
            print(f"note: the tokenizer {tokenizer.name} reads {prompt!r} as {read!r}", file=sys.stderr)
    if longest > trained:
        print(f"note: up to {longest} tokens a text; the model was trained on rows of {trained}", file=sys.stderr)


def _check_memory(model: Any, batch: int, room: int, new: int) -> None:
    """A state that does not fit would end the process, not the command."""
    import jax

    shapes = jax.eval_shape(lambda: model.init_state(batch, room))
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    limit = limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > limit:
        raise UserError(
            f"a state for {batch} rows of {room} tokens takes {size / 2**30:.1f} GiB, and the device has"
            f" {limit / 2**30:.1f}: ask for less than --max_new_tokens={new}"
        )


def _print(stream: TextStream, prompts: list[str]) -> None:
    """The texts in order: the first that is not complete as it comes, the others once their turn has come."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    headings = [f"=== {i + 1} ===\n" if len(prompts) > 1 else "" for i in range(len(prompts))]
    unread = [heading + prompt for heading, prompt in zip(headings, prompts, strict=True)]
    current = 0
    for pieces in stream:
        unread = [text + piece for text, piece in zip(unread, pieces, strict=True)]
        for row in range(current, len(prompts)):
            print(unread[row], end="", flush=True)
            unread[row] = ""
            if not stream.done[row]:
                break
            print()
            current = row + 1


def _report(workdir: str, step: int, sampling: Sampling, results: Sequence[Any]) -> dict[str, Any]:
    return {
        "workdir": workdir,
        "step": step,
        "sampling": dataclasses.asdict(sampling),
        "results": [dataclasses.asdict(result) for result in results],
    }
