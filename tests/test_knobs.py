"""No dead knobs: every key of a config, and every field of a legend entry, changes what it should when it is changed.

Models and optimizers are compared as traced programs (nothing is compiled), data by its batches, and what only the
training loop reads by what a few tiny runs leave. A new key or field fails here until it has a row in a table.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import random
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval
from tokenizers import Tokenizer as FileTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from hyjax.config import CHOICES, ConfigError, from_json, to_json, together
from hyjax.config.schema import KEYS
from hyjax.cost.params import param_shapes
from hyjax.data import build
from hyjax.data.packing import PACKINGS
from hyjax.data.sources import SOURCES
from hyjax.data.tokenizers import TOKENIZERS
from hyjax.generate import make_sampler
from hyjax.kernels.dispatch import NAMES
from hyjax.models import HybridLM
from hyjax.models.ffn import FFNS
from hyjax.models.layers import NORMS
from hyjax.models.lm import REMAT_POLICIES
from hyjax.models.mixers import MIXERS
from hyjax.train import loop, optimizer
from hyjax.train.checkpoint import CheckpointError
from hyjax.train.metrics import read_records
from hyjax.train.step import create_state, make_train_step
from hyjax.train.step_folder import VERIFIED


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """A folder of short documents, and beside it another folder."""
    root = tmp_path_factory.mktemp("texts")
    words = ["the", "of", "and", "time", "was", "a", "traveller", "machine", "Filby", "laboratory"]
    for folder in ("texts", "others"):
        (root / folder).mkdir()
        rng = random.Random(folder)
        for i in range(30):
            ending = "md" if i % 3 == 0 else "txt"
            (root / folder / f"{i}.{ending}").write_text(" ".join(rng.choices(words, k=60)))
    (root / "one.txt").write_text("\n\n".join(file.read_text() for file in sorted((root / "texts").iterdir())))
    ends = {"[UNK]": 0, "</s>": 1, "<stop>": 2}
    vocabulary = WordLevel(ends | {word: 3 + i for i, word in enumerate(words)}, unk_token="[UNK]")
    by_word = FileTokenizer(vocabulary)
    by_word.pre_tokenizer = WhitespaceSplit()
    by_word.save(str(root / "words.json"))
    return root


def config_of(values: dict[str, Any], texts: Path) -> str:
    """A tiny config with `values` (by dotted key; paths are relative to the texts) in it, checked, as JSON."""
    tiny = {
        "model": dict(layout="GAW-", width=8, heads=2, window=4, vocab_size=28),
        "data": dict(source="text", path="texts", tokenizer="letters", seq_len=12, heldout=0.4),
        "train": dict(steps=6, batch_size=8),
    }
    sections = {"model": {}, "data": {}, "optimizer": {}, "train": {}, "eval": {}} | copy.deepcopy(tiny)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (sections[section] if section else sections)[name] = value
    data = sections["data"]
    if data["path"]:
        data["path"] = str(texts / data["path"])
    if data["tokenizer"].endswith(".json"):
        data["tokenizer"] = str(texts / data["tokenizer"])
    data["mixture"] = tuple(entry.replace("text:", f"text:{texts}/") for entry in data.get("mixture", ()))
    return to_json(sections)


# ------------------------------------------------------------------------------------------------ what is observed


def text_of(function, *shapes) -> str:
    """The program that `function` traces to: what its results depend on, and no addresses of Python functions."""
    jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
    needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return re.sub("0x[0-9a-f]+", "", str(needed))


def key_shape():
    return jax.eval_shape(lambda: jax.random.key(0))


def step(config) -> str:
    """The training step."""
    model, steps = HybridLM(config.model), config.train.steps
    rows = (config.train.batch_size, config.data.seq_len)
    streams = (len(config.model.streams),) if config.model.streams else ()
    names = ("targets", "positions", "segment_ids")
    batch = {name: jax.ShapeDtypeStruct(rows, jnp.int32) for name in names}
    batch |= {
        "tokens": jax.ShapeDtypeStruct(rows + streams, jnp.int32),
        "weights": jax.ShapeDtypeStruct(rows, jnp.float32),
    }
    params = param_shapes(model)
    update = optimizer.build(config.optimizer, steps, params)
    state = jax.eval_shape(lambda params, key: create_state(params, update, key), params, key_shape())
    schedule = optimizer.schedule(config.optimizer, steps)
    return text_of(make_train_step(model, update, schedule, config.train.microbatches), state, batch)


def init(config) -> str:
    """The drawing of the parameters."""
    return text_of(HybridLM(config.model).init, key_shape(), jax.ShapeDtypeStruct((1, 4), jnp.int32))


def sampler(config) -> str:
    """Prefill and decoding."""
    model = HybridLM(config.model)
    sample = make_sampler(model, config.eval.sample_tokens, config.eval.temperature)
    return text_of(sample, param_shapes(model), jax.ShapeDtypeStruct((1, 4), jnp.int32), key_shape())


def data(config) -> Any:
    """The first batches of both sets and what a pass holds; or why there is no data."""
    try:
        built = build(config.data, batch_size=config.train.batch_size, seed=config.seed)
    except ValueError as error:
        return str(error)
    digests = []
    for loader in (built.train, built.heldout):
        arrays = {**loader.batch(0), **{f"next {name}": array for name, array in loader.batch(1).items()}}
        digest = hashlib.sha256(repr([(name, a.shape) for name, a in arrays.items()]).encode())
        for array in arrays.values():
            digest.update(np.ascontiguousarray(array))
        digests.append((loader.num_examples, digest.hexdigest()))
    return digests


def seconds(config) -> list[tuple]:
    """What signals and the watchdog are told to wait; what they then do, their own tests show."""
    told: list[tuple] = []

    class Told(Exception):
        """Ends the run before it begins."""

    def note(*given):
        told.append(given)
        if len(told) == 2:
            raise Told
        return contextlib.nullcontext()

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as workdir, pytest.raises(Told):
        patch.setattr(loop, "Signals", note)
        patch.setattr(loop, "Watchdog", note)
        loop.train(config, workdir)
    return told


def threads(config) -> int:
    """How many threads read ahead."""
    before = set(threading.enumerate())
    batches = build(config.data, batch_size=config.train.batch_size, seed=0).train.batches()
    next(batches)
    return len(set(threading.enumerate()) - before)


@functools.cache
def observed(observe, config: str) -> Any:
    return observe(from_json(config))


def unchanged(observe, before: str, after: str) -> bool:
    return observed(observe, before) == observed(observe, after)


@pytest.mark.parametrize("observe", [step, init, sampler, data])
def test_the_same_config_is_seen_as_the_same(observe, texts):
    """Else the tests below would pass for any knob."""
    config = from_json(config_of({"eval.sample_tokens": 3}, texts))
    assert observe(config) == observe(config)


# ------------------------------------------------------------------------------------------------ keys


@dataclasses.dataclass(frozen=True)
class Knob:
    observe: Callable[[Any], Any]
    value: Any
    given: dict[str, Any] = dataclasses.field(default_factory=dict)  # what it takes for the key to matter


RECALL = {
    "data.source": "recall", "data.path": "", "data.num_pairs": 6, "data.num_keys": 9, "data.num_values": 5,
    "data.train_sequences": 20, "data.heldout_sequences": 20,
}  # fmt: skip
MIXED = {
    "data.source": "mixture", "data.path": "", "data.mixture": ("text:texts", "text:others"),
    "data.weights": (1.0, 1.0),
}  # fmt: skip
WORDS = {"data.tokenizer": "words.json", "data.eos": "</s>"}
ONE_LAYER = {"model.layout": "-"}  # quick to trace, for what no mixer has a part in
WSD = {**ONE_LAYER, "optimizer.schedule": "wsd"}
DECAY = {**ONE_LAYER, "optimizer.weight_decay": 0.1}

KNOBS: dict[str, Knob] = {
    "seed": Knob(data, 1),
    "model.layout": Knob(step, "GAG-"),
    "model.legend": Knob(step, {"A": {"gated": True}}),
    "model.vocab_size": Knob(step, 29, ONE_LAYER),
    "model.streams": Knob(step, (28, 5), ONE_LAYER),
    "model.width": Knob(step, 12),
    "model.heads": Knob(step, 4),
    "model.kv_heads": Knob(step, 1),
    "model.head_dim": Knob(step, 6),
    "model.window": Knob(step, 5),
    "model.position": Knob(step, "learned"),
    "model.max_positions": Knob(step, 50, {"model.position": "learned"}),
    "model.rope_theta": Knob(step, 500.0),
    "model.rope_fraction": Knob(step, 0.5),
    "model.qk_norm": Knob(step, True),
    "model.norm": Knob(step, "layernorm"),
    "model.norm_eps": Knob(step, 1e-5),
    "model.ffn": Knob(step, "gelu", ONE_LAYER),
    "model.ffn_width": Knob(step, 20, ONE_LAYER),
    "model.tied_embeddings": Knob(step, True, ONE_LAYER),
    "model.head_bias": Knob(step, True, ONE_LAYER),
    "model.dtype": Knob(step, "bfloat16"),
    "model.state_dtype": Knob(sampler, "bfloat16"),
    "model.remat": Knob(step, "full"),
    "model.scan": Knob(step, False, {"model.layout": "GG"}),
    "model.implementation": Knob(step, "reference"),
    "model.loss_chunk": Knob(step, 16, ONE_LAYER),
    "model.z_loss": Knob(step, 1e-4, ONE_LAYER),
    "data.source": Knob(data, "recall", {**RECALL, "data.source": "topics"}),
    "data.path": Knob(data, "others"),
    "data.checksum": Knob(data, "0" * 64, {"data.path": "one.txt"}),
    "data.glob": Knob(data, "*.txt"),
    "data.mixture": Knob(data, ("text:texts", "text:one.txt"), MIXED),
    "data.weights": Knob(data, (1.0, 3.0), MIXED),
    "data.tokenizer": Knob(data, "bytes"),
    "data.eos": Knob(data, "<stop>", WORDS),
    "data.seq_len": Knob(data, 13),
    "data.packing": Knob(data, "best_fit"),
    "data.heldout": Knob(data, 0.6),
    "data.workers": Knob(threads, 3),
    "data.num_pairs": Knob(data, 5, RECALL),  # with data.seq_len
    "data.num_keys": Knob(data, 10, RECALL),
    "data.num_values": Knob(data, 6, RECALL),
    "data.train_sequences": Knob(data, 21, RECALL),
    "data.heldout_sequences": Knob(data, 21, RECALL),
    "optimizer.learning_rate": Knob(step, 1e-3, ONE_LAYER),
    "optimizer.schedule": Knob(step, "constant", ONE_LAYER),
    "optimizer.warmup_steps": Knob(step, 2, ONE_LAYER),
    "optimizer.decay_steps": Knob(step, 3, WSD),
    "optimizer.final_fraction": Knob(step, 0.2, ONE_LAYER),
    "optimizer.b1": Knob(step, 0.8, ONE_LAYER),
    "optimizer.b2": Knob(step, 0.999, ONE_LAYER),
    "optimizer.eps": Knob(step, 1e-6, ONE_LAYER),
    "optimizer.weight_decay": Knob(step, 0.1, ONE_LAYER),
    "optimizer.decay": Knob(step, ("kernel", "embedding"), DECAY),
    "optimizer.clip_norm": Knob(step, 0.0, ONE_LAYER),
    "train.steps": Knob(step, 7, ONE_LAYER),
    "train.batch_size": Knob(data, 4),
    "train.microbatches": Knob(step, 2, ONE_LAYER),
    "train.grace_seconds": Knob(seconds, 21),
    "train.stall_seconds": Knob(seconds, 601),
    "train.start_seconds": Knob(seconds, 3601),
}
TOGETHER = {"data.num_pairs": {"data.seq_len": 10}}  # what has to change too for the config to be legal


@pytest.mark.parametrize("key", KNOBS)
def test_knob(key, texts):
    knob = KNOBS[key]
    after = knob.given | {key: knob.value} | TOGETHER.get(key, {})
    same = unchanged(knob.observe, config_of(knob.given, texts), config_of(after, texts))
    assert not same, f"{key}={knob.value!r} changes nothing of {knob.observe.__name__}"


def test_every_key_is_tried():
    missing = KEYS.keys() - KNOBS.keys() - LOOP.keys()
    assert not missing, f"give {sorted(missing)} a row in KNOBS or, if only the training loop reads it, in LOOP"
    assert not (KNOBS.keys() | LOOP.keys()) - KEYS.keys()


def test_choices_are_what_the_code_has():
    tables = {
        "model.norm": NORMS, "model.ffn": FFNS, "model.remat": REMAT_POLICIES, "model.implementation": NAMES,
        "data.source": [*SOURCES, "corpus", "mixture", "recall"], "data.packing": PACKINGS,
        "optimizer.schedule": optimizer.SCHEDULES,
    }  # fmt: skip
    for key, table in tables.items():
        assert set(CHOICES[key]) == set(table), key
    assert {*together.MIXED_SOURCES} == {*SOURCES, "corpus"} and {*together.TOKENIZERS} == {"auto", *TOKENIZERS}


# ------------------------------------------------------------------------------------------------ fields of the legend

MODULES = MIXERS | FFNS
SMALL_FIELDS = {"mamba2": dict(ssm_head_dim=4)}  # what a mixer needs in models as small as these
FIELDS: dict[str, Knob] = {
    "heads": Knob(step, 4),
    "kv_heads": Knob(step, 1),
    "head_dim": Knob(step, 6),
    "value_dim": Knob(step, 6),
    "window": Knob(step, 5),
    "position": Knob(step, "none"),
    "rope_theta": Knob(step, 500.0),
    "rope_fraction": Knob(step, 0.5),
    "qk_norm": Knob(step, True),
    "norm_eps": Knob(step, 1e-5, {"qk_norm": True}),
    "gated": Knob(step, True),
    "gate_bias": Knob(init, -2.0),
    "conv_width": Knob(step, 3),
    "chunk_size": Knob(step, 4),
    "key_heads": Knob(step, 1),
    "gate_rank": Knob(step, 3),
    "negative_eigenvalues": Knob(step, True),
    "inner": Knob(step, 12),
    "ssm_head_dim": Knob(step, 2),
    "state_dim": Knob(step, 3),
    "groups": Knob(step, 2),
    "step_limit": Knob(step, 0.05),
    "step_rank": Knob(step, 3),
    "ffn_width": Knob(step, 20),
    "dtype": Knob(step, "bfloat16"),
    "state_dtype": Knob(sampler, "bfloat16"),
    "implementation": Knob(step, "reference"),
}


def fields_of(name: str) -> list[str]:
    """The fields that a legend entry may set; `width` is the model's alone."""
    return [f.name for f in dataclasses.fields(MODULES[name]) if f.name not in ("parent", "name", "width")]


