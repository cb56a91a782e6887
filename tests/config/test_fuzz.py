"""Random overrides: each gives a run, or one clear sentence that names the key; none a traceback or another type.

Three depths. Every config is loaded and its model built. Those that are small enough go through all that a run does
before its first step, with the step, evaluation and sampling as traced programs. A few are trained. The default run
tries a few hundred; `pytest -m slow tests/config/test_fuzz.py` ten thousand, in half an hour of one core.
"""

import ast
import functools
import re
import traceback
import types
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings

from hyjax import config as configs
from hyjax.config import ConfigError
from hyjax.config.defaults import ELEMENTS
from hyjax.config.errors import clip, show
from hyjax.config.schema import KEYS, flatten
from hyjax.cost import count_params
from hyjax.data import sources
from hyjax.data.tokenize import tokenize
from hyjax.generate import make_sampler, prompt_ids
from hyjax.models import HybridLM
from hyjax.train import loop, optimizer, setup
from hyjax.train.step import create_state, make_eval_step, make_train_step
from tests.config import random_overrides as random

CONFIGS = Path(__file__).parent.parent.parent / "configs"
WORDS = ["the", "of", "and", "time", "was", "a", "traveller", "machine", "Filby", "laboratory"]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Where the texts are that TEXT, FOLDER and CORPUS stand for."""
    root = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    (root / "folder").mkdir()
    for name in ("one.txt", "folder/a.txt", "folder/b.txt", "folder/c.md"):
        (root / name).write_text("\n\n".join(" ".join(rng.choice(WORDS, 200)) for _ in range(20)))
    for i in range(20):
        (root / "folder" / f"{i}.py").write_text(" ".join(rng.choice(WORDS, 40)))
    tokenize([str(root / "folder")], root / "corpus")
    return {"TEXT": str(root / "one.txt"), "FOLDER": str(root / "folder"), "CORPUS": str(root / "corpus")}


@pytest.fixture(scope="module", autouse=True)
def quick_data(places):
    """The standard library is a folder of 20 files, and data that was built is kept: most examples have the same."""

    @functools.lru_cache(maxsize=64)
    def built(section: str, batch_size: int, seed: int) -> Any:
        return build(configs.from_json(section)["data"], batch_size=batch_size, seed=seed)

    def build_once(section, *, batch_size, seed):
        whole = configs.check({"data": section, "model": {"max_positions": 2**31 - 1}})
        return built(configs.to_json(whole), batch_size, seed)

    build = setup.build
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "sysconfig", types.SimpleNamespace(get_path=lambda name: places["FOLDER"]))
        patch.setattr(setup, "build", build_once)
        yield


# ------------------------------------------------------------------------------------------------ what must hold


def sentence(error: ValueError, spec: str, words: list[str]) -> None:
    """One line, not too long, that names the key (one of the config's, or what the command line calls one)."""
    text = str(error)
    assert text.strip() and "\n" not in text and len(text) < 700, text
    keys, _, values = zip(*(re.sub(r"^--?(no)?config\.", "", word).partition("=") for word in words), strict=True)
    paths = [Path(value).name for value in values if "/" in value]  # what can't be read is named, not who names it
    others = [spec.split(":")[0], "config argument", "implementation="]  # an operator knows no config
    names = [*KEYS, *keys, *map(clip, keys), *map(show, words), *paths, *others]
    assert any(name in text for name in names if name), text


def read_as(key: str, text: str) -> Any:
    """What a person means by `text` as the value of `key`, by Python's own rules."""
    kind = type(KEYS[key])
    if kind is str:
        return text
    word = text.strip()
    if kind is bool:
        return {"true": True, "True": True, "false": False, "False": False}[word]
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError):
        value = text
    if kind is tuple:
        return tuple(value) if isinstance(value, tuple | list) else (value,)
    return value


