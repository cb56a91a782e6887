"""Random overrides for every key of a config: what a person may mean, what none can mean, and what only looks right."""

import dataclasses

from hypothesis import strategies as st

from hyjax.config import CHOICES
from hyjax.config.defaults import ABOVE_ZERO, ONE_UP, RANGES
from hyjax.config.schema import KEYS
from hyjax.layout import DEFAULT_LETTERS
from hyjax.models.ffn import FFNS, MLP
from hyjax.models.mixers import MIXERS

# Every shipped config, with arguments that are right, wrong and out of range.
SOUND_SPECS = st.sampled_from(
    [
        "quickstart.py", "small.py", "recall.py", "recall.py:pairs=4", "recall.py:pairs=3,layout=GA",
        "recall.py:pairs=64,layout=GGGG", "time_machine.py", "time_machine.py:layout=AG",
    ]
)  # fmt: skip
STRANGE_SPECS = st.sampled_from(
    [
        "recall.py:pairs=0", "recall.py:pairs=-2", "recall.py:pairs=1e3", "recall.py:pairs=65", "recall.py:pairs=",
        "recall.py:pears=3", "recall.py:layout=G(", "recall.py:pairs=999999999999", "recall.py:pairs=3,pairs=3",
        "time_machine.py:layout=", "time_machine.py:layout", "time_machine.py:layout=QQ", "quickstart.py:tiny",
        "smal.py", "small",
    ]
)  # fmt: skip


def weighted(*pairs: tuple[int, st.SearchStrategy]) -> st.SearchStrategy:
    """One of the strategies, each so often as its number says."""
    return st.sampled_from([strategy for count, strategy in pairs for _ in range(count)]).flatmap(lambda chosen: chosen)


SPECS = weighted((4, SOUND_SPECS), (1, STRANGE_SPECS))

# ------------------------------------------------------------------------------------------------ values

LAYOUTS = ["G", "A", "GA", "GGAG", "(GA)*2", "W-", "G*3 A", "-", "(GGAG)*2", "AW G"]
UNBUILDABLE = ["M", "GDA", "E", "GxA", "", "GG(", "A*0", "G A*3*2", "(", "G" * 12_000, "A*99999999999", "é", "\n", "g"]
WORDS = [
    "", " ", "nan", "inf", "-inf", "None", "none", "null", "True", "false", "yes", "0", "1", "-1", "+1", "007", "0x10",
    "1e3", "1e-3", "2.5", "100.0", "1_000", "1e400", "1e-400", "1e38", "1e39", "1e-39", "-0.0", ".", "1j", "1+1",
    str(2**31 - 1), str(2**31), str(2**32 - 1), str(2**32), str(10**30), "9" * 400, "-" + "9" * 400, "9" * 5000,
    "()", "(1,2)", "(1,)", "[1, 2]", "('a',)", "('a','a')", "((1,2),3)", "[[[[1]]]]", "(1,", "{}", "{1: 2}", "{1,2}",
    "'quoted'", '"quoted"', "'", '"', "\\", "b'x'", "...", "f(x)", "lambda: 0", "__import__('os')", "a b", "a,b", "=",
    "--config.seed=3", "-x", "\x00", "\n", "\t", "é", "日本", "１２", "\U0001f600", "\udc80", "(" * 300, "A" * 500,
    "float32", "bfloat16", "float64", "rmsnorm", "rmsnom", "wsd", "text", "recall", "mixture", "corpus", "bytes",
    "tokenizer.json", "kernel", "embedding", "head/kernel", "pallas", "reference", "learned", "rope", "must",
]  # fmt: skip
ANYTHING = st.one_of(
    st.sampled_from(WORDS),
    st.integers(-5, 3000).map(str),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=12),
)

