"""Compiling kernels for chips that are not there: what is in the program, its memory, and its static schedule.

A TPU needs `libtpu` (the extra `tpu`), an H100 the CUDA compiler's packages (the extra `cuda_aot`); `needs_tpu` and
`needs_cuda` skip a test where they are absent.

    program = aot.compile_for("v5e", function, dict(q=((1, 8192, 8, 128), "bfloat16"), ...))
    program.kernels      # names of the Pallas kernels in it
    program.temporary    # bytes of temporary memory
"""

import functools
import glob
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from hyjax.cost import chips

TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# cycles/s, from the makers' pages, beside the bandwidth and FLOP/s that hyjax.cost.chips knows
CLOCKS = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
KINDS = {"v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e", "tpu7x": "TPU7x"}
CHIPS = {name: dict(clock=clock) | chips.find(KINDS[name])._asdict() for name, clock in CLOCKS.items()}
H100 = AbstractMesh(
    (), (), abstract_device=AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
)


def _found(*names: str) -> bool:
    return all(importlib.util.find_spec(name.split(".")[0]) and importlib.util.find_spec(name) for name in names)


def needs_tpu(test):
    """A mark: `pytest -m compiles_for_tpu` runs these where libtpu is, and they are skipped where it isn't."""
    reason = "compiling for a TPU needs libtpu: the extra `tpu`"
    return pytest.mark.compiles_for_tpu(pytest.mark.skipif(not _found("libtpu"), reason=reason)(test))


def needs_cuda(test):
    """A mark, likewise; and slow."""
    reason = "compiling for an H100 needs the CUDA compiler's packages: the extra `cuda_aot`"
    missing = not _found("jax_plugins.xla_cuda13")
    return pytest.mark.slow(pytest.mark.compiles_for_cuda(pytest.mark.skipif(missing, reason=reason)(test)))


Shapes = Mapping[str, tuple[tuple[int, ...], str]]


class Program(NamedTuple):
    text: str  # of the optimised HLO
    temporary: int  # bytes

    @property
    def kernels(self) -> list[str]:
        """The custom calls that are Pallas kernels, by their targets."""
        return re.findall(r'custom_call_target="(tpu_custom_call|mosaic_gpu_v2)"', self.text)

    @property
    def collectives(self) -> list[str]:
        names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
        return re.findall(rf"\b({names})(?:-start)?\(", self.text)


@functools.cache
def devices(chip: str) -> tuple:
    """Devices of a chip by its name, which exist in the compiler only."""
    if chip == "h100":
        config = (Path(__file__).parent / "h100.txtpb").read_text()
        return tuple(topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x4").devices)
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=TPUS[chip]).devices)


def compile_for(
    chip: str,
    function: Callable,
    shapes: Shapes,
    mesh_shape: Mapping[str, int] | None = None,
    specs: Mapping[str, PartitionSpec] | None = None,
) -> Program:
    """`function(**arrays)` compiled for one device of `chip`, or for a mesh of them, `specs` saying how arrays lie."""
    mesh_shape = dict(mesh_shape or {"x": 1})
    count = int(np.prod(list(mesh_shape.values())))
    mesh = Mesh(np.array(devices(chip)[:count]).reshape(*mesh_shape.values()), tuple(mesh_shape))
    arrays = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, (specs or {}).get(name, PartitionSpec())))
        for name, (shape, dtype) in shapes.items()
    }
    with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
        compiled = jax.jit(lambda arrays: function(**arrays)).lower(arrays).compile()
    return Program(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes)


class Schedule(NamedTuple):
    """The static schedule of one TPU kernel: VLIW bundles of its body, and slots used in all of them by unit."""

    kernel: str
    bundles: int
    slots: dict[str, int]
    capacity: dict[str, int]  # slots a bundle has, by unit

    @property
    def spills(self) -> int:
        return self.slots.get("VSTORE:SPILL", 0)

    def share(self, unit: str) -> float:
        """Used slots of a unit over those that its bundles have."""
        return self.slots[unit] / (self.bundles * self.capacity[unit])


def schedules(target: str, kernel: str) -> list[Schedule]:
    """Compiles in a process of its own (the compiler reads its flags once) and reads its dump.

    Args:
      target: "module:expression", evaluated there; it must compile something, such as
        "tests.kernels.test_tpu_scan:compile_case('v5e', 'forward')".
      kernel: the start of the names of the kernels asked for, as in `pallas_call(name=...)`.
    """
    module, expression = target.split(":", 1)
    with tempfile.TemporaryDirectory(prefix="llo_") as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"}
        script = f"import {module} as module\neval({expression!r}, vars(module))"
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-2000:]
        files = sorted(glob.glob(f"{folder}/*{kernel}*-final_hlo-static-per-bundle-utilization.txt"))
        assert files, f"no kernel named {kernel} in the dump"
        return [_read_schedule(Path(file)) for file in files]


def _read_schedule(file: Path) -> Schedule:
    lines = file.read_text().splitlines()
    units = [unit.strip() for unit in lines[1].split(",")]
    capacity = dict(zip(units, map(int, lines[2].split()), strict=False))
    rows = [list(map(int, line.split())) for line in lines[4:] if line.strip()]
    totals: list[Any] = [sum(column) for column in zip(*rows, strict=True)]
    name = re.sub(r"^\d+-", "", file.name).split("-")[0]
    return Schedule(name, len(rows), dict(zip(units, totals, strict=False)), capacity)


class Assembly(NamedTuple):
    """What the CUDA assembler says of one Mosaic GPU kernel."""

    kernel: str
    registers: int  # a thread
    spills: int  # bytes a thread, stored and loaded
    serialized: bool  # whether it could not let matrix products overlap (its warnings C7510 and on)


def ptxas(target: str) -> list[Assembly]:
    """Compiles in a process of its own, since the dump is asked for in its environment; `target` as of schedules."""
    module, expression = target.split(":", 1)
    with tempfile.TemporaryDirectory(prefix="ptxas_") as folder:
        dump = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu"}
        script = f"import {module} as module\neval({expression!r}, vars(module))"
        done = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | dump, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-2000:]
        texts = [Path(file).read_text() for file in sorted(glob.glob(f"{folder}/*.ptxas"))]
    assert texts, "no Mosaic GPU kernel was compiled"
    return [_read_ptxas(text) for text in texts]


def _read_ptxas(text: str) -> Assembly:
    find = lambda pattern: [int(n) for n in re.findall(pattern, text)]
    (kernel,) = re.findall(r"entry function '(\w+?)(?:_mosaic_gpu_kernel)?'", text)
    spills = sum(find(r"(\d+) bytes spill stores") + find(r"(\d+) bytes spill loads"))
    return Assembly(kernel, max(find(r"Used (\d+) registers")), spills, "serialized" in text)
