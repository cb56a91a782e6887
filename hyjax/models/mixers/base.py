"""What every mixer offers. Adding one is adding a file with these and a line in the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn

from hyjax.config.errors import divisors_near, multiples_near

MOST_TAPS = 128  # of a short convolution, whose program has a product for each; the field uses 2 to 4

# a field -> what the config calls it: "model.heads", or "model.legend.A.heads" where the legend sets it
Key = Callable[[str], str]


class Cost(NamedTuple):
    """Forward FLOPs per token (multiply-add = 2) at a context length."""

    projections: float  # the products with parameters
    mixing: float  # what passes between tokens: attention's two products, or a recurrence's update and read


class Mixer(nn.Module):
    """A layer's way of passing information between tokens.

    `__call__(x [B,T,D], ctx, state) -> (y [B,T,D], state)`: `state=None` trains; a state with T > 1 prefills, in
    any number of pieces; one with T = 1 decodes. Splitting a call changes neither outputs nor states.
    """

    kind: ClassVar[str]  # "attention" or "recurrence": the ledger that parameters and FLOPs are counted under

    @nn.nowrap
    def check(self, key: Key) -> None:
        """Raises ValueError where the fields do not fit each other; types and single values are checked before."""

    @nn.nowrap
    def init_state(self, batch: int, max_len: int) -> Any:
        """The state of `batch` rows that have seen nothing, with room for `max_len` tokens."""
        raise NotImplementedError

    @nn.nowrap
    def capacity(self, max_len: int) -> int | None:
        """How many tokens a row may hold with a state made for `max_len`; None: any number."""
        return None

    @nn.nowrap
    def logical_axes(self) -> dict[str, tuple]:
        """Path of every parameter -> the logical axis of each of its dims."""
        raise NotImplementedError

    @nn.nowrap
    def cost(self, seq_len: int) -> Cost:
        """Forward FLOPs per token in a row of `seq_len`."""
        raise NotImplementedError


def check_least(module: nn.Module, key: Key, **least: int) -> None:
    """Each field named is at least the number given."""
    for name, number in least.items():
        if (value := getattr(module, name)) < number:
            raise ValueError(f"{key(name)}={value} must be at least {number}")


def check_taps(conv_width: int, key: Key) -> None:
    if conv_width > MOST_TAPS:
        raise ValueError(f"{key('conv_width')}={conv_width} must be at most {MOST_TAPS}: each tap is traced")


def check_heads(width: int, heads: int, head_dim: int, key: Key) -> None:
    """Where `head_dim` is 0, `heads` heads share the width."""
    if not head_dim and width % heads:
        raise ValueError(
            f"{key('heads')}={heads} must divide {key('width')}={width} where {key('head_dim')} is 0: "
            f"use {divisors_near(width, heads)} heads, or a width of {multiples_near(width, heads)}"
        )
