"""hyjax.kernels needs jax alone, and imports nothing else of hyjax."""

import ast
import pathlib
import subprocess
import sys

import hyjax.kernels

BLOCKED = ("flax", "grain", "ml_collections", "tensorboardX", "optax", "orbax", "absl", "rich", "matplotlib")


def test_imports_with_jax_alone_and_does_no_array_work():
    program = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None  # importing it raises ImportError
from hyjax.kernels import attention, delta_scan, diagonal_scan, linear_scan, selective_scan, short_conv
import jax
assert not jax._src.xla_bridge._backends, "importing started a backend"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_imports_nothing_else_of_hyjax():
    for path in pathlib.Path(hyjax.kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            outside = [n for n in names if n.split(".")[0] == "hyjax" and not n.startswith("hyjax.kernels")]
            assert not outside, f"{path}: {outside}"