def given_texts(overrides: list[str]) -> dict[str, str]:
    """Key -> the text that counts, the last one; without keys whose text is the next word, whatever that is."""
    form = re.compile(rf"--?(?:no)?config\.([^={random.SPACE}]+)(?:[={random.SPACE}](.*))?", re.DOTALL)
    pairs = [form.fullmatch(override) for override in overrides]
    found = {pair[1]: pair[2] for pair in pairs if pair}
    bare = {pair[1] for pair in pairs if pair and pair[2] is None}
    return {key: text for key, text in found.items() if key in KEYS and key not in bare}


def check_types(config: Any, overrides: list[str]) -> None:
    """Every value has the type of its default, and is the one that was asked for last."""
    whole = configs.check(config)
    flat = flatten({**whole, "model": {**whole["model"], "legend": {}}})
    assert flat.keys() == KEYS.keys()
    for key, value in flat.items():
        assert type(value) is type(KEYS[key]), (key, value)
        assert type(value) is not tuple or all(type(element) is ELEMENTS[key] for element in value), (key, value)
    for key, text in given_texts(overrides).items():
        assert flat[key] == read_as(key, text), (key, text, flat[key])
    assert configs.check(configs.from_json(configs.to_json(config))) == whole


def load(spec: str, overrides: list[str]) -> Any:
    """The config if it is one, whose model could be built; None after a good sentence."""
    words = random.words(overrides)
    try:
        config = configs.load(str(CONFIGS / spec), words)
        HybridLM(config.model)
    except ValueError as error:
        sentence(error, spec, words)
        return None
    check_types(config, overrides)
    return config


def small(config: Any) -> bool:
    """Whether a test can hold its data and trace its step."""
    data = config.data
    made = max(data.train_sequences, data.heldout_sequences) if data.source == "recall" else 0
    if max(config.train.batch_size, made) * data.seq_len > 2**21 or data.seq_len > 1024:
        return False
    if len(HybridLM(config.model).letters) > 24:
        return False
    try:
        return count_params(config.model)["total"] < 2**23
    except ValueError:  # what no operator can serve; the rehearsal must refuse it with a sentence
        return True


@functools.lru_cache(maxsize=16)
def model_of(section: str) -> HybridLM:
    """The model, each of whose functions is traced once for all the examples that don't change it."""
    model = HybridLM(configs.from_json(section).model)
    for name in ("init", "loss", "apply"):
        setattr(model, name, jax.jit(getattr(model, name)))
    return model


def rehearse(config: Any) -> None:
    """All that comes before the first step of a run, and the step, evaluation and sampling as traced programs."""
    model = model_of(configs.to_json({"model": config.model, "data": {"seq_len": 1}}))
    data = setup.build_data(config, model)
    setup.data_mesh(config.train.batch_size, config.train.microbatches)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(model.init, key, data.train.batch(0)["tokens"][:1])["params"]
    with setup.as_config_errors():
        schedule = optimizer.schedule(config.optimizer, config.train.steps)
        update = optimizer.build(config.optimizer, config.train.steps, params)
    state = jax.eval_shape(lambda params, key: create_state(params, update, key), params, key)
    step = make_train_step(model, update, schedule, config.train.microbatches)
    after, metrics = jax.eval_shape(step, state, data.train.batch(config.train.steps - 1))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(lambda a: (a.shape, a.dtype), state)
    assert all(value.shape == () for value in metrics.values())
    jax.eval_shape(make_eval_step(model), params, data.heldout.batch(data.heldout.num_batches - 1))
    if data.tokenizer and config.eval.sample_tokens:
        prompt = jax.ShapeDtypeStruct((1, len(prompt_ids(data.tokenizer, config.eval.prompt))), "int32")
        sampler = make_sampler(model, config.eval.sample_tokens, config.eval.temperature)
        assert jax.eval_shape(sampler, params, prompt, key).shape == (1, config.eval.sample_tokens)


