"""What happens inside one chunk of delta_scan's TPU kernels: products, the triangular inverse, and both kinds of gates.

Of a chunk, q and k are its two readers: they lie in one array x = [q; k] [2C,K], go through every product beside each
other, and meet the same keys k. Their decayed scores are [P; M] [2C,C], P of i >= j and M of i > j.

A gate knows, with D, a and b of hyjax.kernels.chunks, the decays into and out of the chunk (`upto` a and `after` b
[C,K], `total` a_C [1,1] or [K,1]), the scores, and the gradients through them. What takes several products is written
as a generator, that yields where work of another head may stand in between.
"""

from collections.abc import Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from hyjax.kernels import tpu_gates
from hyjax.kernels.delta_scan.tpu_plan import LANES, SUBLANES

BLOCK = 16  # tokens that are solved by substitution, before blocks are merged

NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))


def _product(x: jax.Array, y: jax.Array, dims, precision=lax.Precision.DEFAULT) -> jax.Array:
    return lax.dot_general(x, y, (dims, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def dot(x: jax.Array, y: jax.Array, dims, dtype: str, parts: tuple[int, int] = (1, 1)) -> jax.Array:
    """A product where the inputs are of `dtype`: float32 keeps its digits, bfloat16 has few to lose.

    Beside bfloat16 inputs, float32 operands that need more digits are taken as a sum of two bfloat16, as `parts` says.
    """
    return dot_parts(split(x, parts[0], dtype), split(y, parts[1], dtype), dims, dtype)


def dot_parts(x: list[jax.Array], y: list[jax.Array], dims, dtype: str) -> jax.Array:
    """As dot, of what `split` made."""
    if dtype == "float32":
        return _product(x[0].astype(jnp.float32), y[0].astype(jnp.float32), dims, lax.Precision.HIGHEST)
    if len(x) == 2 and dims != TN and x[0].dtype == jnp.float32:  # both beside each other meet the same part of y
        both = _product(_round(jnp.concatenate(x)), _round(y[0]), dims)
        found = [both[: both.shape[0] // 2], both[both.shape[0] // 2 :]]
    else:
        found = [_product(_round(part), _round(y[0]), dims) for part in x]
    found += [_product(_round(x[0]), _round(part), dims) for part in y[1:]]
    return sum(found[1:], found[0])


def _round(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def split(x: jax.Array, count: int, dtype: str) -> list[jax.Array]:
    """A sum of so many bfloat16, held as float32 (the last unrounded): three make all of float32, two 16 bits."""
    found = []
    for _ in range(count - 1 if dtype != "float32" else 0):
        found.append(_round(x).astype(jnp.float32))
        x = x - found[-1]
    return [*found, x]


def to_rows(columns: list[jax.Array]) -> jax.Array:
    """R columns [C,1] -> [R,C]."""
    lane = places(columns[0].shape[0], LANES)[1]
    panel = jnp.zeros(lane.shape)
    for n, column in enumerate(columns):
        panel = jnp.where(lane == n, column, panel)
    return panel.T[: len(columns)]


def places(rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """The row and the column of each number of a matrix."""
    row, column = (lax.broadcasted_iota(jnp.int32, (rows, columns), axis) for axis in (0, 1))
    return row, column


def inverse(lower: jax.Array, masks: Any, dtype: str) -> Generator[None, None, jax.Array]:
    """(I + L)^-1 of strictly lower triangular L [C,C] float32.

    Two solved neighbours X_1 and X_2 of m tokens, with the block L_21 between them, are solved together by
    -X_2 L_21 X_1. The blocks of all neighbours stand in columns of their own: they are laid on top of each other,
    [m,C], and one product of m rows serves them all.

    Args:
      masks: a reference to `inverse_masks`.
    """
    solved = yield from _substitute(lower, masks[0])
    for level in range(1, len(inverse_masks(lower.shape[0]))):
        size = BLOCK << level - 1
        through = dot(_stack(lower * masks[level], size), solved, NN, dtype, (2, 2))
        yield
        spread = [_spread(part, masks[level]) for part in split(through, 2, dtype)]
        corner = dot_parts(split(_stack(solved, size), 2, dtype), spread, NN, dtype)
        solved = solved - _spread(corner, masks[level])
        yield
    return solved


def inverse_masks(chunk: int) -> list[np.ndarray]:
    """Zeros and ones [C,C]: the diagonal blocks; then, for each size of neighbours, the blocks L_21 between them."""
    row, column = np.indices((chunk, chunk))
    sizes = [BLOCK << n for n in range((chunk // BLOCK).bit_length() - 1)]
    return [(row // BLOCK == column // BLOCK), *((row // m == column // m + 1) & (row // m % 2 == 1) for m in sizes)]


def _stack(x: jax.Array, size: int) -> jax.Array:
    """The sum of every second block of `size` rows, from the second on: [C,C] -> [size,C]."""
    first, *rest = (x[n : n + size] for n in range(size, x.shape[0], 2 * size))
    return sum(rest, first)


def _spread(x: jax.Array, mask: jax.Array) -> jax.Array:
    """[size,C] -> [C,C]: x in every block of rows, where the mask lets it."""
    return jnp.concatenate([x] * (mask.shape[0] // x.shape[0])) * mask


def _substitute(lower: jax.Array, diagonal: jax.Array) -> Generator[None, None, jax.Array]:
    """The inverses of the diagonal blocks of I + L, by forward substitution, column by column of L.

    The blocks lie beside each other along lanes, [BLOCK,C], cut in an upper and a lower half: the upper is solved when
    half of the columns are through.
    """
    chunk, half = lower.shape[0], BLOCK // 2
    width = max(chunk, LANES)
    row, lane = places(half, width)
    first = lane & -BLOCK  # of a block's lanes
    packed = _pack(lower, diagonal, width)
    blocks = [packed[:half], packed[half:]]
    solved = [(row + n == lane - first).astype(jnp.float32) for n in (0, half)]
    for j in range(BLOCK - 1):  # row j is solved: take its part out of the rows below it
        done = solved[j // half][j % half : j % half + 1]
        for n in range((j + 1) // half, 2):
            solved[n] = solved[n] - jnp.take_along_axis(blocks[n], first + j, axis=1) * done
        yield
    return _spread(jnp.concatenate(solved)[:, :chunk], diagonal)


def _pack(lower: jax.Array, diagonal: jax.Array, width: int) -> jax.Array:
    """The diagonal blocks of [C,C] as [BLOCK,width], zeros past them."""
    chunk = lower.shape[0]
    blocks = lower * diagonal
    packed = sum((blocks[n : n + BLOCK] for n in range(BLOCK, chunk, BLOCK)), blocks[:BLOCK])
    return packed if chunk == width else jnp.concatenate([packed, jnp.zeros((BLOCK, width - chunk))], axis=1)


class HeadGate(NamedTuple):
    """One gate a head: the decays of all pairs at once."""

    pairs: jax.Array  # D where q and where k may read [2C,C], else zero
    upto: jax.Array
    after: jax.Array
    total: jax.Array
    masks: Any  # a reference
    dtype: str

    @staticmethod
    def of(rows: list[jax.Array], columns: list[jax.Array], key_dim: int, masks: Any, dtype: str):
        """From rows [1,C] and columns [C,1] of the sums hi and lo of tpu_gates, and `masks`."""
        (hi_row, lo_row), (hi, lo) = rows, columns
        chunk = hi.shape[0]
        pairs = jnp.exp((hi - hi_row) + (lo - lo_row) + masks[0])
        # Spread over lanes before the exponential, which costs less there than to spread its result.
        hi, lo = (jnp.broadcast_to(x, (chunk, key_dim)) for x in (hi, lo))
        upto = jnp.exp(hi + lo)
        after = jnp.exp((hi[-1:] - hi) + (lo[-1:] - lo))
        return HeadGate(jnp.concatenate([pairs, pairs * masks[1]]), upto, after, upto[-1:, :1], masks, dtype)

    @staticmethod
    def masks_of(chunk: int) -> list[np.ndarray]:
        """[C,C]: -inf above the diagonal and zeros elsewhere; ones below it; ones above and on it."""
        row, column = np.indices((chunk, chunk))
        return [np.where(row >= column, 0.0, -np.inf), row > column, row <= column]

    def scores(self, x: jax.Array, k: jax.Array) -> jax.Array:
        """[P; M] [2C,C]."""
        return dot(x, k, NT, self.dtype) * self.pairs

    def gradients(self, x, k, scores, dscores):
        """Through `scores`: of x [2C,K], of k as what is read [C,K], and of the log decays [C,1].

        The last sums over the pairs that a token separates, Σ_{i>=t>j}: nothing is a total minus a prefix.
        """
        chunk, dtype = k.shape[0], self.dtype
        separated = dscores * scores
        dscores = dscores * self.pairs
        dx = dot(dscores, k, NN, dtype)
        yield
        dk = dot(dscores, x, TN, dtype)
        yield
        crossing = dot(self.masks[2], separated[:chunk] + separated[chunk:], NN, dtype, (1, 2))  # [t,j]: over i >= t
        return dx, dk, jnp.sum(crossing * self.masks[1], axis=1, keepdims=True)

    def log_decay_gradient(self, inside, entering, leaving, through):
        """Three columns [C,1]: of token t itself; what is to be summed over i >= t, and what over j < t.

        inside: of `gradients`. entering, leaving [C,K]: what rows read of the state before and write to the state
        after the chunk, times its gradient. through [K,V]: what crosses the chunk, likewise.
        """
        through = jnp.sum(through, axis=0, keepdims=True)
        entering, leaving, through = (jnp.sum(x, axis=1, keepdims=True) for x in (entering, leaving, through))
        return inside + through, entering, leaving


class ChannelGate(NamedTuple):
    """One gate a channel: at every level pairs of later and earlier halves of blocks meet, either half decayed.

    At level s, m = 2^s, blocks of 2m tokens are cut in half: row i of a later half decays over what its half holds up
    to i, row j of an earlier half over what its half holds after j.
    """

    factors: list[jax.Array]  # of each level [C,K]
    upto: jax.Array
    after: jax.Array
    total: jax.Array
    masks: Any  # a reference
    dtype: str

    @staticmethod
    def of(log_decay: jax.Array, masks: Any, dtype: str):
        """From log_decay [C,K] and `masks_of`: sums of terms of one sign by doubling, so that nothing cancels."""
        chunk, key_dim = log_decay.shape
        total = upto = jnp.maximum(log_decay, tpu_gates.CUT)  # of blocks of one token
        after, factors = jnp.zeros_like(upto), []
        for level in range(chunk.bit_length() - 1):
            later = _in_later_half(upto.shape, level)
            factors.append(jnp.exp(jnp.where(later, upto, after)))
            other = _swap(total, level)
            upto, after = upto + jnp.where(later, other, 0.0), after + jnp.where(later, 0.0, other)
            total = total + other
        upto = jnp.exp(upto)
        total = jnp.broadcast_to(upto[-1:], (SUBLANES, key_dim)).T[:, :1]
        return ChannelGate(factors, upto, jnp.exp(after), total, masks, dtype)

    @staticmethod
    def masks_of(chunk: int) -> list[np.ndarray]:
        """[C,C]: the diagonal, and the pairs that meet at each level."""
        row, column = np.indices((chunk, chunk))
        levels = range(chunk.bit_length() - 1)
        return [row == column, *(((row ^ column) >> level == 1) & (row > column) for level in levels)]

    def scores(self, x: jax.Array, k: jax.Array) -> jax.Array:
        """[P; M] [2C,C]."""
        diagonal = self.masks[0]
        scores = jnp.concatenate([dot(x[: k.shape[0]], k, NT, self.dtype) * diagonal, jnp.zeros_like(diagonal)])
        for level, factor in enumerate(self.factors, 1):
            scores += dot(both(factor) * x, factor * k, NT, self.dtype) * both(self.masks[level])
        return scores

    def gradients(self, x, k, scores, dscores):
        """Through `scores`: of x [2C,K], of k as what is read [C,K], and of each level's exponents [C,K]."""
        del scores
        chunk, dtype = k.shape[0], self.dtype
        itself = dscores[:chunk] * self.masks[0]
        dq, dk, exponents = dot(itself, k, NN, dtype), dot(itself, x[:chunk], NN, dtype), []
        dx = jnp.concatenate([dq, jnp.zeros_like(dq)])
        for level, factor in enumerate(self.factors, 1):
            here = dscores * both(self.masks[level])
            dx_here = both(factor) * dot(here, factor * k, NN, dtype)
            yield
            dk_here = factor * dot(here, both(factor) * x, TN, dtype)
            yield
            dx, dk, dexponents = dx + dx_here, dk + dk_here, x * dx_here
            exponents.append(dexponents[:chunk] + dexponents[chunk:] + k * dk_here)
        return dx, dk, exponents

    def log_decay_gradient(self, inside, entering, leaving, through):
        """As HeadGate's, but all in one [C,K]: the doubling of `of` turned round."""
        dupto, dafter, dtotal = entering, leaving, jnp.zeros_like(entering)
        for level, dexponents in reversed(list(enumerate(inside))):
            later = _in_later_half(dupto.shape, level)
            dother = jnp.where(later, dupto, dafter) + dtotal
            dtotal = dtotal + _swap(dother, level)
            dupto, dafter = dupto + jnp.where(later, dexponents, 0.0), dafter + jnp.where(later, 0.0, dexponents)
        return dupto + dtotal + to_rows([jnp.sum(through, axis=1, keepdims=True)])


def _in_later_half(shape: tuple[int, ...], level: int) -> jax.Array:
    return (lax.broadcasted_iota(jnp.int32, shape, 0) >> level) & 1 == 1


def _swap(x: jax.Array, level: int) -> jax.Array:
    """Neighbouring blocks of 2^level rows exchanged."""
    size, rows = 1 << level, x.shape[0]
    if size >= SUBLANES:
        blocks = [x[n : n + size] for n in range(0, rows, size)]
        return jnp.concatenate([blocks[n ^ 1] for n in range(len(blocks))])
    return jnp.where(_in_later_half(x.shape, level), pltpu.roll(x, size, 0), pltpu.roll(x, rows - size, 0))


def both(x: jax.Array) -> jax.Array:
    """The same for either reader: [C,N] -> [2C,N]."""
    return jnp.concatenate([x, x])
