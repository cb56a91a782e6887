"""A checksum of an array's bits that is the same on any mesh, cheap on a device, and sees every change of one word.

Word i (uint32, in row-major order) is mixed with its place, h = fmix32(word ^ i·0x9E3779B1), and the checksum is the
two sums Σ h and Σ h·(2i + 1), each mod 2³². The mixing is one to one, so a change of one word always changes the first
sum; any other change, an exchange of words included, is missed with a chance of 2⁻⁶⁴. Addition mod 2³² does not care
about order, so shards are summed where they lie and only the sums travel.

`device_checksums` runs where the arrays are; `host_checksum` is the same function in numpy, for what was read back:
it needs neither a device nor a compiler while training uses both.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hyjax.train.optimizer import leaf_paths

PLACE = 0x9E3779B1  # 2³² / golden ratio: neighbouring places differ in all bits
FMIX32 = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))  # MurmurHash3's finaliser: h ^= h >> shift; h *= factor
BLOCK = 1 << 16  # words that the host mixes at once: 256 KiB, which stay in the cache


def device_checksums(tree: Any) -> dict[str, str]:
    """Leaf's path → 16 hex digits. Waits for the arrays; all leaves are dispatched before the first is fetched."""
    sums = jax.device_get([_sums(leaf) for leaf in jax.tree.leaves(tree)])
    return {path: _text(pair) for path, pair in zip(leaf_paths(tree), sums, strict=True)}


def host_checksum(array: Any) -> str:
    """`device_checksums` of one array, in numpy."""
    flat = np.ascontiguousarray(array).reshape(-1)
    words = flat.view(np.dtype(f"u{min(4, flat.dtype.itemsize)}"))
    first = second = 0
    for start in range(0, words.size, BLOCK):
        block = words[start : start + BLOCK]
        place = np.arange(start, start + block.size, dtype=np.uint64).astype(np.uint32)
        h = place * np.uint32(PLACE)
        h ^= block
        for shift, factor in FMIX32:
            h ^= h >> np.uint32(shift)
            h *= np.uint32(factor)
        first += int(h.sum(dtype=np.uint32))
        h *= np.uint32(2) * place + np.uint32(1)
        second += int(h.sum(dtype=np.uint32))
    return _text((first % 2**32, second % 2**32))


@jax.jit  # a leaf at a time: each distinct shape takes XLA 40 ms once, and leaves may lie on different devices
def _sums(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    words = _words(array)
    place = jnp.zeros(words.shape, jnp.uint32)  # not a reshape, which would gather a sharded array
    for dim, size in enumerate(words.shape):
        place = place * jnp.uint32(size % 2**32) + lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    h = words ^ (place * jnp.uint32(PLACE))
    for shift, factor in FMIX32:
        h = (h ^ (h >> jnp.uint32(shift))) * jnp.uint32(factor)
    # One reduction of both: on a CPU XLA reads 400 MB in 0.02 s so, and in 0.4 s with two sums.
    zero = jnp.uint32(0)
    return lax.reduce(
        (h, h * (2 * place + 1)), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(range(h.ndim))
    )


def _words(array: jax.Array) -> jax.Array:
    """The array's bits as uint32: a narrower number gives one word, a wider one two, in a last dim."""
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    unsigned = jnp.dtype(f"u{min(4, array.dtype.itemsize)}")
    words = lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    return words if words.ndim else words.reshape(1)


def _text(pair: tuple[Any, Any]) -> str:
    return f"{int(pair[0]):08x}{int(pair[1]):08x}"
