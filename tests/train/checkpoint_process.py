"""What the tests of checkpoints run in processes of their own: `python checkpoint_process.py COMMAND FOLDER ...`.

Every state is a function of its step, so whoever reads one knows what must be in it.
"""

import hashlib
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hyjax.train.checkpoint import Checkpointer, CheckpointError
from hyjax.train.optimizer import leaf_paths

MEGABYTE = 2**20


def state_of(step: int, megabytes: int) -> dict[str, Any]:
    """`megabytes` of float32 in two leaves, and the step."""
    numbers = jnp.arange(megabytes * MEGABYTE // 4, dtype=jnp.float32) + step
    a, b = jnp.split(numbers, 2)
    return {"params": {"a": a, "b": b}, "step": jnp.int32(step)}


def train(folder: str, steps: int, megabytes: int) -> None:
    """Goes on from what is there and saves every step, telling each whose arrays are copied."""
    checkpointer = Checkpointer(folder, keep=1)
    found = checkpointer.restore_latest(state_of(0, megabytes))
    start = found.step if found else 0
    print(f"start {start}", flush=True)
    for step in range(start + 1, steps + 1):
        checkpointer.save(step, state_of(step, megabytes), {})
        print(f"saved {step}", flush=True)
        checkpointer.poll()
    checkpointer.close()
    print("end", flush=True)


# ------------------------------------------------------------------------------------------------ faults of a disk


def failure(action: Callable[[], Any]) -> str:
    """What the CheckpointError says; "" where there is none."""
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


def poll(checkpointer: Checkpointer) -> None:
    """As a loop does after every step, for a minute at most."""
    end = time.monotonic() + 60
    while checkpointer._job is not None and time.monotonic() < end:
        checkpointer.poll()
        time.sleep(0.01)


def listing(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def newest(folder: str) -> list[int]:
    """[folder's step, the state's] of what a new process would go on from; raises where a value is wrong."""
    found = Checkpointer(folder).restore_latest(state_of(0, 4))
    jax.tree.map(np.testing.assert_array_equal, found.state, state_of(found.step, 4))
    return [found.step, int(found.state["step"])]


def file_size_limit(folder: str) -> None:
    """A save whose files may not grow, and one after the limit is gone."""
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(1, state_of(1, 4), {})
    checkpointer.wait()
    unlimited = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited))
    checkpointer.save(2, state_of(2, 4), {})
    said = {"first": failure(lambda: poll(checkpointer)), "again": failure(checkpointer.poll)}
    said |= {"listing": listing(folder), "newest": newest(folder)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    checkpointer.save(3, state_of(3, 4), {})
    checkpointer.close()
    print(json.dumps(said | {"after": [listing(folder), newest(folder)]}))


def small_disk(folder: str) -> None:
    """On a tmpfs of 16 MB at `folder`: too full before a save, full during one, read-only at last."""
    place = Path(folder) / "run"
    checkpointer = Checkpointer(place, keep=1)
    said: dict[str, Any] = {"at start": failure(lambda: checkpointer.check_space(state_of(0, 9)))}
    checkpointer.save(1, state_of(1, 4), {})
    checkpointer.wait()
    filler = Path(folder) / "filler"

    def fill(leave: int) -> None:
        filler.write_bytes(bytes(shutil.disk_usage(folder).free - leave))

    fill(leave=3 * MEGABYTE)
    said["before"] = [failure(lambda: checkpointer.save(2, state_of(2, 4), {})), listing(str(place))]
    filler.unlink()

    check = checkpointer.check_space
    checkpointer.check_space = lambda state, copies=None: (check(state, copies), fill(leave=2 * MEGABYTE))
    checkpointer.save(2, state_of(2, 4), {})
    said["during"] = [failure(lambda: poll(checkpointer)), listing(str(place)), newest(str(place))]
    filler.unlink()
    checkpointer.check_space = check
    checkpointer.save(3, state_of(3, 4), {})
    checkpointer.close()
    said["after"] = [listing(str(place)), newest(str(place))]

    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    said["read-only"] = [
        failure(Checkpointer(place).check_writable),
        failure(Checkpointer(Path(folder) / "other").check_writable),
        failure(lambda: checkpointer.save(4, state_of(4, 4), {})),
        newest(str(place)),
    ]
    print(json.dumps(said))


# ------------------------------------------------------------------------------------------------ other meshes


def mesh_of(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes))


def shard_largest(tree: Any, mesh: Mesh, axis: str) -> Any:
    """Shapes with each leaf's largest dim that the axis divides sharded over it; a leaf without one is whole."""

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        sizes = [size if size % mesh.shape[axis] == 0 else 0 for size in leaf.shape]
        spec: list[str | None] = [None] * len(sizes)
        if max(sizes, default=0):
            spec[int(np.argmax(sizes))] = axis
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(place, tree)


def train_state_shapes(**model: Any) -> Any:
    """Of a real model, its optimizer and a router's bias beside them; nothing is computed."""
    from stand_in import BASE

    from hyjax.models import HybridLM
    from hyjax.train import optimizer as optimizers
    from hyjax.train.step import create_state

    lm = HybridLM(dict(layout="GGAG", width=16, heads=2, vocab_size=31, legend={"G": {"conv_width": 4}}) | model)

    def create() -> Any:
        params = lm.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
        state = create_state(params, optimizers.build(BASE, 10, params), jax.random.key(1))
        return state.replace(controllers={"router_bias": {"E": jnp.zeros((2, 8))}})

    return jax.eval_shape(create)


def random_bits(shapes: Any, seed: int) -> Any:
    """Any bits at all, NaNs with their payloads among them, placed as the shapes say."""
    rng = np.random.default_rng(seed)

    def draw(leaf: Any) -> jax.Array:
        bits = rng.integers(0, 2**32, leaf.shape, np.uint32).view(leaf.dtype)
        return jax.device_put(bits, leaf.sharding)

    return jax.tree.map(draw, shapes)


def digest(tree: Any) -> str:
    """sha256 of every leaf's path, dtype and bits."""
    result = hashlib.sha256()
    for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
        result.update(f"{path} {leaf.dtype} {leaf.shape}".encode() + np.asarray(leaf).tobytes())
    return result.hexdigest()


def reshard(folder: str, devices: int, step: int) -> None:
    """Restores the newest step onto all of this process's devices, and saves it from there as `step`."""
    assert jax.device_count() == devices
    shapes = shard_largest(train_state_shapes(), mesh_of(fsdp=devices), "fsdp")
    checkpointer = Checkpointer(folder, keep=9)
    found = checkpointer.restore_latest(shapes)
    places = [
        leaf.sharding == shape.sharding
        for leaf, shape in zip(jax.tree.leaves(found.state), jax.tree.leaves(shapes), strict=True)
    ]
    checkpointer.save(step, found.state, found.extra)
    checkpointer.close()
    print(json.dumps({"step": found.step, "digest": digest(found.state), "placed": all(places)}))


COMMANDS = {"train": train, "file_size_limit": file_size_limit, "small_disk": small_disk, "reshard": reshard}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
