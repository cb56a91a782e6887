"""diagonal_scan for TPU: one walk over time, forward or backward, eight tokens at once.

A vector register holds 8 tokens of 128 channels. With a_t the decays, x_t the inputs and h the state before token 0,
the eight states come by doubling, every register whole and every factor a product of decays:

    x_0 += a_0 h, a_0 = 0;    for s = 1, 2, 4:  x_t += a_t x_{t-s},  a_t *= a_{t-s}    (indices modulo 8)

What wraps around is multiplied by the decay of a span that holds token 0, which is zero: there is nothing to mask, and
x_7 goes on to the next eight. Backward it is the same from the last token to the first: with dh_t the gradient of the
output h_t, and Q_t that of h_{t-1} through h_t,

    Q_t = a_t (dh_t + Q_{t+1})          dx_t = dh_t + Q_{t+1}          dg_t = Q_t h_{t-1}

Nothing is saved but h and g. A complex number is a pair of planes, and its decays are made outside. A single token is a
step without a walk, and XLA's.

The grid is (rows of the batch, channels, time); blocks are [rows, tokens, channels], states [rows, 8, channels].
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels import dispatch
from hyjax.kernels.diagonal_scan import tpu_plan, xla
from hyjax.kernels.diagonal_scan.tpu_plan import ROWS, SUBLANES, Plan
from hyjax.kernels.varying import alike

VMEM_BYTES = 48 << 20  # of 64 MiB on v5p and tpu7x, and 128 on v5e and v6e

Planes = tuple[jax.Array, ...]  # a real number's one, or the real and the imaginary part


def forward(x, log_decay, state, *, chunk_size: int | None, interpret: Any):
    """x, log_decay [B,T,D] (-inf resets), state [B,D] -> h [B,T,D] in x's dtype, the final state in `state`'s.

    chunk_size is of XLA's walk; interpret as pallas_call's.
    """
    if x.shape[1] == 1:
        return xla.forward(x, log_decay, state, chunk_size=chunk_size)
    p = tpu_plan.plan(x.shape, jnp.iscomplexobj(x))
    inputs = [("tokens", a) for a in (*_tokens(x, p), *_decays(log_decay, p))]
    inputs += [("state", a) for a in _states(state, p)]
    out = _call(_forward_kernel, "diagonal_scan_forward", p, inputs, [x.dtype], interpret)
    return _whole(out[: p.planes], x.shape), _whole(out[p.planes :], x.shape)[:, SUBLANES - 1]


def backward(h, log_decay, state, dh, dfinal, *, chunk_size: int | None, interpret: Any):
    """The gradients of x and log_decay, in h's and log_decay's dtype, and of the initial state, in dfinal's."""
    if h.shape[1] == 1:
        return xla.backward(h, log_decay, state, dh, dfinal, chunk_size=chunk_size)
    p = tpu_plan.plan(h.shape, jnp.iscomplexobj(h))
    outputs = _tokens(h, p)
    inputs = [("tokens", a) for a in (*outputs, *_decays(log_decay, p), *_tokens(dh, p))]
    inputs += [("before", a) for a in outputs] + [("state", a) for a in (*_states(state, p), *_states(dfinal, p))]
    dtypes = [h.dtype, log_decay.dtype]
    out = _call(_backward_kernel, "diagonal_scan_backward", p, inputs, dtypes, interpret, reverse=True)
    dx, dg, dstate = (_whole(out[n : n + p.planes], h.shape) for n in range(0, 3 * p.planes, p.planes))
    return dx, dg, dstate[:, 0]


def _planes(x: jax.Array) -> Planes:
    return (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)


def _tokens(x: jax.Array, p: Plan) -> Planes:
    """[B,T,D] -> planes [B, p.time, p.dim], zeros behind."""
    padding = ((0, 0), (0, p.time - x.shape[1]), (0, p.dim - x.shape[2]))
    return tuple(jnp.pad(a, padding) for a in _planes(x))


def _decays(log_decay: jax.Array, p: Plan) -> Planes:
    """What the kernel makes decays of: logarithms, but complex decays themselves. Padding decays nothing."""
    if not jnp.iscomplexobj(log_decay):
        return _tokens(log_decay, p)
    size, angle = (jnp.exp(a) if n == 0 else a for n, a in enumerate(_tokens(log_decay, p)))
    return size * jnp.cos(angle), size * jnp.sin(angle)


