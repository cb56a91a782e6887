"""Writes the golden file of every config in configs/: the resolved config and the parameter tree it makes.

    python tests/golden/make.py

rewrites all of them; what a change of defaults or of the model does to each experiment then shows in the diff.
"""

import re
import sys
from pathlib import Path

GOLDEN = Path(__file__).parent
ROOT = GOLDEN.parent.parent
CONFIGS = ROOT / "configs"

# Arguments that change what a config builds, beside every file's own default.
ARGUMENTS = ("recall.py:pairs=64,layout=GGGG", "time_machine.py:layout=AAAA")


def specs() -> list[str]:
    """Every config that has a golden file, as `load` takes it, relative to configs/."""
    return sorted([path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.py")] + list(ARGUMENTS))


def path_of(spec: str) -> Path:
    """`"recall.py:pairs=64"` -> tests/golden/recall-pairs=64.txt"""
    return GOLDEN / (re.sub(r"[^\w=]+", "-", spec.replace(".py", "", 1)) + ".txt")


def text_of(spec: str) -> str:
    """What the golden file of `spec` should hold."""
    from hyjax.config import load, resolved_text

    config = load(str(CONFIGS / spec))
    return f"# configs/{spec}\n\n{resolved_text(config)}\n{parameter_text(config.model)}"


def parameter_text(model_config) -> str:
    """One line a leaf, in the tree's order: path, shape, dtype, the logical axis of each dim."""
    import jax

    from hyjax.cost.params import param_shapes
    from hyjax.models import HybridLM

    model = HybridLM(model_config)
    leaves = jax.tree.leaves_with_path(param_shapes(model))
    axes = jax.tree.leaves_with_path(model.logical_axes(), is_leaf=lambda node: isinstance(node, tuple))
    if [path for path, _ in leaves] != [path for path, _ in axes]:
        raise ValueError("logical_axes() and init() give different trees")
    lines = []
    for (path, leaf), (_, names) in zip(leaves, axes, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        lines.append(f"{name}  {list(leaf.shape)}  {leaf.dtype}  ({', '.join(map(str, names))})\n")
    return "".join(lines)


def main() -> None:
    wanted = {path_of(spec): text_of(spec) for spec in specs()}
    for stale in set(GOLDEN.glob("*.txt")) - set(wanted):
        stale.unlink()
    for path, text in wanted.items():
        path.write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # this checkout's hyjax, installed or not
    main()