def declared_fields() -> list[tuple[str, str]]:
    """Every field of every mixer and FFN; one that several inherit, for the first of them."""
    found: dict[tuple[type, str], tuple[str, str]] = {}
    for name, module in MODULES.items():
        for field in fields_of(name):
            owner = next(base for base in module.__mro__ if field in inspect.get_annotations(base))
            found.setdefault((owner, field), (name, field))
    return list(found.values())


@pytest.mark.parametrize(("name", "field"), declared_fields())
def test_legend_field(name, field, texts):
    assert field in FIELDS, f"give {field}, a field of {name}, a row in FIELDS"
    knob = FIELDS[field]
    half = dict(mixer=name, ffn=None) if name in MIXERS else dict(mixer=None, ffn=name)
    half |= SMALL_FIELDS.get(name, {})
    entry = half | {key: knob.given[key] for key in knob.given if key in fields_of(name)}

    def config(entry):
        return config_of({"model.layout": "X", "model.legend": {"X": entry}, "eval.sample_tokens": 2}, texts)

    default = MODULES[name].__dataclass_fields__[field].default
    value = not default if isinstance(default, bool) else knob.value
    same = unchanged(knob.observe, config(entry), config(entry | {field: value}))
    assert not same, f"{field}={value!r} of {name} changes nothing of {knob.observe.__name__}"


