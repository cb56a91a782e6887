"""Tests run on eight virtual CPU devices; the variables must be set before JAX is imported."""

import os

import pytest

from tests.kernels.errors import pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown

__all__ = ["pytest_sessionfinish", "pytest_terminal_summary", "pytest_testnodedown"]

# Tests compile much and run little: code that is optimised less is there in half the time.
QUICK_TO_COMPILE = "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{QUICK_TO_COMPILE} --xla_force_host_platform_device_count=8"

# Where libtpu is installed, it compiles for TPUs that are not there, in several processes.
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs():
    """Each compiled program keeps mapped memory, and past 65,530 maps of a process the compiler dies."""
    yield
    import jax

    jax.clear_caches()