# What a person may mean, of a size that a test can trace. Keys that are not here: see `sound`.
SOUND: dict[str, st.SearchStrategy[str]] = {
    "seed": st.sampled_from(["0", "7", str(2**32 - 1)]),
    "model.layout": st.sampled_from(LAYOUTS),
    "model.vocab_size": st.sampled_from(["257", "28", "32"]),
    "model.streams": st.sampled_from(["()", "(64,33)", "[64, 33]", "257", "(9,)"]),
    "model.width": st.sampled_from(["8", "12", "32", "33", "64"]),
    "model.heads": st.sampled_from(["1", "2", "3", "4", "8"]),
    "model.kv_heads": st.sampled_from(["0", "1", "2", "3"]),
    "model.head_dim": st.sampled_from(["0", "1", "2", "7", "8"]),
    "model.window": st.sampled_from(["1", "2", "7", "100", str(2**31 - 1)]),
    "model.max_positions": st.sampled_from(["64", "128", "256", "1000"]),
    "model.rope_theta": st.sampled_from(["1", "500.0", "1e6", "10000000000"]),
    "model.rope_fraction": st.sampled_from(["1", "0.5", "0.01"]),
    "model.norm_eps": st.sampled_from(["1e-5", "1"]),
    "model.ffn_width": st.sampled_from(["0", "1", "20"]),
    "model.loss_chunk": st.sampled_from(["0", "1", "100", str(2**31 - 1)]),
    "model.z_loss": st.sampled_from(["0", "1e-4", "1.5"]),
    "data.path": st.sampled_from(["TEXT", "FOLDER", "CORPUS", "/no/where", "~nobody/where", "/" + "x" * 300]),
    "data.checksum": st.sampled_from(["", "a" * 40, "b" * 64]),
    "data.glob": st.sampled_from(["*", "*.txt", "**/*", "**", "***", "[", "..", "../*", ".", "/x", "nothing*"]),
    "data.mixture": st.sampled_from(
        ["()", "('topics','text:TEXT')", "('topics','stdlib')", "topics", "('topics','tpics')", "('text:','topics')"]
    ),
    "data.weights": st.sampled_from(["()", "(0.5,0.5)", "[1, 3]", "(1,)", "1", "(1,1e-30)", "(1e38,3e38)"]),
    "data.tokenizer": st.sampled_from(["auto", "bytes", "letters", "/no/where.json", "CORPUS/corpus.json"]),
    "data.eos": st.sampled_from(["", "</s>"]),
    "data.seq_len": st.sampled_from(["1", "2", "8", "31", "64"]),
    "data.heldout": st.sampled_from(["0.1", "0.5", "0.9", "1e-9"]),
    "data.workers": st.sampled_from(["0", "1", "2", str(2**31 - 1)]),
    "data.num_pairs": st.sampled_from(["1", "4", "32"]),
    "data.num_keys": st.sampled_from(["4", "64", "100"]),
    "data.num_values": st.sampled_from(["1", "32"]),
    "data.train_sequences": st.sampled_from(["1", "20", "8192"]),
    "data.heldout_sequences": st.sampled_from(["1", "20"]),
    "optimizer.warmup_steps": st.sampled_from(["0", "1", "5"]),
    "optimizer.decay_steps": st.sampled_from(["0", "1", "5"]),
    "optimizer.decay": st.sampled_from(["()", "kernel", "('kernel','embedding')", "('head/kernel',)", "kernal"]),
    "train.steps": st.sampled_from(["1", "2", "350", str(2**31 - 1)]),
    "train.batch_size": st.sampled_from(["1", "3", "8", "16"]),
    "train.microbatches": st.sampled_from(["1", "2", "3"]),
    "train.init_from": st.sampled_from(["", "nowhere"]),
    "eval.prompt": st.sampled_from(["", "The ", "ünï\U0001f600", "\n", " ", "\x00", "a" * 300]) | st.text(max_size=9),
    "eval.batches": st.sampled_from(["1", "8", str(2**31 - 1)]),
    "eval.sample_tokens": st.sampled_from(["0", "1", "20", "200", str(2**31 - 1)]),
    "eval.temperature": st.sampled_from(["0", "1", "1e-30"]),
}
BY_TYPE = {
    bool: ["true", "false", "True", "False"],
    int: ["1", "2", "20", "0", str(2**31 - 1)],
    float: ["0.5", "1", "1e-3", "0", "0.99999999", "1e-38"],
}


def sound(key: str) -> st.SearchStrategy[str]:
    """Texts that `key` may well take."""
    if key in CHOICES:
        return st.sampled_from(CHOICES[key])
    if key in SOUND:
        return SOUND[key]
    kind = type(KEYS[key])
    _, holds = RANGES.get(key, ONE_UP if kind is int else ABOVE_ZERO)
    return st.sampled_from([text for text in BY_TYPE[kind] if kind is bool or holds(float(text))])


# ------------------------------------------------------------------------------------------------ keys

SCALARS = sorted(key for key in KEYS if key != "model.legend")
MODULES = MIXERS | FFNS
FIELDS = sorted({f.name for module in MODULES.values() for f in dataclasses.fields(module)} | {"mixer", "ffn"})
STRANGE_FIELDS = ["kv_head", "layout", "legend", "__class__", "ffn.x", "", "X", "parent", "name", "window", "streams"]
FIELD_VALUES = {
    "mixer": st.sampled_from([*MIXERS, "None", "none", "mamba2", "atention", "('attention','gla')", "", "3"]),
    "ffn": st.sampled_from([*FFNS, "None", "moe", "default", "('gelu',)", "", "3"]),
    "gate_bias": st.sampled_from(["-4.5", "0", "1", "100.0"]),
    "chunk_size": st.sampled_from(["0", "1", "7", "64", "-1", str(2**31 - 1)]),
    "conv_width": st.sampled_from(["0", "1", "4", "-1", "40", "129"]),
    "value_dim": st.sampled_from(["0", "1", "7", "-3"]),
    "gated": st.sampled_from(["true", "false", "1"]),
}
LETTERS = [*"GAW-", *DEFAULT_LETTERS, "x", "AB", "*", "é", "", "_"]


def misspelled(key: str) -> st.SearchStrategy[str]:
    """The key with a letter lost, doubled or moved, in another section, or with something at its end."""
    i, last = len(key) // 2, key.rpartition(".")[2]
    lost, doubled = key[:i] + key[i + 1 :], key[:i] + key[i - 1 :]
    return st.sampled_from([lost, doubled, key.upper(), last, f"train.{last}", f"{key}.x", f"{key}s", f".{key}"])


