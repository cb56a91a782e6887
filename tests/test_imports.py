"""What importing hyjax needs, what it must not do, and that its parts import one way only."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hyjax"

# Lowest first: a part imports itself and parts of lower rows. (cli → train, evals → cost, data → models → …)
LAYERS = (
    {"kernels", "layout", "exit_codes"},
    {"config"},
    {"parallel"},
    {"models"},
    {"cost", "data", "generate"},
    {"evals"},
    {"train"},
    {"bench"},
    {"cli"},
)
# What these parts may import beside Python's own library, anywhere in them.
OUTSIDE = {
    "kernels": {"jax", "numpy"},
    "layout": set(),
    "exit_codes": set(),
    "config": {"ml_collections"},
    "parallel": {"jax", "numpy"},
    "models": {"jax", "numpy", "flax"},
}


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything that a file imports, inside functions too; no relative imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{file}:{node.lineno}: write the import in full"
            # `from hyjax import config` imports the part, `from hyjax.config import load` a name of it
            names = [f"hyjax.{alias.name}" for alias in node.names] if node.module == "hyjax" else [node.module]
            yield from ((name, node.lineno) for name in names)


def files() -> list[tuple[str, Path]]:
    """(part, file) of every file of hyjax but its own __init__."""
    found = [(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path) for path in PACKAGE.rglob("*.py")]
    return sorted((part, path) for part, path in found if part != "__init__")


def test_parts_import_downwards_only():
    rank = {part: row for row, parts in enumerate(LAYERS) for part in parts}
    wrong = []
    for part, path in files():
        assert part in rank, f"hyjax.{part} is new: give it a row in LAYERS"
        for name, line in imports(path):
            _, _, rest = name.partition("hyjax.")
            other = rest.split(".")[0]
            if name.startswith("hyjax.") and other != part and rank.get(other, len(LAYERS)) >= rank[part]:
                wrong.append(f"{path}:{line}: {part} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_lower_parts_need_little():
    wrong = []
    for part, path in files():
        for name, line in imports(path):
            root = name.split(".")[0]
            known = root == "hyjax" or root in sys.stdlib_module_names or root in OUTSIDE.get(part, {root})
            if not known:
                wrong.append(f"{path}:{line}: {part} imports {name}")
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------------------ in a fresh Python

BLOCK = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not installed here")

sys.meta_path.insert(0, Blocked())
"""
TRAINING = ("grain", "ml_collections", "tensorboardX")
ALL = (*TRAINING, "flax", "optax", "orbax", "rich", "matplotlib")

LIGHT = """
import hyjax, hyjax.kernels, hyjax.config, hyjax.layout
hyjax.config.validate_model({"width": 64}), hyjax.config.fingerprint({})
assert "jax" in sys.modules and not {"flax", "optax", "orbax", "grain", "ml_collections", "absl"} & set(sys.modules)
"""
STEP = """
import hyjax, hyjax.kernels, hyjax.models, hyjax.config, hyjax.cost, hyjax.data.synthetic
import jax, jax.numpy as jnp
from hyjax.models import HybridLM
from hyjax.train import optimizer
from hyjax.train.step import create_state, make_train_step

model = HybridLM(dict(layout="GA", width=8, heads=2, vocab_size=11, ffn="gelu", ffn_width=8))
settings = hyjax.config.check({})["optimizer"]
tokens = jnp.arange(16).reshape(2, 8) % 11
batch = dict(tokens=tokens, targets=(tokens + 1) % 11, weights=jnp.ones((2, 8)))
params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
update, schedule = optimizer.build(settings, 10, params), optimizer.schedule(settings, 10)
state, metrics = make_train_step(model, update, schedule)(create_state(params, update, jax.random.key(1)), batch)
assert int(state.step) == 1 and 0 < float(metrics["loss"]) < 20, metrics
"""
# The number of devices may be chosen only before JAX has looked for them, as a job's processes must be able to.
NO_ARRAY_WORK = """
import jax, hyjax
for module in pkgutil.walk_packages(hyjax.__path__, "hyjax."):
    importlib.import_module(module.name)
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""


@pytest.mark.parametrize(
    ("code", "blocked"),
    [(LIGHT, ALL), (STEP, TRAINING), (NO_ARRAY_WORK, ())],
    ids=["kernels and config need jax alone", "a step without a config file", "importing does no array work"],
)
def test_fresh_python(code, blocked):
    quick = "--xla_backend_optimization_level=0"  # compiles faster, and leaves the number of devices open
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick}
    script = BLOCK.format(blocked=blocked) + code
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
