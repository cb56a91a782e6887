"""One layer: norm → mixer → add, norm → FFN → add; and how a layout's letter becomes one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.layout import kind_of
from hyjax.models.context import Context
from hyjax.models.ffn import FFNS, MLP
from hyjax.models.layers import norm, norm_axes
from hyjax.models.mixers import MIXERS, Mixer


class Layer(nn.Module):
    """A pre-norm residual layer; either part may be missing. x [B,T,D] -> (x [B,T,D], state)."""

    mixer: Mixer | None
    ffn: MLP | None
    norm: str = "rmsnorm"
    norm_eps: float = 1e-6
    dtype: Any = jnp.float32

    def setup(self):
        if self.mixer is not None:
            self.mixer_norm = norm(self.norm, self.norm_eps, self.dtype)
        if self.ffn is not None:
            self.ffn_norm = norm(self.norm, self.norm_eps, self.dtype)

    def __call__(self, x: jax.Array, ctx: Context, state=None):
        if self.mixer is not None:
            if state is not None and ctx.fresh is not None:
                state = state.reset(ctx.fresh)
            y, state = self.mixer(self.mixer_norm(x), ctx, state)
            x = x + y
        if self.ffn is not None:
            x = x + self.ffn(self.ffn_norm(x))
        return x, state

    @nn.nowrap
    def init_state(self, batch: int, max_len: int):
        """The mixer's state; None for a layer that has no mixer, and so nothing to remember."""
        return None if self.mixer is None else self.mixer.init_state(batch, max_len)

    @nn.nowrap
    def logical_axes(self) -> dict[str, tuple]:
        """Path of every parameter -> the logical axis of each of its dims."""
        axes: dict[str, tuple] = {}
        for name, part in (("mixer", self.mixer), ("ffn", self.ffn)):
            if part is not None:
                axes |= {f"{name}/{path}": dims for path, dims in part.logical_axes().items()}
                axes |= {f"{name}_norm/{leaf}": dims for leaf, dims in norm_axes(self.norm).items()}
        return axes


def build_layer(letter: str, config: Mapping[str, Any]) -> Layer:
    """The layer that `letter` stands for in a complete model config.

    A field of the mixer's or the FFN's module is looked up in the letter's legend entry, then among the
    model's own keys, then in the module.

    Raises:
      ValueError: the letter means nothing, or its legend entry names what does not exist.
    """
    mixer_name, ffn_name, entry = kind_of(letter, config["legend"])
    ffn_name = config["ffn"] if ffn_name == "default" else ffn_name
    key = f"model.legend.{letter}"
    modules = (_lookup(mixer_name, MIXERS, f"{key}.mixer"), _lookup(ffn_name, FFNS, f"{key}.ffn"))
    known = {name for module in modules if module for name in _fields(module)}
    for name in entry:
        if name not in known:
            raise ValueError(f"{key}.{name}: {mixer_name} and {ffn_name} have no such field{_nearest(name, known)}")
    mixer, ffn = (None if module is None else _make(module, entry, config, key) for module in modules)
    return Layer(mixer, ffn, config["norm"], config["norm_eps"], config["dtype"])


def _make(module: type[nn.Module], entry: dict, config: Mapping[str, Any], key: str) -> Any:
    values = {name: config[name] for name in _fields(module) if name in config}
    for name, value in entry.items():
        if name in _fields(module):
            default = values.get(name, _fields(module)[name].default)
            if default is not dataclasses.MISSING and not _same_type(value, default):
                kind = type(default).__name__
                raise ValueError(f"{key}.{name} is {value!r}; it must be of type {kind}, like {default!r}")
            values[name] = float(value) if isinstance(default, float) else value
    return module(**values, parent=None)


def _same_type(value: Any, default: Any) -> bool:
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def _fields(module: type[nn.Module]) -> dict[str, dataclasses.Field]:
    return {f.name: f for f in dataclasses.fields(module) if f.name not in ("parent", "name")}


def _lookup(name: Any, registry: Mapping[str, type], key: str) -> type | None:
    if name is None or name in registry:
        return registry[name] if name else None
    raise ValueError(f"{key} is {name!r}, not one of {', '.join(sorted(registry))}{_nearest(name, registry)}")


def _nearest(name: Any, known) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
