"""selective_scan for TPU: a walk over tokens with the states of 128 channels in registers, N along sublanes.

The recurrence and its gradients are those of xla.py. The state x of 128 channels is [S, 8, 128], S = N/8 registers, and
stays in registers for a block of 128 tokens. A token's Δ, w = Δ u and dy are rows that spread down the sublanes; its B
and C are columns that spread along the lanes, once for all channels (`columns_ref` [128, R, 8, 128]). Decays are
2^(Δ A log2 e), formed where they are used. Sums over n or d of sixteen tokens are one matrix product: their states one
below the other are X [16*8S, 128], and rows C [16, 16*8S] hold C_t at the places of token t and zeros elsewhere,

    y [16, 128] = C X          dw = B G          dC [16, 16*8S] = dy Xᵀ          dB = w Gᵀ

where of dB and dC a token owns its own places, and the rest is thrown away: the matrix unit has nothing else to do.

    forward:   x = 2^(Δ A') x + w B,   y = C X + D u;   saves the state before every block
    backward:  walks a block forward again, keeping its states (`kept_ref` [128, .., S, 8, 128]), then back:
               G = Q + dy C,   Q = 2^(Δ A') G,   through = Q x_before,   dA += Δ through,
               dΔ = u dw + Σ_n A through,   du = Δ dw + D dy

Products are in bfloat16 where u, B and C are, else in float32, which takes three times as long. Σ_n A through and dA
are float32 always; the former is added up eight tokens at once (`_sum_sublanes`).
At a document's first token Δ is replaced, in the decay alone, by a number so large that the decay is exactly zero. A
above zero, which the operator excludes, would be no decay here.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels.selective_scan import tpu_layouts, tpu_plan, xla
from hyjax.kernels.selective_scan.tpu_grid import call
from hyjax.kernels.selective_scan.tpu_layouts import LOG2_E
from hyjax.kernels.selective_scan.tpu_plan import LANES, ROWS, SUBLANES, TOKENS, Plan

_NN, _NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))


def forward(u, delta, A, B, C, D, starts, state, *, chunk_size: int | None, interpret: Any):
    """u, delta [B,T,D], A [D,N], B, C [B,T,N], D [D], starts [B,T] bool or None, state [B,D,N].

    Returns y [B,T,D] in u's dtype, the final state in `state`'s, and the state before each block [B,blocks,S,8,D].
    chunk_size is of XLA's walk; interpret as pallas_call's.
    """
    if u.shape[1] == 1:
        return xla.forward(u, delta, A, B, C, D, starts, state, chunk_size=chunk_size)
    p = tpu_plan.plan(u.shape, A.shape, starts is not None)
    inputs = _inputs(p, u, delta, A, D)
    inputs.append(("columns", tpu_layouts.columns(p, [B], starts)))
    inputs.append(("rows", tpu_layouts.rows(p, C, jnp.result_type(u, B, C))))
    inputs.append(("state", tpu_layouts.to_registers(state, p)))
    outputs = [("tokens", u.dtype), ("entry", jnp.float32), ("state", jnp.float32)]
    y, entries, final = call(_forward_kernel, "selective_scan_forward", p, inputs, outputs, [], interpret)
    return y[:, : u.shape[1], : u.shape[2]], tpu_layouts.from_registers(final, A.shape), entries


def backward(u, delta, A, B, C, D, starts, states, dy, dfinal, *, chunk_size: int | None, interpret: Any):
    """The gradients of u, delta, A, B, C, D in their dtypes, and of the initial state in dfinal's."""
    if u.shape[1] == 1:
        return xla.backward(u, delta, A, B, C, D, starts, states, dy, dfinal, chunk_size=chunk_size)
    (_, time, dim), p = u.shape, tpu_plan.plan(u.shape, A.shape, starts is not None)
    inputs = _inputs(p, u, delta, A, D)
    inputs.append(("columns", tpu_layouts.columns(p, [B, C], starts)))
    inputs.append(("rows", tpu_layouts.rows(p, B, jnp.result_type(u, B, C))))
    inputs.append(("tokens", tpu_layouts.pad_tokens(dy, p)))
    inputs += [("entry", states), ("state", tpu_layouts.to_registers(dfinal, p))]
    kinds = ["tokens", "tokens", "row_sums", "row_sums", "state", "state"]
    outputs = list(zip(kinds, [u.dtype, delta.dtype, *[jnp.float32] * 4], strict=True))
    kept = (TOKENS, p.side_by_side, p.registers, SUBLANES, LANES)
    du, ddelta, *sums, dA, dstate = call(
        _backward_kernel, "selective_scan_backward", p, inputs, outputs, [kept], interpret, reverse=True
    )
    dB, dC = (tpu_layouts.from_rows(x, p)[:, :time, : A.shape[1]] for x in sums)
    dA = jnp.sum(tpu_layouts.from_registers(dA, A.shape), axis=0)
    dD = jnp.sum(dy.astype(jnp.float32) * u.astype(jnp.float32), axis=(0, 1))
    grads = (du[:, :time, :dim], ddelta[:, :time, :dim], dA, dB, dC, dD)
    cast = (x.astype(like.dtype) for x, like in zip(grads, (u, delta, A, B, C, D), strict=True))
    return *cast, tpu_layouts.from_registers(dstate, A.shape)


