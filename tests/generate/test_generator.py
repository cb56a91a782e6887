"""Continuations against the uncached forward pass; batches against prompts alone; what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyjax.generate import Generator, NonFiniteLogitsError, Sampling
from hyjax.models import Context, HybridLM
from tests.generate.common import LAYOUTS, PROMPTS, ROOM, SMALL, VOCAB, apply, build, close, forward, padded, states

NEW = 12
GREEDY = Sampling(NEW, 0.0)
DRAWN = Sampling(NEW, 1.0, top_p=0.95, seed=5)
ENDING = dataclasses.replace(DRAWN, stop_ids=(3, 7, 12, 20, 28))


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_tokens_are_the_uncached_ones(name):
    """Every token is the most likely one after all that stands before it, computed without any state."""
    found = build(name)[2].generate(PROMPTS, GREEDY)
    rows = [[*prompt, *out.ids] for prompt, out in zip(PROMPTS, found, strict=True)]
    best = np.asarray(forward(name)(padded(rows)).argmax(-1))
    for row, (prompt, out) in enumerate(zip(PROMPTS, found, strict=True)):
        assert len(out.ids) == NEW and out.reason == "length"
        assert list(out.ids) == best[row, len(prompt) - 1 : len(prompt) + NEW - 1].tolist()


def test_scanned_layers_give_the_same_tokens():
    """Layers apart or stacked is a matter of speed."""
    model, params, generator = build("GGAG")
    scanned = Generator(model, params, ROOM, prefill_chunk=8, apart=False)
    assert scanned.generate(PROMPTS, DRAWN) == generator.generate(PROMPTS, DRAWN)


@pytest.mark.parametrize("name", ["GW", "GGAG"])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, ENDING], ids=["greedy", "drawn", "ending"])
def test_a_batch_is_its_prompts_alone(name, sampling):
    """F1: ids, and the state that is left, which another row's length or end must not touch."""
    generator = build(name)[2]
    together = generator.start(PROMPTS, sampling)
    together.advance()
    if sampling is ENDING:
        assert len({len(ids) for ids in together.ids}) > 1  # a row is done while another goes on
    for row, prompt in enumerate(PROMPTS):
        alone = generator.start([prompt], sampling, numbers=[row])
        alone.advance()
        assert alone.ids[0] == together.ids[row]
        close(states(generator, alone.rows, 0), states(generator, together.rows, row))


