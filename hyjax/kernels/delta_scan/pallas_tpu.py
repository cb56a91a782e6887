"""delta_scan for TPU: a kernel forward and one backward, which walk over chunks with the state in fast memory.

The algebra is that of xla_chunks.py, in the same letters, all of it inside the kernels: HBM sees q, k, v, the gates, o
and two residuals of each chunk, the state at its start and A. With k_in = k ∘ a, q_in = q ∘ a and k_out = k ∘ b,

    forward:   P, M, A = (I + M diag β)^-1        e = A (v − k_in S)     u = β ∘ e
               o = P u + q_in S                   S' = a_C ∘ S + k_outᵀ u
    backward:  e, u again                         du = Pᵀ do + k_out dS'
               dv = w = Aᵀ (β ∘ du)               dβ = Σ_v e ∘ (du − Mᵀ w)
               dP = do uᵀ    dM = −w uᵀ           dS = a_C ∘ dS' + q_inᵀ do − k_inᵀ w

The order A (v − k_in S), and not A v − (A k_in) S, saves a product of C x C x K; the chain from state to state is three
products long, and the heads of a grid step go through it side by side.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels import dispatch, tpu_gates
from hyjax.kernels.delta_scan import tpu_chunk, tpu_plan, xla
from hyjax.kernels.delta_scan.tpu_chunk import NN, NT, TN, ChannelGate, HeadGate, dot, dot_parts
from hyjax.kernels.delta_scan.tpu_plan import SUBLANES, Plan
from hyjax.kernels.varying import alike

VMEM_BYTES = 48 << 20  # of 64 MiB on v5p and tpu7x, and 128 on v5e and v6e


def forward(q, k, v, beta, log_decay, state, *, scale: float, chunk_size: int | None, interpret: Any = False):
    """q, k [B,T,H,K], v [B,T,HV,V], beta [B,T,HV], log_decay [B,T,HV] or [B,T,HV,K] (-inf resets), state [B,HV,K,V].

    Returns o [B,T,HV,V], the final state, and what `backward` wants: the states at the chunks' starts [B,HV,n,K,V] and
    A [B,HV,n,parts,C,C] as the sum of its parts, in the dtype of q, k and v.
    """
    if q.shape[1] == 1:  # no walk: the recurrence itself
        return xla.forward(q, k, v, beta, log_decay, state, scale=scale, chunk_size=chunk_size)
    p = tpu_plan.plan(q, k, v, log_decay.ndim == 4, scale, chunk_size)
    inputs = [*_inputs(q, k, v, beta, log_decay, p), ("ends", tpu_plan.pad_state(state, p))]
    outputs = [
        ("values", p.value_width, p.dtype),
        ("ends", None, "float32"),
        ("states", None, p.dtype),
        ("solves", None, p.dtype),
    ]
    o, final, *saved = _call(_forward_kernel, "delta_scan_forward", p, inputs, outputs, False, interpret)
    return tpu_plan.by_time(o, p, p.value_dim), final[:, :, : p.key_dim, : p.value_dim], tuple(saved)


def backward(
    q, k, v, beta, log_decay, saved, do, dstate, *, scale: float, chunk_size: int | None, interpret: Any = False
):
    """The gradients of q, k, v, beta, log_decay and the initial state; `saved` of `forward`."""
    if q.shape[1] == 1:
        return xla.backward(q, k, v, beta, log_decay, saved, do, dstate, scale=scale, chunk_size=chunk_size)
    p = tpu_plan.plan(q, k, v, log_decay.ndim == 4, scale, chunk_size)
    states, solves = saved
    inputs = [
        *_inputs(q, k, v, beta, log_decay, p),
        ("values", tpu_plan.by_head(do, p, p.value_width, p.dtype)),
        ("states", states),
        ("solves", solves),
        ("ends", tpu_plan.pad_state(dstate, p)),
    ]
    part = p.dtype if p.parts == 1 else "float32"
    outputs = [
        ("reader_parts", p.key_width, part),
        ("values", p.value_width, p.dtype),
        ("rows", _padded_rows(1 if p.per_channel else 4, p), "float32"),
        ("ends", None, "float32"),
    ]
    outputs += [("values", p.key_width, "float32")] if p.per_channel else []
    out = _call(_backward_kernel, "delta_scan_backward", p, inputs, outputs, True, interpret)
    dx, dv, rows, dinitial, *channels = out
    dq, dk = tpu_plan.from_readers(dx, p)
    if p.per_channel:
        (dbeta,), dg = tpu_plan.from_rows(rows, p, 1), tpu_plan.by_time(channels[0], p, p.key_dim)
    else:
        dbeta, dg = tpu_plan.from_rows(_with_gate_sums(rows, p), p, 2)
    return dq, dk, tpu_plan.by_time(dv, p, p.value_dim), dbeta, dg, dinitial[:, :, : p.key_dim, : p.value_dim]


def _inputs(q, k, v, beta, log_decay, p: Plan) -> list[tuple[str, jax.Array]]:
    readers = ("readers", tpu_plan.to_readers(q, k, p))
    rows = [tpu_plan.pad_time(beta.astype(jnp.float32), p).swapaxes(1, 2)]
    gates: list[tuple[str, jax.Array]] = []
    if p.per_channel:
        gates.append(("values", tpu_plan.by_head(log_decay, p, p.key_width, jnp.float32)))
    else:
        rows += tpu_gates.chunk_sums(tpu_plan.pad_time(log_decay, p), p.chunk)
    values = ("values", tpu_plan.by_head(v, p, p.value_width, p.dtype))
    masks = np.stack(_masks(p)).astype(np.float32)
    return [readers, values, ("rows", tpu_plan.to_rows(rows, p)), ("masks", jnp.asarray(masks)), *gates]


def _masks(p: Plan) -> list[np.ndarray]:
    gate = ChannelGate if p.per_channel else HeadGate
    return [*tpu_chunk.inverse_masks(p.chunk), *gate.masks_of(p.chunk)]


def _with_gate_sums(rows: jax.Array, p: Plan) -> jax.Array:
    """The kernel's rows (dβ; what pairs, the state before and the state after give to dg) -> the rows dβ, dg."""
    kinds = rows[..., : 4 * p.heads, :].reshape(*rows.shape[:3], 4, p.heads, p.chunk)
    dbeta, pairs, entering, leaving = (kinds[..., n, :, :] for n in range(4))
    later = np.tril(np.ones((p.chunk, p.chunk), np.float32))  # [i, t]: i >= t
    total = functools.partial(jnp.einsum, "bsnhi,it->bsnht", precision=lax.Precision.HIGHEST)
    return jnp.concatenate([dbeta, pairs + total(entering, later) + total(leaving, 1 - later)], axis=3)


