"""Train, prefill and decode are one `apply`: splits, padding and documents change nothing (PITFALLS B2, F1, F2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hyjax.models import Context
from tests.models.common import MODELS, build, context, tokens

T = 20


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    """One model after the other, each through all tests: its programs are compiled once, and then let go."""
    yield request.param
    jax.clear_caches()


def close(a, b, tolerance=1e-5):
    """Trees equal to within `tolerance`, relative to the larger of 1 and the value."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def in_pieces(name, ids, cuts, ctx=None, max_len=T):
    """Logits and final state of a batch given in pieces."""
    model, variables, apply = build(name)
    state, logits = model.init_state(len(ids), max_len), []
    for start, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        piece = None if ctx is None else Context(ctx[0][:, start:end], ctx[1][:, start:end])
        out = apply(variables, ids[:, start:end], piece, state)
        state, logits = out.state, [*logits, out.logits]
    return jnp.concatenate(logits, axis=1), state


def test_splits(name):
    """F2: forward(T) = forward(s) + forward(T − s) = T single steps, logits and states."""
    _, variables, apply = build(name)
    ids = tokens(2, T)
    whole, state = in_pieces(name, ids, [])
    close(apply(variables, ids).logits, whole)
    for cuts in ([1], [7], [8], [9], list(range(1, T))):  # 8 is the chunk; a tail shorter than it, and single steps
        logits, final = in_pieces(name, ids, cuts)
        close(logits, whole)
        close(final, state)


def test_documents_across_calls(name):
    """A row cut at a document's edge, inside one, or inside padding is the row in one piece."""
    _, variables, apply = build(name)
    ids = tokens(2, T)
    documents = [[3] * 5 + [0] * 2 + [3] * 2 + [1] * 6 + [3] * 5, [0] * 2 + [1] * 6 + [2] + [7] * 9 + [0] * 2]
    ctx = context(documents)
    valid = np.array(documents)[..., None] > 0
    whole, state = in_pieces(name, ids, [], ctx)
    close(jnp.where(valid, apply(variables, ids, Context(*ctx)).logits, 0), jnp.where(valid, whole, 0))
    for cuts in ([5], [6], [9], [15], list(range(1, T))):
        logits, final = in_pieces(name, ids, cuts, ctx)
        close(jnp.where(valid, logits, 0), jnp.where(valid, whole, 0))
        close(final, state)


def test_a_document_alone(name):
    """Each document of a packed row, padding inside it left out, gives the logits that it gives alone."""
    _, variables, apply = build(name)
    ids = tokens(1, T)
    documents = np.array([[3] * 5 + [0] * 2 + [3] * 2 + [1] * 6 + [3] * 5])
    packed = apply(variables, ids, Context(*context(documents))).logits[0]
    for where in ([0, 1, 2, 3, 4, 7, 8], range(9, 15), range(15, 20)):
        alone = apply(variables, ids[:, list(where)]).logits[0]
        close(packed[jnp.array(list(where))], alone)