# ------------------------------------------------------------------------------------------------ the training loop


class Run(NamedTuple):
    workdir: Path
    settings: dict[str, Any]
    texts: Path

    def steps(self, split: str) -> list[int]:
        return [record["step"] for record in read_records(self.workdir, split)]

    def last(self, split: str, name: str, step: int) -> Any:
        """What was recorded last at a step."""
        return [record[name] for record in read_records(self.workdir, split) if record["step"] == step][-1]

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name) for path in (self.workdir / "checkpoints").iterdir())

    def verified(self) -> bool:
        return all((self.workdir / "checkpoints" / str(step) / VERIFIED).exists() for step in self.checkpoints())

    def least_heldout(self, count: int) -> list[int]:
        """The steps of the least held-out losses."""
        losses = {step: self.last("heldout", "loss", step) for step in self.steps("heldout")}
        return sorted(sorted(losses, key=losses.__getitem__)[:count])

    def sampled(self) -> int:
        """Letters of the last sample, one a token, that follow the prompt."""
        text = self.last("text", "text", 6).replace("<unk>", "?")
        return len(text) - len(self.settings["eval.prompt"])


class Runs(NamedTuple):
    first: Run
    other: Run  # another look at the same training
    again: Run  # the first one's end, looked at once more
    best: Run  # the checkpoints of least held-out loss
    taken_up: Run  # its parameters are the first one's last

    def must_resume(self) -> bool:
        """Whether a run that must go on refuses to start anew."""
        settings = {**self.first.settings, "train.resume": "must"}
        try:
            loop.train(from_json(config_of(settings, self.first.texts)), self.first.workdir.parent / "empty")
        except (ConfigError, CheckpointError) as error:
            return "no checkpoint" in str(error)
        return False