def _states(state: jax.Array, p: Plan) -> Planes:
    """[B,D] -> planes [B, 8, p.dim], eight times the same: the walk takes the row that it needs."""
    wide = jnp.pad(state, ((0, 0), (0, p.dim - state.shape[1])))
    return tuple(jnp.broadcast_to(a[:, None], (a.shape[0], SUBLANES, p.dim)) for a in _planes(wide))


def _whole(planes: Sequence[jax.Array], shape: tuple[int, int, int]) -> jax.Array:
    """The inverse of _tokens."""
    cut = [a[:, : shape[1], : shape[2]] for a in planes]
    return lax.complex(*cut) if len(cut) == 2 else cut[0]


def _call(
    kernel: Callable,
    name: str,
    p: Plan,
    inputs: Sequence[tuple[str, jax.Array]],
    dtypes: Sequence[Any],
    interpret: Any,
    reverse: bool = False,
) -> Sequence[jax.Array]:
    """Run `kernel` over all blocks of time; the planes of one array of tokens for each dtype, and of the last state."""
    arrays = alike(*(a for _, a in inputs))
    batch, steps = arrays[0].shape[0], p.time // p.tokens
    place = lambda t: steps - 1 - t if reverse else t
    specs = {
        "tokens": pl.BlockSpec((p.rows, p.tokens, p.channels), lambda b, d, t: (b, place(t), d)),
        # The rows that end before the block, whose last is the token before it; the first block has none.
        "before": pl.BlockSpec(
            (p.rows, ROWS, p.channels), lambda b, d, t: (b, jnp.maximum(place(t) * (p.tokens // ROWS) - 1, 0), d)
        ),
        "state": pl.BlockSpec((p.rows, SUBLANES, p.channels), lambda b, d, t: (b, 0, d)),
    }
    out_kinds = ["tokens"] * (p.planes * len(dtypes)) + ["state"] * p.planes
    plane_dtypes = [jnp.finfo(dtype).dtype for dtype in dtypes for _ in range(p.planes)] + [jnp.float32] * p.planes
    lengths = dict(tokens=p.time, state=SUBLANES)
    axis_type = jax.typeof(arrays[0]).manual_axis_type
    shapes = [
        jax.ShapeDtypeStruct((batch, lengths[kind], p.dim), dtype, manual_axis_type=axis_type)
        for kind, dtype in zip(out_kinds, plane_dtypes, strict=True)
    ]
    numbers = batch * p.time * p.dim
    moved = sum(a.size * a.dtype.itemsize for (kind, _), a in zip(inputs, arrays, strict=True) if kind == "tokens")
    moved += sum(a.size * a.dtype.itemsize for a in shapes)
    return pl.pallas_call(
        functools.partial(kernel, p),
        shapes,
        grid=(batch // p.rows, p.dim // p.channels, steps),
        in_specs=[specs[kind] for kind, _ in inputs],
        out_specs=[specs[kind] for kind in out_kinds],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(flops=16 * p.planes**2 * numbers, transcendentals=numbers, bytes_accessed=moved),
        interpret=dispatch.interpreter(interpret, *arrays),
        name=name,
    )(*arrays)


def _mul(x: Planes, y: Planes) -> Planes:
    if len(x) == 1:
        return (x[0] * y[0],)
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def _add(x: Planes, y: Planes) -> Planes:
    return tuple(a + b for a, b in zip(x, y, strict=True))


def _roll(x: Planes, shift: int) -> Planes:
    """Token t at place t + shift, modulo 8."""
    return tuple(pltpu.roll(a, shift % SUBLANES, a.ndim - 2) for a in x)


def _choose(where: jax.Array, x: Planes, y: Planes | None = None) -> Planes:
    """x there, elsewhere y, or zero."""
    others: Sequence[Any] = (0.0,) * len(x) if y is None else y
    return tuple(jnp.where(where, a, b) for a, b in zip(x, others, strict=True))


def _at_place(place: int, like: Planes) -> jax.Array:
    """Where a register of 8 tokens has its token `place`."""
    return lax.broadcasted_iota(jnp.int32, like[0].shape, 1) == place


def _doubling(decay: Planes, x: Planes, direction: int) -> Planes:
    """The states of 8 tokens, after (direction 1) or before (-1) which the first walked has a decay of zero."""
    for size in (1, 2, 4):
        x = _add(x, _mul(decay, _roll(x, direction * size)))
        if size < SUBLANES // 2:
            decay = _mul(decay, _roll(decay, direction * size))
    return x


def _decay(p: Plan, x: Planes) -> Planes:
    return (jnp.exp(x[0]),) if p.planes == 1 else x


def _split(p: Plan, refs: Sequence[Any]) -> list[Sequence[Any]]:
    """The references by array, each with its planes."""
    return [refs[n : n + p.planes] for n in range(0, len(refs), p.planes)]


def _read(refs: Sequence[Any], at: Any) -> Planes:
    """ROWS tokens [rows, ROWS, channels]."""
    return tuple(ref[:, at].astype(jnp.float32) for ref in refs)


def _write(refs: Sequence[Any], at: Any, groups: Sequence[Planes]) -> None:
    """ROWS tokens, by eights."""
    for ref, *parts in zip(refs, *groups, strict=True):
        ref[:, at] = jnp.concatenate(parts, axis=1).astype(ref.dtype)


def _eights(x: Planes) -> list[Planes]:
    return [tuple(a[:, n : n + SUBLANES] for a in x) for n in range(0, ROWS, SUBLANES)]


def _rows_at(i: Any) -> Any:
    return pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)


def _begin(start_refs: Sequence[Any], state_refs: Sequence[Any]) -> None:
    """The state's output, which stays where it is until the last block of time, is where the walk keeps it."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        for start, state in zip(start_refs, state_refs, strict=True):
            state[...] = start[...]


def _forward_kernel(p: Plan, *refs) -> None:
    x_refs, g_refs, start_refs, h_refs, state_refs = _split(p, refs)
    _begin(start_refs, state_refs)

    def walk(i, state):
        out = []
        for x, decay in zip(*(_eights(_read(refs, _rows_at(i))) for refs in (x_refs, g_refs)), strict=True):
            decay, first = _decay(p, decay), _at_place(0, x)
            x = _add(x, _mul(decay, _choose(first, _roll(state, 1))))
            state = _doubling(_choose(~first, decay), x, 1)
            out.append(state)
        _write(h_refs, _rows_at(i), out)
        return state

    state = lax.fori_loop(0, p.tokens // ROWS, walk, tuple(ref[...] for ref in state_refs))
    for ref, a in zip(state_refs, state, strict=True):
        ref[...] = a


def _backward_kernel(p: Plan, *refs) -> None:
    h_refs, g_refs, dh_refs, before_refs, start_refs, dfinal_refs, dx_refs, dg_refs, q_refs = _split(p, refs)
    _begin(dfinal_refs, q_refs)
    blocks = p.tokens // ROWS

    def walk(at, before, q):
        """`before`: eight tokens, the last of which is the one before these rows; q: those after, from the first."""
        h, decay, dh = (_eights(_read(refs, at)) for refs in (h_refs, g_refs, dh_refs))
        dx, dg = [], []
        for n in reversed(range(len(h))):
            first, last = _at_place(0, dh[n]), _at_place(SUBLANES - 1, dh[n])
            a, after = _decay(p, decay[n]), _roll(q, -1)
            entered = _mul(a, _add(dh[n], _choose(last, after)))
            q = _doubling(_choose(~last, a), entered, -1)
            dx.append(_add(dh[n], _choose(last, after, _roll(q, -1))))
            previous = h[n - 1] if n else before
            dg.append(_mul(q, _choose(first, _roll(previous, 1), _roll(h[n], 1))))
        _write(dx_refs, at, dx[::-1])
        _write(dg_refs, at, dg[::-1])
        return q

    def step(n, q):
        i = blocks - 1 - n
        return walk(_rows_at(i), _eights(_read(h_refs, _rows_at(i - 1)))[-1], q)

    q = lax.fori_loop(0, blocks - 1, step, tuple(ref[...] for ref in q_refs))
    # The block of time before this one ends with the token before; before the first there is the initial state.
    first_block = pl.program_id(2) == pl.num_programs(2) - 1
    before = _eights(_read(before_refs, slice(None)))[-1]
    start = tuple(ref[...] for ref in start_refs)
    q = walk(_rows_at(0), tuple(jnp.where(first_block, a, b) for a, b in zip(start, before, strict=True)), q)
    for ref, a in zip(q_refs, q, strict=True):
        ref[...] = a
