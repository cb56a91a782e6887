"""Kernels of other libraries, timed in the same process where they are installed and the device is an NVIDIA GPU.

flash-linear-attention's Triton kernels, through PyTorch on the same GPU, compute the same recurrences on tensors of the
same shapes [B, T, H, K]: its simple GLA is linear_scan with a gate a head, its GLA with a gate a channel, its (gated)
delta rule and Kimi delta attention are delta_scan. They take no float32.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

from hyjax.kernels import dispatch

# (operator, gate) -> (module, function, our names of its arguments in its order)
FLASH_LINEAR_ATTENTION = {
    ("linear_scan", "head"): ("fla.ops.simple_gla", "chunk_simple_gla", dict(q="q", k="k", v="v", g="log_decay")),
    ("linear_scan", "channel"): ("fla.ops.gla", "chunk_gla", dict(q="q", k="k", v="v", g="log_decay")),
    ("delta_scan", "none"): ("fla.ops.delta_rule", "chunk_delta_rule", dict(q="q", k="k", v="v", beta="beta")),
    ("delta_scan", "head"): (
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        dict(q="q", k="k", v="v", g="log_decay", beta="beta"),
    ),
    ("delta_scan", "channel"): (
        "fla.ops.kda",
        "chunk_kda",
        dict(q="q", k="k", v="v", g="log_decay", beta="beta"),
    ),
}


def of(operator: str, gate: str, arrays: dict[str, jax.Array]) -> dict[str, dict[str, Callable[[], Any]]]:
    """{library: {"forward": call, "forward_backward": call}}; empty where there is none, on another device, in float32.

    A call returns when the GPU is done.
    """
    wanted = FLASH_LINEAR_ATTENTION.get((operator, gate))
    here = dispatch.device()[0] == "gpu" and all(importlib.util.find_spec(name) for name in ("torch", "fla"))
    if wanted is None or not here or arrays["q"].dtype == "float32":
        return {}
    module, function, names = wanted
    return {"flash-linear-attention": _torch_calls(getattr(importlib.import_module(module), function), names, arrays)}


def _torch_calls(function: Callable, names: dict[str, str], arrays: dict[str, jax.Array]):
    torch = importlib.import_module("torch")
    # float32 first: NumPy has no bfloat16, and a gate stays in float32
    tensors = {}
    for theirs, ours in names.items():
        array = arrays[ours]
        dtype = getattr(torch, str(array.dtype))
        tensor = torch.from_numpy(jax.device_get(array.astype("float32")).copy())
        tensors[theirs] = tensor.to("cuda", dtype).requires_grad_()

    def forward():
        with torch.no_grad():
            function(**tensors)
        torch.cuda.synchronize()

    def forward_backward():
        out = function(**tensors)[0]
        torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))
        torch.cuda.synchronize()

    return {"forward": forward, "forward_backward": forward_backward}