@pytest.fixture(scope="module")
def runs(texts, tmp_path_factory) -> Runs:
    first = {
        "model.layout": "-", "train.log_every": 1, "train.checkpoint_every": 2, "train.keep": 2, "eval.every": 1,
        "eval.batches": 1, "eval.final": True, "eval.prompt": "ab", "eval.sample_tokens": 9, "eval.temperature": 1.0,
    }  # fmt: skip
    other = {
        "train.log_every": 4, "train.checkpoint_every": 1, "train.keep": 3, "train.keep_every": 2, "eval.every": 2,
        "eval.batches": 3, "eval.prompt": "the", "eval.sample_tokens": 7, "train.verify": False,
    }  # fmt: skip
    root = tmp_path_factory.mktemp("runs")
    changes = {
        "first": {},
        "other": other,
        "again": {"eval.final": False, "eval.temperature": 0.0},
        "best": {"train.checkpoint_every": 1, "train.keep": 1, "train.keep_best": 3, "eval.every": 0},
        "taken_up": {"train.init_from": str(root / "first"), "eval.every": 0, "eval.sample_tokens": 0},
    }
    made = {}
    for name, changed in changes.items():
        if name == "again":
            shutil.copytree(root / "first", root / name)
        loop.train(from_json(config_of(first | changed, texts)), root / name)
        made[name] = Run(root / name, first | changed, texts)
    return Runs(**made)


