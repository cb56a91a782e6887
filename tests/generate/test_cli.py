"""`hyjax generate` on a model that was never trained, in a folder that was never written."""

import io
import json
import sys
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest

from hyjax import cli, exit_codes
from hyjax.data.tokenizers import ByteTokenizer, LetterTokenizer
from hyjax.generate import Generator, Sampling, generate_text
from hyjax.models import HybridLM


@pytest.fixture(scope="module")
def run():
    model = HybridLM(dict(layout="GA", width=16, heads=2, vocab_size=257, ffn="gelu", ffn_width=16))
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    config = {"data": {"seq_len": 64, "source": "topics"}}
    return SimpleNamespace(model=model, params=params, config=config, step=30, tokenizer=ByteTokenizer())


@pytest.fixture
def hyjax(run, monkeypatch, tmp_path, capsys):
    """`hyjax("--flag", ...)` -> (exit code, stdout, stderr), on the run above."""
    asked = []
    module = ModuleType("hyjax.train.export")
    module.load_run = lambda path, step=None: asked.append((path, step)) or run
    monkeypatch.setitem(sys.modules, "hyjax.train.export", module)

    def call(*words):
        code = cli.main(["generate", f"--workdir={tmp_path}", *words])
        assert not asked or asked[-1][0] == str(tmp_path)
        return code, *capsys.readouterr()

    call.asked = asked
    return call


GREEDY = ("--temperature=0", "--max_new_tokens=12")


def expected(run, prompts, **sampling):
    generator = Generator(run.model, run.params, 256, eos=256)
    return generate_text(generator, run.tokenizer, prompts, Sampling(**sampling))


def test_a_prompt_is_printed_with_what_follows(hyjax, run):
    (out,) = expected(run, ["hello"], temperature=0.0, max_new_tokens=12)
    code, shown, notes = hyjax("--prompt=hello", *GREEDY)
    assert code == exit_codes.OK and shown == f"hello{out.text}\n"
    assert "12 tokens in" in notes and "ended by length" in notes
    assert hyjax("--prompt=hello", "--no_stream", *GREEDY)[1] == shown


def test_json_says_all_of_several_prompts(hyjax, run, tmp_path):
    (tmp_path / "prompts").write_text("two words\n\nthird\n")
    words = (f"--prompt_file={tmp_path}/prompts", "--step=30", "--seed=4", "--top_k=40", "--top_p=0.9", "--min_p=0.01")
    more = ("--repetition_penalty=1.1", "--stop=x", "--stop=yz", "--stop_id=9", "--max_new_tokens=12", "--ignore_eos")
    code, shown, _ = hyjax("--prompt=", *words, *more, "--prefill_chunk=4", "--json")
    report = json.loads(shown)
    options = dict(max_new_tokens=12, seed=4, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, ignore_eos=True)
    found = expected(run, ["", "two words", "third"], stop=("x", "yz"), stop_ids=(9,), **options)
    assert code == 0 and hyjax.asked == [(str(tmp_path), 30)] and report["step"] == 30
    assert report["sampling"]["stop"] == ["x", "yz"] and report["sampling"]["top_k"] == 40
    for result, out in zip(report["results"], found, strict=True):
        assert result["prompt"] == out.prompt and result["text"] == out.text and result["reason"] == out.reason
        assert tuple(result["ids"]) == out.ids and tuple(result["prompt_ids"]) == out.prompt_ids
    assert report["results"][0]["prompt_ids"] == [256]


def test_several_texts_come_in_order(hyjax, run):
    """Though they are drawn at once, and the first is the last to end."""
    found = expected(run, ["one", "two"], temperature=0.0, max_new_tokens=12)
    _, shown, _ = hyjax("--prompt=one", "--prompt=two", *GREEDY)
    assert shown == "".join(f"=== {i + 1} ===\n{out.prompt}{out.text}\n" for i, out in enumerate(found))


def test_prompts_from_stdin(hyjax, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    report = json.loads(hyjax("--prompt_file=-", "--json", *GREEDY)[1])
    assert [result["prompt"] for result in report["results"]] == ["one", "two"]


def test_what_a_person_may_not_expect_is_said(hyjax, run, monkeypatch):
    monkeypatch.setattr(run, "tokenizer", LetterTokenizer())
    monkeypatch.setattr(
        run.tokenizer, "decode", lambda ids: "".join(" ?abcdefghijklmnopqrstuvwxyz"[i % 28] for i in ids)
    )
    code, _, notes = hyjax("--prompt=So: 9", "--max_new_tokens=100", "--temperature=0")
    assert code == 0
    assert "note: the tokenizer letters reads 'So: 9' as 'so '" in notes
    assert "note: up to 103 tokens a text; the model was trained on rows of 64" in notes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is no prompt: give --prompt=TEXT"),
        (("--prompt=a", "--top_p=1.5"), "top_p is 1.5; it must be above 0 and at most 1"),
        (("--prompt=a", "--temperature=nan"), "temperature is nan; it must be at least 0"),
        (("--prompt=a", "--top_k=x"), "argument --top_k: invalid int value: 'x'"),
        (("--prompt=a", "--stop="), "stop is ('',); it must be a tuple of texts, none of them empty"),
        (("--prompt=a", "--stop_id=300"), "stop id 300 is not in the vocabulary of 257"),
        (("--prompt=a", "--seed=-1"), "seed is -1; it must be from 0"),
        (("--prompt=a", "--prefill_chunk=0"), "argument --prefill_chunk: must be a whole number from 1"),
        (("--prompt=a", "--max_new_tokens=2000000000"), "a state for 1 rows of 2147483648 tokens takes"),
        (("--prompt=a\udc80",), "is not Unicode text"),
        (("--prompt_file=nowhere",), "--prompt_file=nowhere can't be read: No such file or directory"),
        (("--prompt=a", "--top-k=3"), "hyjax generate has no flag --top-k; did you mean --top_k?"),
    ],
    ids=lambda x: " ".join(x).encode("ascii", "replace").decode() if isinstance(x, tuple) else "",
)  # fmt: skip
def test_what_a_person_did_wrong_is_one_line(hyjax, words, message):
    code, shown, error = hyjax(*words)
    assert code == exit_codes.USAGE and not shown
    assert error.startswith("hyjax: error: ") and message in error and error.count("\n") == 1


def test_a_run_that_is_no_text(hyjax, run, monkeypatch):
    monkeypatch.setattr(run, "tokenizer", None)
    code, _, error = hyjax("--prompt=a")
    assert code == exit_codes.USAGE and "was trained on topics, which is no text" in error


def test_a_broken_model_has_its_own_code(hyjax, run, monkeypatch):
    monkeypatch.setattr(run, "params", jax.tree.map(lambda a: a * np.nan, run.params))
    code, _, error = hyjax("--prompt=a", *GREEDY)
    assert code == exit_codes.NOT_FINITE and "logits after prompt 1 are not finite" in error
