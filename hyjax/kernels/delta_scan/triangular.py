"""The inverse of a unit lower triangular matrix, by substitution in small blocks and by merging blocks.

The delta rule's inverse is bounded, since its entries are products of contractions, however large the powers of the
matrix are; so none is ever formed. For identical keys with β = 1 and no decay, 64 tokens, the matrix below the diagonal
is all ones, its 32nd power reaches 4e17 and a power series loses every digit; the inverse holds nothing but 1 and -1.
"""

import jax
import jax.numpy as jnp

from hyjax.kernels.chunks import corners, einsum, extend

BLOCK = 16  # tokens that are solved by substitution, before blocks are merged


def inverse(lower: jax.Array) -> jax.Array:
    """(I + L)^-1 of strictly lower triangular L [..., G, C, C], C a power of two; what stands elsewhere isn't read.

    Two solved neighbours X_1 and X_2 of m tokens with the block L_21 between them are solved together:

        [I + L_11       0    ]^-1   [       X_1         0 ]
        [  L_21     I + L_22 ]    = [-X_2 L_21 X_1    X_2 ]
    """
    size = min(BLOCK, lower.shape[-1])
    solved = _substitute(_diagonal_blocks(lower, size))
    while size < lower.shape[-1]:
        earlier, later = solved[..., 0::2, :, :], solved[..., 1::2, :, :]
        through = einsum("...ij,...jk->...ik", corners(lower, size), earlier)
        solved = extend(solved, -einsum("...ij,...jk->...ik", later, through))
        size *= 2
    return solved.reshape(lower.shape)


def _diagonal_blocks(matrix: jax.Array, size: int) -> jax.Array:
    """[..., G, C, C] -> [..., G*C/size, size, size]."""
    count = matrix.shape[-1] // size
    blocks = matrix.reshape(*matrix.shape[:-2], count, size, count, size)
    blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
    return blocks.reshape(*matrix.shape[:-3], -1, size, size)


def _substitute(lower: jax.Array) -> jax.Array:
    """(I + L)^-1 of small [..., C, C] by forward substitution, column by column of L, all blocks at once."""
    size = lower.shape[-1]
    solved = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    for j in range(size - 1):  # row j is solved: take its part out of the rows below it
        below = jnp.where(jnp.arange(size)[:, None] > j, lower[..., :, j : j + 1], 0)
        solved = solved - below * solved[..., j : j + 1, :]
    return solved