# Each knob's own trace in what the runs leave: with any other knob dead it would still be told.
LOOP: dict[str, Callable[[Runs], bool]] = {
    "train.log_every": lambda runs: (
        runs.first.steps("train") == [1, 2, 3, 4, 5, 6] and runs.other.steps("train") == [1, 4, 6]
    ),
    "train.init_from": lambda runs: runs.taken_up.last("train", "loss", 1) < runs.first.last("train", "loss", 1) - 0.05,
    "train.resume": lambda runs: runs.must_resume(),
    "train.checkpoint_every": lambda runs: runs.first.checkpoints()[-2:] == [4, 6] and 5 in runs.other.checkpoints(),
    "train.keep": lambda runs: len(runs.first.checkpoints()) == 2 and len(runs.best.checkpoints()) == 3,
    "train.keep_every": lambda runs: 2 in runs.other.checkpoints() and 3 not in runs.other.checkpoints(),
    "train.keep_best": lambda runs: (
        runs.best.checkpoints() == runs.best.least_heldout(3) and runs.best.steps("heldout") == [1, 2, 3, 4, 5, 6]
    ),
    "train.verify": lambda runs: runs.first.verified() and not runs.other.verified(),
    "eval.every": lambda runs: (
        runs.first.steps("heldout") == [1, 2, 3, 4, 5, 6] and runs.other.steps("heldout") == [2, 4, 6]
    ),
    "eval.batches": lambda runs: runs.first.last("heldout", "loss", 2) != runs.other.last("heldout", "loss", 2),
    "eval.final": lambda runs: runs.first.last("heldout", "loss", 6) != runs.again.last("heldout", "loss", 6),
    "eval.prompt": lambda runs: (
        runs.first.last("text", "text", 6)[:2] == "ab" and runs.other.last("text", "text", 6)[:3] == "the"
    ),
    "eval.sample_tokens": lambda runs: runs.first.sampled() == 9 and runs.other.sampled() == 7,
    "eval.temperature": lambda runs: runs.first.last("text", "text", 6) != runs.again.last("text", "text", 6),
}


@pytest.mark.parametrize("key", LOOP)
def test_loop_knob(key, runs):
    assert LOOP[key](runs), f"{key} changes nothing of what a run leaves"


def test_looking_at_a_run_does_not_change_it(runs):
    first, other = runs.first, runs.other
    for step in other.steps("train"):
        assert first.last("train", "loss", step) == other.last("train", "loss", step)