@st.composite
def field(draw, letters: list[str], fields: list[str], wild: bool) -> str:
    """`--config.model.legend.LETTER.FIELD=VALUE`"""
    name = draw(st.sampled_from(fields))
    known = sound(f"model.{name}") if f"model.{name}" in SCALARS else FIELD_VALUES.get(name, ANYTHING)
    text = draw(ANYTHING if wild else known)
    return f"--config.model.legend.{draw(st.sampled_from(letters))}.{name}={text}"


def fields_of(letter: str) -> list[str]:
    """What the letter's own mixer and the FFNs have."""
    mixer, _ = DEFAULT_LETTERS[letter]
    modules = [MLP] if mixer is None else [MLP, MIXERS[mixer]]
    names = {f.name for module in modules for f in dataclasses.fields(module)}
    return sorted(names - {"parent", "name", "width"} | {"mixer", "ffn"})


SPACE = "\x1f"  # where one override is two words


def written(key: str, values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """`--config.KEY=VALUE`, and now and then `--config.KEY VALUE`."""
    return st.builds("--config.{}{}{}".format, st.just(key), st.sampled_from(f"====={SPACE}"), values)


def words(overrides: list[str]) -> list[str]:
    """What stands on the command line."""
    return [word for override in overrides for word in override.split(SPACE)]


SOUND_OVERRIDE = st.one_of(
    st.sampled_from(SCALARS).flatmap(lambda key: written(key, sound(key))),
    st.sampled_from("GAW-").flatmap(lambda letter: field([letter], fields_of(letter), wild=False)),
)
WILD_OVERRIDE = st.one_of(
    st.sampled_from(SCALARS).flatmap(lambda key: written(key, ANYTHING)),
    st.sampled_from(SCALARS).flatmap(lambda key: written(key, ANYTHING)),
    st.sampled_from(SCALARS).flatmap(lambda key: misspelled(key).flatmap(lambda name: written(name, sound(key)))),
    st.sampled_from(UNBUILDABLE).map("--config.model.layout={}".format),
    st.sampled_from(["model", "data", "train", "model.legend", "model.legend.A", "optimizer.", ""]).flatmap(
        lambda name: written(name, ANYTHING)
    ),
    field(LETTERS, FIELDS, wild=True),
    field(LETTERS, FIELDS + STRANGE_FIELDS, wild=False),
    st.sampled_from(SCALARS).map("--config.{}".format),
    st.sampled_from(SCALARS).map("--noconfig.{}".format),
    st.builds("--config.{}={}".format, ANYTHING, ANYTHING),
    ANYTHING,
)
# Keys that only go together. TEXT, FOLDER and CORPUS stand for paths that are there.
NO_PATH = ["data.path=", "data.checksum="]
TOGETHER = [
    ["data.source=text", "data.path=TEXT", "data.checksum="],
    ["data.source=text", "data.path=FOLDER", "data.checksum=", "data.heldout=0.5"],
    ["data.source=text", "data.path=TEXT", "data.checksum=", "data.tokenizer=letters", "model.vocab_size=28"],
    ["data.source=corpus", "data.path=CORPUS", "data.checksum="],
    ["data.source=mixture", "data.mixture=('topics','text:TEXT')", "data.weights=(1,3)", *NO_PATH],
    ["data.source=mixture", "data.mixture=('stdlib','corpus:CORPUS')", "data.weights=(0.5,1e-3)", *NO_PATH],
    ["data.num_pairs=4", "data.seq_len=8"],
    ["model.streams=(9,33)", "data.num_keys=9", "data.num_pairs=1", "data.seq_len=2"],
    ["model.streams=()", "model.tied_embeddings=true"],
    ["model.layout=GH", "model.legend.H.mixer=window_attention", "model.legend.H.window=3"],
    ["optimizer.schedule=wsd", "optimizer.warmup_steps=2", "train.steps=5"],
    ["train.batch_size=8", "train.microbatches=2"],
    ["model.width=32", "model.heads=4"],
]
LINKED = st.sampled_from(TOGETHER).map(lambda pairs: [f"--config.{pair}" for pair in pairs])
# The seed experiment's text is no part of the repository: its config needs another to get past the first check.
STARTS = weighted((1, st.just([])), (1, LINKED))


def several(override: st.SearchStrategy[str], most: int = 6) -> st.SearchStrategy[list[str]]:
    return st.builds(list.__add__, STARTS, st.lists(override, min_size=1, max_size=most))


# One to six beside what goes together; three in eight are sound, each by itself: many get past the first check.
SOUND_FEW, SOUND_MANY = several(SOUND_OVERRIDE, 2), several(SOUND_OVERRIDE)
MIXED = several(weighted((2, SOUND_OVERRIDE), (1, WILD_OVERRIDE)))
SEVERAL = weighted(
    (2, SOUND_FEW), (1, SOUND_MANY), (2, several(WILD_OVERRIDE, 1)), (2, MIXED), (1, several(WILD_OVERRIDE))
)