def tried(spec: str, overrides: list[str], places: dict[str, str], deep: bool = True) -> str:
    """How far one example comes; AssertionError where what must hold doesn't, and a fault's own error."""
    overrides = [re.sub("TEXT|FOLDER|CORPUS", lambda match: places[match[0]], override) for override in overrides]
    config = load(spec, overrides)
    if config is None:
        return "refused by the config's own check"
    if not deep or not small(config):
        return "loaded"
    try:
        rehearse(config)
    except ConfigError as error:
        sentence(error, spec, [word for override in overrides for word in override.split(random.SPACE)])
        return "refused by the data, the devices or the model"
    return "rehearsed"


# ------------------------------------------------------------------------------------------------ tests

QUIET = dict(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@settings(max_examples=300, **QUIET)
@given(spec=random.SPECS, overrides=random.SEVERAL)
@example(spec="quickstart.py", overrides=["--config.model.legend.A.legend=1"])  # was a KeyError
@example(spec="quickstart.py", overrides=["--config.model.legend.x.chunk_size=7"])  # named legend.x, which is no key
def test_overrides_load_or_name_the_key(spec, overrides, places):
    tried(spec, overrides, places, deep=False)


@settings(max_examples=25, **QUIET)
@given(spec=random.SOUND_SPECS, overrides=random.SOUND_FEW)
@example(spec="recall.py:pairs=3", overrides=["--config.model.tied_embeddings=true"])  # was a KeyError in the trace
def test_what_loads_can_be_trained_or_names_the_key(spec, overrides, places):
    tried(spec, overrides, places)


@pytest.mark.slow
def test_ten_thousand(places, capsys):
    """No traceback, no changed type: all faults of ten thousand examples at once, by where they arose."""
    reached: Counter[str] = Counter()
    faults: dict[str, str] = {}

    @settings(max_examples=10_000, **QUIET)
    @given(spec=random.SPECS, overrides=random.SEVERAL)
    def try_one(spec, overrides):
        try:
            reached[tried(spec, overrides, places)] += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"{type(error).__name__} at {where.filename}:{where.lineno}"
            reached[fault] += 1
            faults.setdefault(fault, f"{spec} {overrides}: {str(error)[:500]}")
        if reached.total() % 500 == 0:
            jax.clear_caches()  # programs of thousands of models
            with capsys.disabled():
                print(f"\n{reached.total():,}: {dict(reached)} {faults}")

    try_one()
    assert not faults, "\n".join(f"{reached[fault]} {fault}: {text}" for fault, text in faults.items())
    assert reached.total() >= 10_000 and reached["rehearsed"] > 1000


# What makes a run of seconds of any config that is small; the last of several overrides counts.
SHORT = {
    "train.steps": 2, "optimizer.warmup_steps": 1, "optimizer.decay_steps": 1, "eval.batches": 1, "eval.final": False,
    "train.batch_size": 8, "train.microbatches": 1, "model.layout": "GA", "eval.sample_tokens": 3,
    "train.resume": "auto", "train.init_from": "",
}  # fmt: skip


@pytest.mark.slow
def test_a_dozen_train(places, tmp_path_factory):
    """What the tracing promises is so: two steps, an evaluation, a sample and a checkpoint."""
    reached: Counter[str] = Counter()

    @settings(max_examples=24, **QUIET)
    @given(spec=random.SOUND_SPECS, overrides=random.SOUND_MANY)
    def train_one(spec, overrides):
        overrides = overrides + [f"--config.{key}={value}" for key, value in SHORT.items()]
        how = tried(spec, overrides, places)
        reached[how] += 1
        if how == "rehearsed":
            overrides = [re.sub("TEXT|FOLDER|CORPUS", lambda match: places[match[0]], text) for text in overrides]
            config = configs.load(str(CONFIGS / spec), random.words(overrides))
            try:
                result = loop.train(config, tmp_path_factory.mktemp("run"))
                assert np.isfinite(result["heldout"]["loss"])
            except loop.NonFiniteError as error:
                reached["not finite"] += 1
                assert "is not finite; the first bad tensor is" in str(error)

    train_one()
    assert reached["rehearsed"] >= 12, reached