@pytest.mark.parametrize("name", ["GA", "GW", "GGAG"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pieces_leave_the_state_of_one_padded_call(name, side):
    """F1: prompts of 3, 7 and 20 tokens in one call of the model, padded on either side, and in pieces of 8."""
    model, params, generator = build(name)
    read = [prompt[:-1] for prompt in PROMPTS]
    ids, valid = np.full((3, 19), 30, np.int32), np.zeros((3, 19), np.int32)
    for row, prompt in enumerate(read):
        at = slice(0, len(prompt)) if side == "right" else slice(19 - len(prompt), 19)
        ids[row, at], valid[row, at] = prompt, 1
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    state = apply(name)({"params": params}, ids, Context(positions, valid), model.init_state(3, ROOM)).state
    layers, clock = states(generator, generator.start(PROMPTS, GREEDY).rows)
    close(layers, state.layers)
    close(clock, state.clock)


def test_any_length_of_piece_will_do():
    """Pieces of 1, 3 (shorter than the convolution's tail and one), 16 and a whole prompt at once."""
    model, params, generator = build("GA")
    expected = states(generator, generator.start(PROMPTS, GREEDY).rows)
    for size in (1, 3, 16, 32):
        other = Generator(model, params, ROOM, prefill_chunk=size)
        close(states(other, other.start(PROMPTS, GREEDY).rows), expected)


def test_other_prompts_and_values_need_no_other_program(monkeypatch):
    """Traces are counted: lengths, sampling values, stops, blocks and seeds are data."""
    model, params, _ = build("GA")
    generator = Generator(model, params, ROOM, prefill_chunk=4)
    traces = []
    hidden = generator.decoder.model.hidden
    monkeypatch.setattr(generator.decoder.model, "hidden", lambda *a: traces.append(1) or hidden(*a))
    generator.generate(PROMPTS, GREEDY)
    first = len(traces)
    assert first >= 2
    generator.generate([[1], [2] * 25, [3, 4]], DRAWN)
    generator.generate(
        PROMPTS[::-1], Sampling(3, 0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0, stop_ids=(1, 2), seed=9)
    )
    generation = generator.start(PROMPTS, DRAWN)
    while generation.advance(5):
        pass
    generation = generator.start(PROMPTS, DRAWN)
    generation.advance(2)
    generation.stop(1, 1, "stop text")
    generation.advance(3)
    assert len(traces) == first
    generator.generate(PROMPTS[:2], GREEDY)
    assert len(traces) > first  # another number of rows is another program, so the counting counts


def test_blocks_change_nothing():
    """Looking every few tokens, and stopping a row in between, leaves the others' draws as they are."""
    generator = build("GGAG")[2]
    whole = generator.generate(PROMPTS, DRAWN)
    for block in (1, 5, NEW, 100):
        generation = generator.start(PROMPTS, DRAWN)
        while generation.advance(block):
            pass
        assert generation.continuations() == whole
    generation = generator.start(PROMPTS, DRAWN)
    generation.advance(4)
    generation.stop(0, 2, "stop text")
    while generation.advance(3):
        pass
    stopped, *others = generation.continuations()
    assert others == whole[1:]
    assert stopped.ids == whole[0].ids[:2] and stopped.reason == "stop text"


def test_ids_that_end_a_row():
    """eos and stop ids end a row with them; the other rows go on; the loop ends when all have."""
    model, params, generator = build("GGAG")
    whole = [out.ids for out in generator.generate(PROMPTS, DRAWN)]
    other = next(i for i in whole[1][2:] if i not in whole[0])
    eos = next(i for i in whole[0][2:] if i not in whole[1])
    ends = dataclasses.replace(DRAWN, stop_ids=(other,))
    monitored = Generator(model, params, ROOM, prefill_chunk=8, eos=eos)
    monitored.prefill, monitored.decode, monitored.init_state = (
        generator.prefill,
        generator.decode,
        generator.init_state,
    )
    first, second, third = monitored.generate(PROMPTS, ends)
    assert first.ids == whole[0][: whole[0].index(eos) + 1] and first.reason == "eos"
    assert second.ids == whole[1][: whole[1].index(other) + 1] and second.reason == "stop id"
    cut = next((n + 1 for n, i in enumerate(whole[2]) if i in (eos, other)), NEW)
    assert third.ids == whole[2][:cut]
    assert [out.ids for out in monitored.generate(PROMPTS, dataclasses.replace(DRAWN, ignore_eos=True))] == whole
    generation = monitored.start(PROMPTS, dataclasses.replace(DRAWN, stop_ids=tuple(range(VOCAB))))
    assert not generation.advance()
    assert [len(ids) for ids in generation.ids] == [1, 1, 1] and int(generation.rows.count.max()) == 1
    assert not generation.advance()


def test_a_seed_gives_one_text():
    """The same call, the same ids; another seed, others; one prompt given three times is continued in three ways."""
    generator = build("GGAG")[2]
    first, again = (generator.generate(PROMPTS, DRAWN) for _ in range(2))
    assert first == again
    assert generator.generate(PROMPTS, dataclasses.replace(DRAWN, seed=6)) != first
    same = generator.generate([PROMPTS[1]] * 3, DRAWN)
    assert len({out.ids for out in same}) == 3
    assert same[1] == first[1]  # a row's number and seed are all that its draws depend on


def test_draws_of_a_row_are_independent():
    """From a model that finds every id equally likely: 3 rows of 21 draws hit about as many ids as 63 draws should."""
    generator = build("GGAG")[2]
    good = generator.params
    try:
        generator.params = good | {"head": jax.tree.map(jnp.zeros_like, good["head"])}
        rows = [out.ids for out in generator.generate(PROMPTS, Sampling(21, 1.0))]
    finally:
        generator.params = good
    assert all(len(set(ids)) > 8 for ids in rows)  # 31 ids: 15.4 are expected, 8 or fewer about never
    assert len({ids[0] for ids in rows}) > 1 or len({ids[1] for ids in rows}) > 1


@pytest.mark.parametrize(
    ("name", "prompts", "sampling", "message"),
    [
        ("GA", [], GREEDY, "there is no prompt"),
        ("GA", [[1], []], GREEDY, "prompt 2 holds no token"),
        ("GA", [[1, VOCAB]], GREEDY, "the prompt holds id 31, which is not in the vocabulary of 31"),
        ("GA", [[1, -1]], GREEDY, "the prompt holds id -1"),
        ("GA", [[1.5]], GREEDY, r"the prompt must be a row of whole numbers; got float64 \[1\]"),
        ("GA", [[1], [1] * 30], GREEDY, "prompt 2 of 30 tokens and 12 new ones need 41 places.* at most 11 new"),
        ("GA", [[1] * 41], Sampling(1), "41 tokens and 1 new ones need 41 places; there is room for 40: none fit"),
        ("GA", [[1]], Sampling(stop=("a",)), "use generate_text"),
        ("GA", [[1]], Sampling(9, stop_ids=(31,)), "stop id 31 is not in the vocabulary of 31"),
    ],
    ids=lambda x: "",
)  # fmt: skip
def test_refusals(name, prompts, sampling, message):
    """Before any device works."""
    with pytest.raises(ValueError, match=message):
        build(name)[2].generate(prompts, sampling)


def test_learned_positions_end():
    model = HybridLM(SMALL | dict(layout="G", position="learned", max_positions=16))
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    generator = Generator(model, params, 64)
    with pytest.raises(ValueError, match=r"9 new ones need 17 places; model\.max_positions is 16: at most 8"):
        generator.generate([[1] * 9], Sampling(9, 0.0))


def test_room_is_used_to_the_last_place():
    """The last token that is drawn takes none, for nothing reads it; one more is refused, and never written."""
    generator = build("GGAG")[2]
    most = ROOM + 1 - 20
    out = generator.generate(PROMPTS, Sampling(most, 0.0))[2]
    row = [*PROMPTS[2], *out.ids]
    best = np.asarray(forward("GGAG")(padded([row[:ROOM]] * 3)).argmax(-1))[0]
    assert row[20:] == best[19:].tolist()


def test_overflow_is_an_error(monkeypatch):
    """What the check before should have refused does not pass in silence."""
    generator = build("GGAG")[2]
    monkeypatch.setattr(generator, "_check", lambda *a: None)
    with pytest.raises(RuntimeError, match="prompt 3 found no room in the state"):
        generator.generate(PROMPTS, Sampling(30, 0.0))


def test_logits_that_are_no_numbers():
    generator = build("GGAG")[2]
    good = generator.params
    try:
        generator.params = good | {"final_norm": {"scale": good["final_norm"]["scale"] * jnp.nan}}
        with pytest.raises(NonFiniteLogitsError, match="logits after prompt 1 are not finite"):
            generator.generate(PROMPTS, GREEDY)
    finally:
        generator.params = good


def test_several_streams_are_refused():
    with pytest.raises(ValueError, match=r"model.streams is \(5, 6\); only a model of one token stream generates"):
        Generator(HybridLM(SMALL | dict(layout="G", streams=(5, 6))), {}, 8)