def _inputs(p: Plan, u, delta, A, D) -> list[tuple[str, jax.Array]]:
    tokens = [("tokens", tpu_layouts.pad_tokens(x, p)) for x in (u, delta)]
    return [*tokens, ("rate", tpu_layouts.rate(A, p)), ("skip", tpu_layouts.skip(D, p))]


def _forward_kernel(
    p: Plan, u_ref, delta_ref, rate_ref, skip_ref, token_columns_ref, c_rows_ref, start_ref,
    y_ref, entry_ref, state_ref, columns_ref,
) -> None:  # fmt: skip
    _begin(start_ref, state_ref)
    entry_ref[...] = state_ref[...]
    _fill_columns(token_columns_ref, columns_ref)

    def group(lanes):
        rates = [rate_ref[..., at] for at in lanes]

        def rows(i, states):
            first, states = i * ROWS, list(states)
            for n, at in enumerate(lanes):
                u, delta, after = _read(u_ref, first, at), _read(delta_ref, first, at), []
                for t in range(ROWS):
                    states[n] = _next(p, columns_ref, first, t, delta, delta * u, rates[n], states[n])
                    after.append(states[n])
                y = _product(c_rows_ref, c_rows_ref[_sixteen(first)], _stack(after), _NN)
                _write(y_ref, first, at, y + skip_ref[:, at] * u)
            return tuple(states)

        states = lax.fori_loop(0, TOKENS // ROWS, rows, tuple(state_ref[..., at] for at in lanes), unroll=p.unroll)
        for at, state in zip(lanes, states, strict=True):
            state_ref[..., at] = state

    _for_each_group(p, group)


def _backward_kernel(
    p: Plan, u_ref, delta_ref, rate_ref, skip_ref, token_columns_ref, b_rows_ref, dy_ref, entry_ref, dfinal_ref,
    du_ref, ddelta_ref, db_ref, dc_ref, da_ref, q_ref, columns_ref, kept_ref,
) -> None:  # fmt: skip
    _begin(dfinal_ref, q_ref)
    _begin(None, da_ref)
    _fill_columns(token_columns_ref, columns_ref)
    for ref in (db_ref, dc_ref):
        ref[...] = jnp.zeros_like(ref)

    def group(lanes):
        rates = [rate_ref[..., at] for at in lanes]

        def replay(i, states):
            first, states = i * ROWS, list(states)
            for n, at in enumerate(lanes):
                u, delta, after = _read(u_ref, first, at), _read(delta_ref, first, at), []
                for t in range(ROWS):
                    kept_ref[first + t, n] = states[n]
                    states[n] = _next(p, columns_ref, first, t, delta, delta * u, rates[n], states[n])
                    after.append(states[n])
                _add(dc_ref, first, _product(b_rows_ref, _read(dy_ref, first, at), _stack(after), _NT))
            return tuple(states)

        def rows_back(i, carry):
            first, carry = TOKENS - (i + 1) * ROWS, list(carry)
            for n, at in enumerate(lanes):
                (q, da), u, delta, dy = carry[n], *(_read(ref, first, at) for ref in (u_ref, delta_ref, dy_ref))
                grads, throughs = [], []
                for t in reversed(range(ROWS)):
                    grad = q + _row(dy, t) * _column(p, columns_ref, first + t, 1)
                    q = _decay(p, columns_ref, first, t, delta, rates[n]) * grad
                    through = q * kept_ref[first + t, n]
                    da = da + _row(delta, t) * through
                    grads.append(grad)
                    throughs.append(jnp.sum(through * rates[n], axis=0))
                grad = _stack(grads[::-1])
                dw = _product(b_rows_ref, b_rows_ref[_sixteen(first)], grad, _NN)
                _add(db_ref, first, _product(b_rows_ref, delta * u, grad, _NT))
                _write(du_ref, first, at, delta * dw + skip_ref[:, at] * dy)
                _write(ddelta_ref, first, at, u * dw + _sum_sublanes(throughs[::-1]) * (1 / LOG2_E))
                carry[n] = q, da
            return tuple(carry)

        lax.fori_loop(0, TOKENS // ROWS, replay, tuple(entry_ref[..., at] for at in lanes), unroll=p.unroll)
        start = tuple((q_ref[..., at], da_ref[..., at]) for at in lanes)
        for at, (q, da) in zip(lanes, lax.fori_loop(0, TOKENS // ROWS, rows_back, start, unroll=p.unroll), strict=True):
            q_ref[..., at], da_ref[..., at] = q, da

    _for_each_group(p, group)


def _begin(start_ref: Any, ref: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        ref[...] = jnp.zeros_like(ref) if start_ref is None else start_ref[...]


def _fill_columns(token_columns_ref: Any, columns_ref: Any) -> None:
    """[8R, TOKENS] -> [TOKENS, R, 8, LANES]: a token's numbers, which lie in one lane, in all lanes."""
    columns = token_columns_ref[...]

    def rows(i, carry):
        turned = pltpu.roll(columns, (TOKENS - i * ROWS) % TOKENS, 1)
        for t in range(ROWS):
            spread = jnp.broadcast_to(turned[:, t : t + 1], (columns.shape[0], LANES))
            columns_ref[i * ROWS + t] = spread.reshape(columns_ref.shape[1:])
        return carry

    lax.fori_loop(0, TOKENS // ROWS, rows, 0)


def _for_each_group(p: Plan, group: Callable) -> None:
    """`group(lanes)` for groups of channels, `lanes` being slices of 128 that are walked side by side."""
    width = p.side_by_side * LANES

    def body(i, carry):
        group([pl.ds(pl.multiple_of(i * width + n * LANES, LANES), LANES) for n in range(p.side_by_side)])
        return carry

    lax.fori_loop(0, p.channels // width, body, 0)


def _sixteen(first: Any) -> Any:
    return pl.ds(pl.multiple_of(first, ROWS), ROWS)


def _read(ref: Any, first: Any, at: Any) -> jax.Array:
    return ref[_sixteen(first), at].astype(jnp.float32)


def _write(ref: Any, first: Any, at: Any, x: jax.Array) -> None:
    ref[_sixteen(first), at] = x.astype(ref.dtype)


def _add(ref: Any, first: Any, x: jax.Array) -> None:
    ref[_sixteen(first)] += x


def _row(x: jax.Array, t: int) -> jax.Array:
    """Row t of [16,128] down the sublanes [8,128]."""
    return jnp.broadcast_to(x[t : t + 1], (SUBLANES, x.shape[1]))


def _column(p: Plan, columns_ref: Any, t: Any, which: int) -> jax.Array:
    """A token's B (0) or C (1) [S,8,128]."""
    return columns_ref[t, which * p.registers : (which + 1) * p.registers]


def _decay(p: Plan, columns_ref: Any, first: Any, t: int, delta: jax.Array, rate: jax.Array) -> jax.Array:
    """[S,8,128] of token t of sixteen. A token's last column is its reset."""
    step = _row(delta, t)
    return jnp.exp2((jnp.maximum(step, columns_ref[first + t, -1]) if p.packed else step) * rate)


def _next(p: Plan, columns_ref: Any, first: Any, t: int, delta, written, rate, state) -> jax.Array:
    """The state after token t of sixteen from the one before."""
    decay = _decay(p, columns_ref, first, t, delta, rate)
    return decay * state + _row(written, t) * _column(p, columns_ref, first + t, 0)


def _stack(parts: Sequence[jax.Array]) -> jax.Array:
    """[S,8,128] of each token -> [tokens*8S,128]."""
    return jnp.concatenate(parts, axis=0).reshape(-1, LANES)


def _product(like: Any, x: jax.Array, y: jax.Array, dims) -> jax.Array:
    """In the dtype of `like`: products of float32 inputs keep their digits, those of bfloat16 inputs have none."""
    precision = lax.Precision.HIGHEST if like.dtype == jnp.float32 else lax.Precision.DEFAULT
    x, y = x.astype(like.dtype), y.astype(like.dtype)
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _sum_sublanes(parts: Sequence[jax.Array]) -> jax.Array:
    """[8,128] of each of 16 tokens -> [16,128]: row t is the sum of part t's rows.

    Two parts meet in one register, which takes turns between them, and is added to itself one place further: then two
    of those, two places further; then four places.
    """
    place = lax.broadcasted_iota(jnp.int32, parts[0].shape, 0)
    eights = []
    for first in range(0, len(parts), SUBLANES):
        level = list(parts[first : first + SUBLANES])
        for size in (1, 2, 4):
            mine = place & size == 0
            pairs = zip(level[::2], level[1::2], strict=True)
            level = [jnp.where(mine, a, b) + pltpu.roll(jnp.where(mine, b, a), size, 0) for a, b in pairs]
        eights += level
    return jnp.concatenate(eights, axis=0)