# Kinds of arrays: the array's shape, a block's shape, and a block's index from (b, step over heads, chunk). Each has a
# width or an amount of rows of its own.
def _kinds(p: Plan, width: int | None) -> dict[str, tuple[tuple, tuple, Callable]]:
    batch, steps, chunks, chunk, time = p.batch, p.steps, p.chunks, p.chunk, p.padded_time
    readers, values = (None, p.step_keys, None, 2 * chunk, width), (None, p.heads, chunk, width)
    state, parts = (p.key_width, p.value_width), 1 if p.dtype == "float32" else 2
    at_chunk = lambda b, h, n: (b, h, n, 0, 0)
    return {
        "readers": (
            (batch, p.key_heads, chunks, 2 * chunk, width),
            readers,
            lambda b, h, n: (b, h // p.parts, n, 0, 0),
        ),
        "reader_parts": ((batch, p.key_heads * p.parts, chunks, 2 * chunk, width), readers, at_chunk),
        "values": ((batch, p.value_heads, time, width), values, lambda b, h, n: (b, h, n, 0)),
        "rows": ((batch, steps, chunks, width, chunk), (None, None, None, width, chunk), at_chunk),
        "masks": ((width, chunk, chunk), (width, chunk, chunk), lambda b, h, n: (0, 0, 0)),
        "ends": ((batch, p.value_heads, *state), (None, p.heads, *state), lambda b, h, n: (b, h, 0, 0)),
        "states": ((batch, p.value_heads, chunks, *state), (None, p.heads, None, *state), at_chunk),
        "solves": (
            (batch, p.value_heads, chunks, parts, chunk, chunk),
            (None, p.heads, None, parts, chunk, chunk),
            lambda b, h, n: (b, h, n, 0, 0, 0),
        ),
    }


def _padded_rows(kinds: int, p: Plan) -> int:
    return -(-kinds * p.heads // SUBLANES) * SUBLANES


def _call(
    kernel: Callable,
    name: str,
    p: Plan,
    inputs: Sequence[tuple[str, jax.Array]],
    outputs: Sequence[tuple[str, int | None, str]],
    reverse: bool,
    interpret: Any,
) -> Sequence[jax.Array]:
    """Run `kernel` over all chunks, from the last to the first if `reverse`.

    Args:
      inputs: (kind, array).
      outputs: (kind, width, dtype).
    """
    widths = {"rows": -2, "masks": 0}
    in_kinds = [_kinds(p, x.shape[widths.get(kind, -1)])[kind] for kind, x in inputs]
    out_kinds = [_kinds(p, width)[kind] for kind, width, _ in outputs]

    def spec(kind):
        _, block, index = kind
        return pl.BlockSpec(block, lambda b, h, n: index(b, h, p.chunks - 1 - n if reverse else n))

    arrays = alike(*(x for _, x in inputs))
    axis_type = jax.typeof(arrays[0]).manual_axis_type
    shapes = [
        jax.ShapeDtypeStruct(kind[0], dtype, manual_axis_type=axis_type)
        for kind, (*_, dtype) in zip(out_kinds, outputs, strict=True)
    ]
    return pl.pallas_call(
        functools.partial(kernel, p),
        shapes,
        grid=(p.batch, p.steps, p.chunks),
        in_specs=[spec(kind) for kind in in_kinds],
        out_specs=[spec(kind) for kind in out_kinds],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=_cost(p, reverse, [*arrays, *shapes]),
        interpret=dispatch.interpreter(interpret, *arrays),
        name=name,
    )(*arrays)


def _cost(p: Plan, reverse: bool, arrays) -> pl.CostEstimate:
    chunk, key, value = p.chunk, p.key_width, p.value_width
    tokens = p.batch * p.value_heads * p.padded_time
    levels = chunk.bit_length() if p.per_channel else 1
    if reverse:
        numbers = chunk * (6 * levels * key + 6 * value) + 7 * key * value
    else:
        numbers = chunk * (2 * levels * key + 2 * value + 6 * chunk) + 3 * key * value
    return pl.CostEstimate(
        flops=2 * tokens * numbers,
        transcendentals=tokens * (levels * key if p.per_channel else chunk),
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )


def _interleave(programs: Sequence[Generator]) -> None:
    """Run the programs of all heads side by side, a step of each in turn.

    The compiler schedules in about the order of the program: one head's products then fill the time in which another
    waits for its own.
    """
    while programs:
        programs = [program for program in programs if next(program, "done") != "done"]


class _Chunk(NamedTuple):
    """What forward and backward know of a chunk and head before they see a state."""

    gate: Any
    beta_row: jax.Array  # [1,C]
    beta: jax.Array  # [C,V]
    readers: jax.Array  # x = [q; k] [2C,K]
    keys: jax.Array
    scores: jax.Array  # [P; M] [2C,C]
    x_in: jax.Array  # [q_in; k_in]
    k_out: jax.Array

    @staticmethod
    def of(p: Plan, h: int, x_ref, rows: jax.Array, columns: jax.Array, masks_ref, log_decay_refs) -> "_Chunk":
        """rows [R,C]: β, and with a gate a head its sums hi and lo, heads within each; columns [C,R]."""
        masks_ref = masks_ref.at[len(tpu_chunk.inverse_masks(p.chunk)) :]
        if p.per_channel:
            gate = ChannelGate.of(log_decay_refs[0][h], masks_ref, p.dtype)
        else:
            sums = [slice(n, n + 1) for n in (p.heads + h, 2 * p.heads + h)]
            gate = HeadGate.of([rows[n] for n in sums], [columns[:, n] for n in sums], p.key_width, masks_ref, p.dtype)
        beta = jnp.broadcast_to(columns[:, h : h + 1], (p.chunk, p.value_width))
        key_head = h * p.step_keys // p.heads
        x, k = x_ref[key_head], x_ref[key_head, p.chunk :]
        x_in, k_out = ((factor * y).astype(p.dtype) for factor, y in ((tpu_chunk.both(gate.upto), x), (gate.after, k)))
        return _Chunk(gate, rows[h : h + 1], beta, x, k, gate.scores(x, k), x_in, k_out)


def _forward_kernel(p: Plan, x_ref, v_ref, rows_ref, masks_ref, *refs):
    *log_decay_refs, start_ref, o_ref, state_ref, states_ref, solves_ref = refs
    chunk, dtype = p.chunk, p.dtype

    @pl.when(pl.program_id(2) == 0)
    def _():
        pltpu.sync_copy(start_ref, state_ref)

    rows = rows_ref[...]
    columns = rows.T

    def head(h: int):
        c = _Chunk.of(p, h, x_ref, rows, columns, masks_ref, log_decay_refs)
        scores = c.scores[:chunk].astype(dtype)
        states_ref[h] = state_ref[h].astype(dtype)
        yield
        reads = dot(c.x_in, state_ref[h], NN, dtype)
        errors = v_ref[h] - reads[chunk:]
        yield
        solve = yield from tpu_chunk.inverse(c.scores[chunk:] * c.beta_row, masks_ref, dtype)
        solve_parts = tpu_chunk.split(solve, 2, dtype)
        for n, part in enumerate(solve_parts):
            solves_ref[h, n] = part.astype(dtype)
        # Where keys are alike, A takes small differences of large numbers: its parts and what it meets keep 16 bits. So
        # do u in the state and dS' in du, which go on from chunk to chunk.
        u = c.beta * dot_parts(solve_parts, tpu_chunk.split(errors, 2, dtype), NN, dtype)
        yield
        state_ref[h] = c.gate.total * state_ref[h] + dot(c.k_out, u, TN, dtype, (1, 2))
        yield
        o_ref[h] = (p.scale * (dot(scores, u, NN, dtype) + reads[:chunk])).astype(dtype)

    _interleave([head(h) for h in range(p.heads)])


def _backward_kernel(p: Plan, x_ref, v_ref, rows_ref, masks_ref, *refs):
    log_decay_refs, refs = (refs[:1], refs[1:]) if p.per_channel else ((), refs)
    do_ref, states_ref, solves_ref, end_ref, dx_ref, dv_ref, drows_ref, dstate_ref, *dg_ref = refs
    chunk, dtype = p.chunk, p.dtype

    @pl.when(pl.program_id(2) == 0)
    def _():
        pltpu.sync_copy(end_ref, dstate_ref)

    rows = rows_ref[...]
    columns = rows.T
    totals: list = [0.0] * p.step_keys
    out_columns: list = [None] * ((1 if p.per_channel else 4) * p.heads)

    def head(h: int):
        c = _Chunk.of(p, h, x_ref, rows, columns, masks_ref, log_decay_refs)
        gate, do = c.gate, p.scale * do_ref[h]
        yield
        e = v_ref[h] - dot(c.x_in[chunk:], states_ref[h], NN, dtype)
        yield
        du = dot(c.scores[:chunk], do, TN, dtype)
        yield
        du = du + dot(c.k_out, dstate_ref[h], NN, dtype, (1, 2))
        yield
        solve = [solves_ref[h, n] for n in range(solves_ref.shape[1])]
        e = dot_parts(solve, tpu_chunk.split(e, 2, dtype), NN, dtype)
        u = (c.beta * e).astype(dtype)
        yield
        w = dot_parts(solve, tpu_chunk.split(c.beta * du, 2, dtype), TN, dtype)
        dv_ref[h] = w.astype(dtype)
        yield
        dbeta = e * (du - dot(c.scores[chunk:], w, TN, dtype))
        out_columns[h] = jnp.sum(dbeta, axis=1, keepdims=True)
        yield
        dreads = jnp.concatenate([do, -w]).astype(dtype)
        dscores = dot(dreads, u, NT, dtype)
        yield
        dk_out = gate.after * dot(u, dstate_ref[h], NT, dtype)
        through = gate.total * (states_ref[h] * dstate_ref[h])
        dstate_ref[h] = gate.total * dstate_ref[h] + dot(c.x_in, dreads, TN, dtype)
        yield
        dx_in = tpu_chunk.both(gate.upto) * dot(dreads, states_ref[h], NT, dtype)
        entering = c.readers * dx_in
        entering = entering[:chunk] + entering[chunk:]
        yield
        dx, dk, inside = yield from gate.gradients(c.readers, c.keys, c.scores, dscores)
        dx = dx + dx_in
        totals[h * p.step_keys // p.heads] += jnp.concatenate([dx[:chunk], dx[chunk:] + dk + dk_out])
        yield
        dgate = gate.log_decay_gradient(inside, entering, c.keys * dk_out, through)
        if p.per_channel:
            dg_ref[0][h] = dgate
        else:
            out_columns[p.heads + h :: p.heads] = dgate

    _interleave([head(h) for h in range(p.heads)])
    for n, total in enumerate(totals):
        dx_ref[n] = total.astype(dx_ref.dtype)
    drows_ref[: len(out_columns)] = tpu_chunk.to_rows(out_columns)
