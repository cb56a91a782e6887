"""Mosaic GPU on Hopper, as the scans' kernels use it: tiles in shared memory, products, a chunk's decays, launches.

A program is one warpgroup, which computes what its threads hold of 64 rows and waits for what it asked of others:
tensor cores multiply tiles that are in shared memory, and the copy engine (TMA) moves tiles in and out of it. What the
three of them do is ordered by `plgpu.commit_smem`, a fence and a barrier of the program's threads. On a CPU the
interpreter shows what is missing between threads and copies, but it multiplies at once, of what memory holds then, and
so shows nothing that is missing around a product. Hence these rules, which leave nothing to timing:

    - `products` returns when all products under way are done;
    - what threads wrote is committed before a product or a copy reads it;
    - between a product's reading of a tile and the next writing of it, by threads or by a copy, there is a commit.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hyjax.kernels.gpu_plan import CHUNK, FIRST, HI, LO, Plan
from hyjax.kernels.varying import alike

SWIZZLE = 128  # bytes of a row whose order the hardware mixes, so that columns are read without conflicts
WGMMA = plgpu.Layout.WGMMA
OF_ROWS, OF_COLUMNS = WGMMA.reduce(1), WGMMA.reduce(0)  # how threads hold one number a row, or a column


def tile(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """Shared memory as products, copies and threads like it."""
    rows = plgpu.TilingTransform((8, SWIZZLE // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(rows, plgpu.SwizzleTransform(SWIZZLE)))  # type: ignore[abstract]


def floats(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.float32)


def products(*sums: Sequence[tuple[Any, Any]]) -> Sequence[jax.Array]:
    """Of each of `sums`, Σ a b over its pairs (a, b) of tiles, in float32."""

    def run(*totals):
        for total, pairs in zip(totals, sums, strict=True):
            for a, b in pairs:
                plgpu.wgmma(total, a, b)
        return [total[...] for total in totals]

    shapes = [(pairs[0][0].shape[0], pairs[0][1].shape[1]) for pairs in sums]
    return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def transposed(matrix) -> Any:
    return matrix.transpose((1, 0))


def load(ref) -> jax.Array:
    """A tile as float32."""
    return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)


def half(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def rounding(x: jax.Array) -> jax.Array:
    """What bfloat16 leaves off x: x = half(x) + half(rounding(x)) to 2^-17."""
    return x - half(x).astype(jnp.float32)


def row(rows, which: int) -> jax.Array:
    """One of a chunk's gate rows [5 or 6, C], a number for each row of a tile."""
    return plgpu.load(rows.at[which], layout=OF_ROWS)


def times(vector: jax.Array, matrix: jax.Array) -> jax.Array:
    """diag(vector) matrix."""
    return lax.broadcast_in_dim(vector, matrix.shape, [0]) * matrix


def places() -> tuple[jax.Array, jax.Array]:
    """i and j [C, C]."""
    i, j = (plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis, layout=WGMMA) for axis in (0, 1))
    return i, j


def pair_decays(rows) -> jax.Array:
    """D [C, C], by the formula of gpu_plan."""
    spread = lambda x, axis: lax.broadcast_in_dim(x, (CHUNK, CHUNK), [axis])
    between = lambda which: spread(row(rows, which), 0) - spread(plgpu.load(rows.at[which], layout=OF_COLUMNS), 1)
    i, j = places()
    alive = (j <= i) & (j >= spread(row(rows, FIRST).astype(jnp.int32), 0))
    return jnp.exp(jnp.where(alive, between(HI) + between(LO), -jnp.inf))


class Place(NamedTuple):
    """Which batch row and value head a program has, and what of global memory is its own."""

    plan: Plan
    batch: jax.Array
    head: jax.Array

    def tokens(self, ref, chunk, columns=slice(None)):
        """A chunk of [B, T, H or HV, X]."""
        of_keys = ref.shape[2] == self.plan.heads
        head = lax.div(self.head, jnp.int32(self.plan.groups)) if of_keys else self.head
        return ref.at[self.batch, pl.ds(chunk * CHUNK, CHUNK), head, columns]

    def chunk(self, ref, chunk):
        """A chunk of [B, HV, n, ...]."""
        return ref.at[self.batch, self.head, chunk]

    def state(self, ref, columns):
        """Of [B, HV, K, V]."""
        return ref.at[self.batch, self.head, :, columns]


def launch(
    name: str,
    kernel: Callable[[SimpleNamespace, SimpleNamespace, Place], None],
    p: Plan,
    last_axis: tuple[str, int],
    inputs: Mapping[str, jax.Array | None],
    outputs: Mapping[str, tuple[Sequence[int], Any]],
    scratch: Mapping[str, Any],
    interpret: Any,
) -> Sequence[Any]:
    """Run kernel(arrays in global memory by name, scratch by name, place) over batch, value heads and `last_axis`.

    Args:
      last_axis: the name and size of the grid's last axis; programs next to each other there start together.
      inputs: an input that is None doesn't exist.
      outputs: shapes and dtypes.
    """
    given = {key: x for key, x in inputs.items() if x is not None}
    names = [*given, *outputs]

    def body(*refs, **buffers):
        place = Place(p, lax.axis_index("batch"), lax.axis_index("head"))
        kernel(SimpleNamespace(**dict(zip(names, refs, strict=True))), SimpleNamespace(**buffers), place)

    run = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in outputs.values()],
        scratch_types=scratch,
        grid=(p.batch, p.value_heads, last_axis[1]),
        grid_names=("batch", "head", last_axis[0]),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret or None,
        kernel_name=name,
    )
    arrays = alike(*given.values())
    *results, _ = alike(*run(*arrays), arrays[0])  # plgpu.kernel forgets what varies inside a shard_map
    return results
