"""Every key of a config with its default, and the values that it may have. A value's type is its default's."""

from collections.abc import Callable
from typing import Any

DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "model": {
        "layout": "(GGAG)*2",
        "legend": {},  # letter -> {mixer, ffn, any field of that mixer's or FFN's module but width}
        "vocab_size": 257,  # outputs of the head, and tokens in where there is one stream
        "streams": (),  # vocabulary of each stream where tokens are [B, T, streams]; embeddings are summed
        "width": 128,
        "heads": 4,
        "kv_heads": 0,  # 0: as many as heads
        "head_dim": 0,  # 0: width // heads
        "window": 128,  # tokens that a W layer sees, the query's own included
        "position": "rope",
        "max_positions": 2048,  # rows of the learned table
        "rope_theta": 10000.0,
        "rope_fraction": 1.0,
        "qk_norm": False,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "ffn": "swiglu",
        "ffn_width": 0,  # 0: 4 * width; swiglu: 8/3 * width, rounded up to a multiple of 8
        "tied_embeddings": False,
        "head_bias": False,
        "dtype": "float32",  # of activations; parameters are always float32
        "state_dtype": "float32",
        "remat": "none",
        "scan": True,
        "implementation": "auto",  # of the layers' operators; "pallas" leaves short convolutions, which have no kernel
        "loss_chunk": 0,  # tokens whose logits exist at once; 0: as many as fit 64 MiB
        "z_loss": 0.0,
    },
    "data": {
        "source": "topics",
        "path": "",  # source="text": a file or a folder; source="corpus": the folder that `hyjax data tokenize` made
        "checksum": "",  # of that file: sha256 or sha1, in hex
        "glob": "*",  # which files of that folder
        "mixture": (),  # source="mixture": sources by name, "text:PATH" and "corpus:PATH" with where they lie
        "weights": (),  # of each source of the mixture, its share of the rows
        "tokenizer": "auto",  # auto: the corpus's own, else bytes; or a path to a JSON file of `tokenizers`
        "eos": "",  # the token of that file that ends a document; empty: one of the well-known names
        "seq_len": 256,
        "packing": "windows",
        "heldout": 0.1,  # fraction of documents, chosen by hash
        "workers": 0,  # prefetching threads; no value depends on it
        "num_pairs": 16,  # this and the rest: source="recall", whose seq_len is 2 * num_pairs
        "num_keys": 64,
        "num_values": 32,
        "train_sequences": 8192,
        "heldout_sequences": 2048,
    },
    "optimizer": {
        "learning_rate": 3e-3,
        "schedule": "cosine",
        "warmup_steps": 0,  # optimizer steps
        "decay_steps": 0,  # wsd: the last steps, in which the rate falls; 0: a fifth of all
        "final_fraction": 0.1,  # of the learning rate, at the end
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decay": ("kernel",),  # names of the leaves that are decayed
        "clip_norm": 1.0,  # 0: off
    },
    "train": {
        "steps": 1000,
        "batch_size": 16,
        "microbatches": 1,
        "log_every": 10,
        "init_from": "",  # a workdir or an export whose parameters a new run starts from
        "resume": "auto",  # auto: go on from the workdir's checkpoint, or start where there is none; must: go on
        "checkpoint_every": 200,
        "keep": 2,  # the newest
        "keep_every": 0,  # and the steps that are multiples of it; 0: none
        "keep_best": 0,  # and so many with the least held-out loss, which is then measured at every checkpoint
        "verify": True,  # read each checkpoint back and compare it before it counts
        "grace_seconds": 20,  # from SIGTERM until the process is gone, if need be without the loop's consent
        "stall_seconds": 600,  # the longest that a step, an evaluation's batch or a save may take
        "start_seconds": 3600,  # and the first step, which is compiled
    },
    "eval": {
        "every": 200,  # 0: never during training
        "batches": 8,  # of each periodic evaluation
        "final": True,  # at the end the whole held-out set; false: `batches` of it
        "prompt": "",
        "sample_tokens": 200,  # 0: no sample
        "temperature": 0.8,  # 0: the most likely token
    },
}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.position": ("rope", "learned", "none"),
    "model.norm": ("rmsnorm", "layernorm"),
    "model.ffn": ("swiglu", "gelu", "relu2"),
    "model.dtype": ("float32", "bfloat16"),
    "model.state_dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "full", "dots", "kernels"),
    "model.implementation": ("auto", "reference", "xla", "pallas", "splash", "cudnn"),
    "data.source": ("topics", "stdlib", "bible", "text", "corpus", "mixture", "recall"),
    "data.packing": ("windows", "best_fit"),
    "optimizer.schedule": ("cosine", "wsd", "constant"),
    "train.resume": ("auto", "must"),
}

# What the message says, and the test.
Range = tuple[str, Callable[[float], bool]]
ONE_UP: Range = ("at least 1", lambda x: x >= 1)
ABOVE_ZERO: Range = ("above 0", lambda x: x > 0)
_ZERO_UP: Range = ("at least 0", lambda x: x >= 0)
_BELOW_ONE: Range = ("at least 0 and below 1 in float32", lambda x: 0 <= x <= 1 - 2**-24)

# Numbers that are not listed: whole numbers are ONE_UP, others ABOVE_ZERO.
RANGES: dict[str, Range] = {
    "seed": _ZERO_UP,
    "model.kv_heads": _ZERO_UP,
    "model.head_dim": _ZERO_UP,
    "model.rope_theta": ("at least 1", lambda x: x >= 1),  # below it frequencies grow until they overflow
    "model.rope_fraction": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "model.ffn_width": _ZERO_UP,
    "model.loss_chunk": _ZERO_UP,
    "model.z_loss": _ZERO_UP,
    "data.heldout": ("above 0 and below 1", lambda x: 0 < x < 1),
    "data.workers": ("at least 0 and at most 256", lambda x: 0 <= x <= 256),
    "optimizer.warmup_steps": _ZERO_UP,
    "optimizer.decay_steps": _ZERO_UP,
    "optimizer.final_fraction": ("at least 0 and at most 1", lambda x: 0 <= x <= 1),
    "optimizer.b1": _BELOW_ONE,
    "optimizer.b2": _BELOW_ONE,
    "optimizer.weight_decay": _ZERO_UP,
    "optimizer.clip_norm": _ZERO_UP,
    "train.keep_every": _ZERO_UP,
    "train.keep_best": _ZERO_UP,
    "eval.every": _ZERO_UP,
    "eval.sample_tokens": ("at least 0 and at most 2**20", lambda x: 0 <= x <= 2**20),
    "eval.temperature": _ZERO_UP,
}

# What a tuple holds, and so what an empty one would.
ELEMENTS: dict[str, type] = {
    "model.streams": int,
    "data.mixture": str,
    "data.weights": float,
    "optimizer.decay": str,
}
