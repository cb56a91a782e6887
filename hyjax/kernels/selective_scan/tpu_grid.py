"""The grid that the TPU kernels of selective_scan share: (batch, channels, time), and what block of an array each gets.

Time goes one way or the other; an output that doesn't depend on time stays in fast memory until the last block of time,
and is where a walk keeps its state.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels import dispatch
from hyjax.kernels.selective_scan.tpu_plan import LANES, ROWS, SUBLANES, TOKENS, Plan
from hyjax.kernels.varying import alike

VMEM_BYTES = 48 << 20  # of 64 MiB on v5p and tpu7x, and 128 on v5e and v6e


def _kinds(p: Plan, batch: int, columns: int, place: Callable) -> dict[str, tuple[tuple, tuple, Callable]]:
    """By the kind of an array: its shape, a block's shape, and a block's index."""
    registers, rows = (p.registers, SUBLANES), ROWS * p.states
    outer, block = p.dim // p.channels, p.channels
    return {
        "tokens": ((batch, p.time, p.dim), (None, TOKENS, block), lambda b, d, t: (b, place(t), d)),
        "columns": ((batch, columns, p.time), (None, columns, TOKENS), lambda b, d, t: (b, 0, place(t))),
        "rows": ((batch, p.time, rows), (None, TOKENS, rows), lambda b, d, t: (b, place(t), 0)),
        "row_sums": (
            (batch, outer, p.time, rows), (None, None, TOKENS, rows), lambda b, d, t: (b, d, place(t), 0),
        ),
        "rate": ((*registers, p.dim), (*registers, block), lambda b, d, t: (0, 0, d)),
        "skip": ((1, p.dim), (1, block), lambda b, d, t: (0, d)),
        "state": ((batch, *registers, p.dim), (None, *registers, block), lambda b, d, t: (b, 0, 0, d)),
        "entry": (
            (batch, p.blocks, *registers, p.dim), (None, None, *registers, block),
            lambda b, d, t: (b, place(t), 0, 0, d),
        ),
    }  # fmt: skip


def call(
    kernel: Callable,
    name: str,
    p: Plan,
    inputs: Sequence[tuple[str, jax.Array]],
    outputs: Sequence[tuple[str, Any]],
    scratch: Sequence[tuple[int, ...]],
    interpret: Any,
    reverse: bool = False,
) -> Sequence[jax.Array]:
    """Run `kernel(p, *refs)` over all blocks: inputs (kind, array), outputs (kind, dtype), scratch in float32.

    The first scratch is for the columns, as they spread along the lanes.
    """
    arrays = alike(*(x for _, x in inputs))
    batch, columns = arrays[0].shape[0], dict(inputs)["columns"].shape[1]
    kinds = _kinds(p, batch, columns, lambda t: p.blocks - 1 - t if reverse else t)
    axis_type = jax.typeof(arrays[0]).manual_axis_type
    shapes = [jax.ShapeDtypeStruct(kinds[kind][0], dtype, manual_axis_type=axis_type) for kind, dtype in outputs]
    scratch = [(TOKENS, columns // SUBLANES, SUBLANES, LANES), *scratch]
    numbers = batch * p.time * p.dim * p.states
    return pl.pallas_call(
        functools.partial(kernel, p),
        shapes,
        grid=(batch, p.dim // p.channels, p.blocks),
        in_specs=[pl.BlockSpec(*kinds[kind][1:]) for kind, _ in inputs],
        out_specs=[pl.BlockSpec(*kinds[kind][1:]) for kind, _ in outputs],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=(20 if reverse else 6) * numbers,
            transcendentals=(2 if reverse else 1) * numbers,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *shapes)),
        ),
        interpret=dispatch.interpreter(interpret, *arrays),
        name=name,
    )(*arrays)
