"""Sizes that the TPU kernels share: padded head dims, and how many heads a grid step takes."""

LANES = 128


def padded_dim(dim: int) -> int:
    """Half a register's lanes, or whole registers."""
    return 64 if dim <= 64 else -(-dim // LANES) * LANES


def power_of_two(x: int) -> int:
    """The least that is at least x."""
    return 1 << max(x - 1, 0).bit_length()


def heads_a_step(value_heads: int, groups: int, most: int) -> int:
    """Value heads, at most `most`, that share key heads evenly: whole groups of them, or an even part of one."""
    shares = lambda n: value_heads % n == 0 and (n % groups == 0 or groups % n == 0)
    return max(n for n in range(1, most + 1) if shares(n))
