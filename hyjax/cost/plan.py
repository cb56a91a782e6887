"""`hyjax plan`: everything a config says about a model's size and cost, as one JSON object and as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby, pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hyjax.cost.flops import flops_per_token
from hyjax.cost.params import count_params, ledger
from hyjax.cost.state import crossover_tokens, decode_state_bytes
from hyjax.layout import kind_of
from hyjax.models import HybridLM

# Columns of output that isn't going to a terminal: enough for every table, so nothing is cut or wrapped.
PIPED_WIDTH = 160


def plan(model_config: Mapping[str, Any], context: int, batch: int = 1) -> dict[str, Any]:
    """The plan of a model, ready for `json.dumps`. Layers and attention positions count from 1.

    Args:
      model_config: any mapping with keys of the config's model section.
      context: tokens a row that FLOPs and state are given for. batch: rows that the state is given for.

    Returns:
      "layout", "num_layers", "attention_layers" (every layer with a mixer of kind "attention", windows included),
      "params" (`count_params`), "layers", "flops_per_token", "decode_state_bytes", "crossover_tokens", and "pipeline":
      None, for no planner of stages exists.

    Raises:
      ValueError: the config means nothing, by key; or `context` or `batch` is no positive whole number.
    """
    model = HybridLM(model_config)
    state = decode_state_bytes(model.config, context, batch)
    layers = _layers(model)
    return {
        "layout": model.config["layout"],
        "num_layers": len(layers),
        "attention_layers": [i for i, letter in enumerate(model.letters, 1) if _attends(model, letter)],
        "params": count_params(model.config),
        "layers": layers,
        "flops_per_token": flops_per_token(model.config, context),
        "decode_state_bytes": state,
        "crossover_tokens": crossover_tokens(state),
        "pipeline": None,
    }


def _attends(model: HybridLM, letter: str) -> bool:
    mixer = model.layers[letter].mixer
    return mixer is not None and mixer.kind == "attention"


def _layers(model: HybridLM) -> list[dict[str, Any]]:
    _, size = ledger(model)
    layers = []
    for index, letter in enumerate(model.letters, 1):
        mixer, ffn, _ = kind_of(letter, model.config["legend"])
        ffn = model.config["ffn"] if ffn == "default" else ffn
        layers.append({"index": index, "kind": letter, "mixer": mixer, "ffn": ffn, "params": size[letter]})
    return layers


# ------------------------------------------------------------------------------------------------ tables


def show(plan: Mapping[str, Any], batch: int = 1, console: Console | None = None) -> None:
    """Print the tables of a plan; `batch` is the one it was made for."""
    console = console or Console()
    if console.is_terminal:
        console.print(tables(plan, batch), highlight=False)
        return
    wide = Console(file=console.file, width=PIPED_WIDTH, color_system=None)
    with wide.capture() as text:
        wide.print(tables(plan, batch), highlight=False)
    print("\n".join(line.rstrip() for line in text.get().splitlines()), file=console.file)


def tables(plan: Mapping[str, Any], batch: int = 1) -> RenderableType:
    """The tables of a plan, for rich to print."""
    count, attention = plan["num_layers"], plan["attention_layers"]
    where = f"attention at {_ranges(attention)}" if attention else "no attention"
    head = Text(f"{plan['layout']}: {count} layers, {where}")
    return Group(
        head, "", _layer_table(plan), "", _params_table(plan), "", _flops_table(plan), "", _state_table(plan, batch)
    )


def _table(title: str, *columns: str, text_columns: int = 1) -> Table:
    """A table whose first `text_columns` columns are text, the rest numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < text_columns else "right", overflow="fold")
    return table


def _layer_table(plan: Mapping[str, Any]) -> Table:
    table = _table("Layers", "kind", "mixer", "ffn", "at", "layers", "parameters each", "all", text_columns=4)
    kinds: dict[str, list[dict[str, Any]]] = {}
    for layer in plan["layers"]:
        kinds.setdefault(layer["kind"], []).append(layer)
    for letter, layers in kinds.items():
        first, size = layers[0], layers[0]["params"]
        at = _ranges([layer["index"] for layer in layers])
        names = (first["mixer"] or "none", first["ffn"] or "none")
        table.add_row(letter, *names, at, str(len(layers)), f"{size:,}", f"{size * len(layers):,}")
    return table


def _params_table(plan: Mapping[str, Any]) -> Table:
    params = plan["params"]
    table = _table("Parameters", "kind", "number", "share")
    for kind, number in params["by_kind"].items():
        if number:
            table.add_row(kind, f"{number:,}", f"{number / params['total']:.1%}")
    table.add_row("total", f"{params['total']:,}", "100.0%", style="bold")
    if params["active"] != params["total"]:
        table.add_row("active per token", f"{params['active']:,}", f"{params['active'] / params['total']:.1%}")
    number = params["non_embedding"]
    table.add_row("without embeddings", f"{number:,}", f"{number / params['total']:.1%}")
    return table


def _flops_table(plan: Mapping[str, Any]) -> Table:
    flops = plan["flops_per_token"]
    model = dict(flops["model"])
    total = model.pop("total")
    table = _table(f"Forward FLOPs per token, context {flops['context']:,}", "of", "FLOPs", "share")
    for name, value in model.items():
        table.add_row(name, f"{value:,.0f}", f"{value / total:.1%}")
    table.add_row("total", f"{total:,.0f}", "100.0%", style="bold")
    return table


def _state_table(plan: Mapping[str, Any], batch: int) -> RenderableType:
    state = plan["decode_state_bytes"]
    rows = "one row" if batch == 1 else f"{batch:,} rows"
    table = _table(f"Decode state of {rows}", "part", "bytes", "")
    parts = {
        "keys and values, each token": state["kv_per_token"],
        "windows, full": state["window"],
        "recurrent states": state["recurrent"],
        "convolution tails": state["conv"],
    }
    parts |= {f"all, at {int(n):,} tokens": state["at"][n] for n in sorted(state["at"], key=int)}
    for name, number in parts.items():
        table.add_row(name, f"{number:,}", _binary(number))
    tokens = plan["crossover_tokens"]
    note = (
        f"Growing and fixed parts are equal at {tokens:,.0f} tokens."
        if tokens is not None
        else "No crossover: the state has no growing part."
        if not state["kv_per_token"]
        else "No crossover: the state has no fixed part."
    )
    return Group(table, Text(note))


def _ranges(indices: list[int]) -> str:
    """`[1, 2, 3, 7]` -> "1-3, 7"; more than eight stretches: what repeats, as "3, 7, 11, ... 47 (step 4)"."""
    stretches = []
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        run_indices = [index for _, index in run]
        first, last = run_indices[0], run_indices[-1]
        stretches.append(str(first) if first == last else f"{first}-{last}")
    if len(stretches) <= 8:
        return ", ".join(stretches)
    steps = Counter(b - a for a, b in pairwise(indices))
    if len(steps) == 1:
        return f"{', '.join(stretches[:3])}, ... {indices[-1]} (every {next(iter(steps))})"
    return f"{', '.join(stretches[:3])}, ... {stretches[-1]}"


def _binary(number: int) -> str:
    """Bytes with a binary prefix: 4096 -> "4.00 KiB"; below 1,024, nothing."""
    value, unit = float(number), 0
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    while value >= 1024 and unit < len(units) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {units[unit]}" if unit else ""
