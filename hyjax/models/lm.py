"""The language model: embed → layers → final norm → head, as pure functions of one parameter tree.

The tree is the same for every way of running it (scanned or unrolled, any mesh):

    embed/embedding [V,D]              (embed/stream_0, … where tokens have several streams, which are summed)
    positions/embedding [P,D]          where the model learns its positions
    layers/<letter>/…                  each leaf stacked over that letter's layers, in order of depth
    final_norm/scale[, bias]
    head/kernel [D,V][, bias [V]]      (without kernel where the embedding is tied)

Shapes: `B` batch, `T` time, `D` width, `V` vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct, traverse_util

from hyjax.config import validate_model
from hyjax.kernels import RESIDUAL_NAMES
from hyjax.layout import parse, program
from hyjax.models.block import build_layer
from hyjax.models.context import Clock, Context, enter
from hyjax.models.layers import norm, norm_axes, tokens_product
from hyjax.models.loss import chunk_length, chunked_cross_entropy
from hyjax.models.stack import run

# What the backward pass may keep of a layer's forward pass; the rest is computed again. "none": keep all.
REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # what only running an operator again would give
    "kernels": jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES),
}


@struct.dataclass
class State:
    """What the model remembers between calls.

    Attributes:
      layers: {letter: that kind's states, stacked in order of depth}.
      clock: where each row stands.
      capacity: tokens that a row may hold (padding not counted); None: any number.
    """

    layers: dict[str, Any]
    clock: Clock
    capacity: int | None = struct.field(pytree_node=False, default=None)


@struct.dataclass
class Output:
    """logits [B,T,V] float32; the state after the call (None where none went in); what else there is to report."""

    logits: jax.Array
    state: State | None
    aux: dict[str, jax.Array]


class HybridLM:
    """A hybrid language model, as its config describes it.

    Args:
      model_config: any mapping with keys of `hyjax.config.DEFAULTS["model"]`; what is left out has its default.

    Raises:
      ValueError: a key or a value that means nothing, by name and with the nearest right one.
    """

    def __init__(self, model_config: Mapping[str, Any]):
        self.config = config = validate_model(model_config)
        self.letters = parse(config["layout"])
        arithmetic = {name: jnp.dtype(config[name]) for name in ("dtype", "state_dtype")}
        # letters of the legend that the layout leaves out are built too: what is wrong with them is wrong
        layers = {x: build_layer(x, config | arithmetic) for x in sorted({*self.letters, *config["legend"]})}
        self.layers = {letter: layers[letter] for letter in sorted(set(self.letters))}
        self.program = program(self.letters) if config["scan"] else self.letters
        self.dtype = arithmetic["dtype"]
        self.final_norm = norm(config["norm"], config["norm_eps"], self.dtype)

    # ------------------------------------------------------------------------------------------ parameters

    def init(self, rng: jax.Array, tokens: jax.Array) -> dict[str, Any]:
        """{"params": tree}, float32. A layer's draw depends on its depth and `rng` alone.

        `tokens` (int [B,T], or [B,T,streams]) is only looked at for its shape.
        """
        self._check_tokens(tokens)
        config, width = self.config, self.config["width"]
        # a tied table is also the head, whose logits should start at a scale of one
        scale = width**-0.5 if config["tied_embeddings"] else 1.0
        table = lambda key, rows: jax.random.normal(key, (rows, width), jnp.float32) * scale
        embed_key, position_key, head_key, layer_key = jax.random.split(rng, 4)

        streams = config["streams"] or (config["vocab_size"],)
        names = [f"stream_{i}" for i in range(len(streams))] if config["streams"] else ["embedding"]
        keys = jax.random.split(embed_key, len(streams))
        params: dict[str, Any] = {"embed": {n: table(k, v) for n, k, v in zip(names, keys, streams, strict=True)}}
        if config["position"] == "learned":
            params["positions"] = {"embedding": table(position_key, config["max_positions"])}

        x, ctx = jnp.zeros((1, 1, width), self.dtype), enter(None, None, 1, 1)[0]
        keys = jax.random.split(layer_key, len(self.letters))
        params["layers"] = {}
        for letter, layer in self.layers.items():
            depths = jnp.array([i for i, name in enumerate(self.letters) if name == letter])
            init = lambda key, layer=layer: layer.init(key, x, ctx)["params"]
            params["layers"][letter] = jax.vmap(init)(keys[depths])

        params["final_norm"] = self.final_norm.init(rng, x)["params"]
        head = {}
        if not config["tied_embeddings"]:
            head["kernel"] = jax.random.normal(head_key, (width, config["vocab_size"]), jnp.float32) * width**-0.5
        if config["head_bias"]:
            head["bias"] = jnp.zeros((config["vocab_size"],), jnp.float32)
        return {"params": params | ({"head": head} if head else {})}

    def logical_axes(self) -> dict[str, Any]:
        """The parameter tree with, for each leaf, the logical axis of each of its dims."""
        config = self.config
        axes: dict[str, tuple] = {f"final_norm/{leaf}": dims for leaf, dims in norm_axes(config["norm"]).items()}
        names = [f"stream_{i}" for i in range(len(config["streams"]))] or ["embedding"]
        axes |= {f"embed/{name}": ("vocab", "embed") for name in names}
        if config["position"] == "learned":
            axes["positions/embedding"] = (None, "embed")
        if not config["tied_embeddings"]:
            axes["head/kernel"] = ("embed", "vocab")
        if config["head_bias"]:
            axes["head/bias"] = ("vocab",)
        for letter, layer in self.layers.items():
            axes |= {f"layers/{letter}/{path}": ("layers", *dims) for path, dims in layer.logical_axes().items()}
        return traverse_util.unflatten_dict(axes, sep="/")

    # ------------------------------------------------------------------------------------------ state

    def init_state(self, batch: int, max_len: int) -> State:
        """The state of `batch` rows that have seen nothing, with room for `max_len` tokens a row."""
        count = Counter(self.letters)
        stack = lambda n, state: jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), state)
        states = {k: stack(count[k], layer.init_state(batch, max_len)) for k, layer in self.layers.items()}
        limits = [layer.mixer.capacity(max_len) for layer in self.layers.values() if layer.mixer is not None]
        capacity = min((limit for limit in limits if limit is not None), default=None)
        return State(states, Clock.zeros(batch), capacity)

    # ------------------------------------------------------------------------------------------ the forward pass

    def apply(
        self,
        variables: Mapping[str, Any],
        tokens: jax.Array,
        ctx: Context | None = None,
        state: State | None = None,
    ) -> Output:
        """Logits for every token.

        Args:
          variables: {"params": tree}.
          tokens: int [B,T], or [B,T,streams].
          ctx: positions and segment ids, [B,T] each; None: one document, which continues the state's.
          state: None trains; with one, T > 1 prefills (in any number of pieces) and T = 1 decodes.

        Returns:
          `Output`. With a state, aux["overflow"] (bool [B]) tells which rows now hold more tokens than it has room
          for (what did not fit was dropped) or positions past a learned table. Token ids are not looked at: one
          outside the vocabulary reads the nearest row, as JAX's indexing does.

        Raises:
          ValueError: shapes that do not fit, or (outside jit) a state without room for the call's tokens.
        """
        x, state, aux = self.hidden(variables, tokens, ctx, state)
        return Output(self.logits(variables, x).astype(jnp.float32), state, aux)

    def hidden(self, variables, tokens, ctx=None, state=None) -> tuple[jax.Array, State | None, dict[str, jax.Array]]:
        """As `apply`, but stops before the head: (x [B,T,D] after the final norm, state, aux)."""
        tokens = jnp.asarray(tokens)
        self._check_tokens(tokens)
        self._check_state(state, tokens.shape[0])
        params, config = variables["params"], self.config
        inside, clock = enter(ctx, None if state is None else state.clock, *tokens.shape[:2])
        if config["position"] == "learned":
            self._check_positions(inside.positions, counted=ctx is None and state is None)
        x = self._embed(params, tokens, inside)

        def layer(kind, params, x, state):
            return self.layers[kind].apply({"params": params}, x, inside, state)

        policy = REMAT_POLICIES[config["remat"]]
        remat = jax.checkpoint(layer, policy=policy, static_argnums=0) if policy and state is None else layer
        states = dict.fromkeys(self.layers) if state is None else state.layers
        x, states = run(self.program, params["layers"], x, states, remat)
        x = jnp.asarray(self.final_norm.apply({"params": params["final_norm"]}, x))
        if state is None or clock is None:
            return x, None, {}
        full = self._overflow(clock, state.capacity) | (inside.positions >= self._last_position).any(axis=1)
        return x, State(states, clock, state.capacity), {"overflow": full}

    def logits(self, variables: Mapping[str, Any], x: jax.Array) -> jax.Array:
        """The head: x [..., D] -> logits [..., V]."""
        params, tied = variables["params"], self.config["tied_embeddings"]
        kernel = params["embed"]["embedding"].T if tied else params["head"]["kernel"]
        y = tokens_product(x, kernel.astype(x.dtype))
        return y + params["head"]["bias"].astype(x.dtype) if self.config["head_bias"] else y

    def loss(
        self, variables: Mapping[str, Any], batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Summed cross-entropy of a batch, in nats, and the other sums: "z_loss", "weight", "correct".

        `batch` holds tokens, targets, weights, positions and segment_ids, whose documents have no padding inside (as
        hyjax.data packs them: see Context.contiguous). The z-loss comes with its coefficient and apart from the
        cross-entropy; nothing is divided by the number of tokens.
        """
        ctx = None
        if "segment_ids" in batch:
            ctx = Context(batch["positions"], batch["segment_ids"], contiguous=True)
        x, _, _ = self.hidden(variables, batch["tokens"], ctx)
        chunk = chunk_length(x.shape[0], x.shape[1], self.config["vocab_size"], self.config["loss_chunk"])
        head = lambda x: self.logits(variables, x)
        sums = dict(chunked_cross_entropy(x, batch["targets"], batch["weights"], head, chunk))
        sums["z_loss"] = self.config["z_loss"] * sums.pop("square_lse")
        return sums.pop("loss"), sums

    # ------------------------------------------------------------------------------------------ parts

    def _embed(self, params: Mapping[str, Any], tokens: jax.Array, ctx: Context) -> jax.Array:
        tables, config = params["embed"], self.config
        take = lambda table, ids: table[ids].astype(self.dtype)
        if config["streams"]:
            x = sum(take(tables[f"stream_{i}"], tokens[..., i]) for i in range(len(config["streams"])))
        else:
            x = take(tables["embedding"], tokens)
        if config["position"] == "learned":
            x = x + take(params["positions"]["embedding"], ctx.positions)
        return x

    def _check_tokens(self, tokens: jax.Array) -> None:
        streams = len(self.config["streams"])
        right = tokens.ndim == 3 and tokens.shape[2] == streams if streams else tokens.ndim == 2
        if not right or not jnp.issubdtype(tokens.dtype, jnp.integer):
            form = f"[batch, time, {streams}]" if streams else "[batch, time]"
            raise ValueError(f"tokens must be integers {form}; got {tokens.dtype} {list(tokens.shape)}")

    def _check_state(self, state: State | None, batch: int) -> None:
        if state is not None and state.clock.time.shape != (batch,):
            raise ValueError(f"the state is of {state.clock.time.shape[0]} rows; the tokens are of {batch}")

    @property
    def _last_position(self) -> int:
        """The first position that the model has no place for."""
        return self.config["max_positions"] if self.config["position"] == "learned" else 2**31 - 1

    def _check_positions(self, positions: jax.Array, counted: bool) -> None:
        """A look-up past the table's end would be the last row's, without a word.

        `counted`: positions are 0, 1, …, and so known though they are traced.
        """
        if counted:
            least, most = 0, positions.shape[1] - 1
        elif isinstance(positions, jax.core.Tracer):
            return
        else:
            least, most = int(positions.min()), int(positions.max())
        if least < 0 or most >= self._last_position:
            wrong = least if least < 0 else most
            raise ValueError(f"position {wrong} is not in the table of model.max_positions={self._last_position}")

    def _overflow(self, clock: Clock, capacity: int | None) -> jax.Array:
        if capacity is None:
            return jnp.zeros(clock.time.shape, bool)
        if not isinstance(clock.time, jax.core.Tracer) and int(clock.time.max()) > capacity:
            raise ValueError(f"a row holds {int(clock.time.max())} tokens, but the state has room for {capacity}")
        return clock.time > capacity
