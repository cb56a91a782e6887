"""Checksums of arrays' bits: the device's and the host's are one function, on any mesh, and every change shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hyjax.train.checksum import BLOCK, device_checksums, host_checksum


def device_checksum(array):
    return device_checksums({"x": array})["x"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5, 2)], ids=str)
def test_device_and_host_agree(dtype, shape):
    rng = np.random.default_rng(len(shape))
    array = jnp.asarray(rng.standard_normal(shape) * 50).astype(dtype)
    assert device_checksum(array) == host_checksum(np.asarray(array))


def test_by_the_definition():
    """Σ h and Σ h·(2i + 1) mod 2³², h = fmix32(word ^ i·0x9E3779B1), in plain integers; more words than a block."""
    words = np.random.default_rng(0).integers(0, 2**32, BLOCK + 77, np.uint32)
    first = second = 0
    for place, word in enumerate(words.tolist()):
        h = word ^ (place * 0x9E3779B1 % 2**32)
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        h ^= h >> 16
        first, second = (first + h) % 2**32, (second + h * (2 * place + 1)) % 2**32
    expected = f"{first:08x}{second:08x}"
    assert host_checksum(words) == expected
    assert host_checksum(words.view(np.float32)) == expected  # bits count, NaNs' too
    assert device_checksum(jnp.asarray(words)) == expected


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_any_mesh_gives_the_same(kind):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind, kind))
    array = jnp.asarray(np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32))
    expected = host_checksum(np.asarray(array))
    for spec in (P(), P("fsdp"), P("data", "fsdp"), P(None, ("data", "fsdp"))):
        assert device_checksum(jax.device_put(array, NamedSharding(mesh, spec))) == expected


def test_every_change_shows():
    """Each of the bits, exchanged neighbours and blocks, a shift, another number of zeros."""
    array = np.random.default_rng(0).integers(0, 2**32, 64, np.uint32)
    seen = {host_checksum(array)}
    for bit in range(64 * 32):
        other = array.copy()
        other[bit // 32] ^= np.uint32(1 << (bit % 32))
        seen.add(host_checksum(other))
    others = [np.roll(array, 1), np.concatenate([array[32:], array[:32]]), array[::-1]]
    for place in range(63):
        order = np.arange(64)
        order[[place, place + 1]] = place + 1, place
        others.append(array[order])
    others += [np.zeros(size, np.uint32) for size in range(1, 9)]
    seen |= {host_checksum(other) for other in others}
    assert len(seen) == 1 + 64 * 32 + len(others)
