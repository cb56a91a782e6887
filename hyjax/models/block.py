"""One layer: norm → mixer → add, norm → FFN → add; and how a layout's letter becomes one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyjax.config.errors import lookup, near
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
            x = x + y.astype(x.dtype)  # a legend entry may give its mixer or FFN another dtype
        if self.ffn is not None:
            x = x + self.ffn(self.ffn_norm(x)).astype(x.dtype)
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
      ValueError: the letter means nothing, or its legend entry names what does not exist or does not fit.
    """
    mixer_name, ffn_name, entry = kind_of(letter, config["legend"])
    ffn_name = config["ffn"] if ffn_name == "default" else ffn_name
    key = f"model.legend.{letter}"
    modules: list[Any] = [
        None if mixer_name is None else lookup(MIXERS, mixer_name, f"{key}.mixer"),
        None if ffn_name is None else lookup(FFNS, ffn_name, f"{key}.ffn"),
    ]
    known = {name for module in modules if module for name in _fields(module)}
    for name in entry:
        if name not in known:
            raise ValueError(f"{key}.{name}: {mixer_name} and {ffn_name} have no such field{near(name, known)}")
    if "width" in entry:
        raise ValueError(f"{key}.width can't be set: every layer reads and writes a stream as wide as model.width")
    if entry.get("position") == "learned" != config["position"]:
        raise ValueError(f"{key}.position='learned' needs the model's table of positions: model.position='learned'")
    mixer, ffn = (None if module is None else _make(module, entry, config, key) for module in modules)
    if mixer is not None:
        mixer.check(lambda name: f"{key}.{name}" if name in entry else f"model.{name}")
    return Layer(mixer, ffn, config["norm"], config["norm_eps"], config["dtype"])


def _make(module: type[nn.Module], entry: dict, config: Mapping[str, Any], key: str) -> Any:
    fields = _fields(module)
    values = {name: config[name] for name in fields if name in config}
    for name in entry.keys() & fields.keys():
        values[name] = _like(values.get(name, fields[name].default), entry[name], f"{key}.{name}")
    return module(**values, parent=None)


def _like(default: Any, value: Any, key: str) -> Any:
    """A legend's `value` in the type of the field's default; a whole number does for float."""
    if isinstance(default, jnp.dtype):
        return jnp.dtype(value)
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if default is not dataclasses.MISSING and type(value) is not type(default):
        raise ValueError(f"{key} is {value!r}; it must be of type {type(default).__name__}, like {default!r}")
    return value


def _fields(module: type[nn.Module]) -> dict[str, dataclasses.Field]:
    return {f.name: f for f in dataclasses.fields(module) if f.name not in ("parent", "name")}