def test_documents_do_not_leak(name):
    """B2: another document's tokens change no bit of this one's logits, and get no gradient from them."""
    _, variables, apply = build(name)
    ids = tokens(1, T)
    documents = np.array([[1] * 8 + [2] * 1 + [3] * 5 + [4] * 6])  # a border on a chunk's edge, length 1, mid-chunk
    ctx = Context(*context(documents))
    before = apply(variables, ids, ctx).logits
    for document in (1, 2, 3):
        changed = np.where(documents == document, (ids + 1) % 31, ids)
        after = apply(variables, changed, ctx).logits
        others = documents[0] != document
        assert (before[0, others] == after[0, others]).all()
        assert not (before[0, ~others] == after[0, ~others]).all()


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("attention", "gated-linear", "hybrid")])
def test_gradients_do_not_leak(name):
    """B2: d(loss of a document) / d(embedding of another's tokens) is exactly zero."""
    model, variables, _ = build(name)
    ids = np.arange(T, dtype=np.int32)[None]  # every token its own row of the table
    documents = np.array([[1] * 8 + [2] * 1 + [3] * 5 + [4] * 6])
    ctx = Context(*context(documents))

    @jax.jit
    def gradient(params, chosen):
        loss = lambda p: (model.apply({"params": p}, ids, ctx).logits[0] * chosen[:, None]).sum()
        return jax.grad(loss)(params)["embed"]["embedding"]

    for document in (2, 3, 4):
        rows = np.abs(gradient(variables["params"], jnp.float32(documents[0] == document))[:T]).sum(axis=1)
        assert (rows[documents[0] != document] == 0).all()
        assert (rows[documents[0] == document] > 0).all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts(name, side):
    """F1: prompts of 3, 7 and 20 tokens in one padded batch decode as each does alone."""
    model, variables, apply = build(name)
    lengths, new, pad = (3, 7, 20), 6, 30
    prompts = [tokens(1, n, seed=n)[0] for n in lengths]
    ids, documents = np.full((3, T), pad, np.int32), np.zeros((3, T), np.int32)
    for row, prompt in enumerate(prompts):
        at = slice(0, len(prompt)) if side == "right" else slice(T - len(prompt), T)
        ids[row, at], documents[row, at] = prompt, 1
    out = apply(variables, ids, Context(*context(documents)), model.init_state(3, T + new))
    last = np.where(side == "left", T - 1, np.array(lengths) - 1)
    batched = _greedy(apply, variables, out.logits[jnp.arange(3), last], out.state, new)
    for row, prompt in enumerate(prompts):
        alone = apply(variables, prompt[None], None, model.init_state(1, T + new))
        close(out.logits[row, documents[row] > 0], alone.logits[0])
        close(
            jax.tree.map(lambda a, r=row: a[:, r], out.state.layers),
            jax.tree.map(lambda a: a[:, 0], alone.state.layers),
        )
        assert batched[row] == _greedy(apply, variables, alone.logits[:, -1], alone.state, new)[0]


def _greedy(apply, variables, logits, state, count):
    """`count` greedy tokens a row, as lists."""
    found = []
    for _ in range(count):
        found.append(np.argmax(logits, axis=-1))
        out = apply(variables, found[-1][:, None].astype(np.int32), None, state)
        logits, state = out.logits[:, -1], out.state
    return np.stack(found, axis=1).tolist()


def test_padding_is_inert(name):
    """A call of nothing but padding changes no bit of a row's state."""
    model, variables, apply = build(name)
    state = apply(variables, tokens(2, 3), None, model.init_state(2, T)).state
    padding = Context(np.zeros((2, 3), np.int32), np.zeros((2, 3), np.int32))
    after = apply(variables, tokens(2, 3, seed=1), padding, state).state
    jax.tree.map(np.testing.assert_array_equal, state, after)


def test_a_full_cache_is_an_error():
    """P8: what does not fit is never written over what is there."""
    model, variables, apply = build("attention")
    state = apply(variables, tokens(1, 4), None, model.init_state(1, 4)).state
    with pytest.raises(ValueError, match="holds 5 tokens, but the state has room for 4"):
        model.apply(variables, tokens(1, 1), None, state)
    out = apply(variables, tokens(1, 1), None, state)
    assert bool(out.aux["overflow"][0])
    jax.tree.map(np.testing.assert_array_equal, out.state.layers, state.layers)


def test_recurrences_have_room_for_any_length():
    model, variables, apply = build("gated-linear")
    state = model.init_state(1, 4)
    assert state.capacity is None
    assert not apply(variables, tokens(1, T), None, state).aux["overflow"].any()


def test_measured_state_bytes():
    """4 KiB flat for GGGG at batch 1 in float32; the slope of GGAG is exactly a quarter of AAAA's."""
    from hyjax.models import HybridLM

    def measured(layout, length):
        model = HybridLM(dict(layout=layout, width=32, heads=4, vocab_size=32))
        return sum(a.nbytes for a in jax.tree.leaves(model.init_state(1, length).layers))

    assert measured("GGGG", 128) == measured("GGGG", 4096) == 4096
    slope = {layout: measured(layout, 1024) - measured(layout, 512) for layout in ("AAAA", "GGAG")}
    assert slope["AAAA"] == 4 * slope["GGAG"] == 4 * 512 * 2 * 32 * 4
