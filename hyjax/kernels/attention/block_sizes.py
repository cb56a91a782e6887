"""Tables for attention: the form that the XLA implementation takes, and its blocks."""

# All logits at once up to this many (batch * query heads * Tq * Tk), or with at most so many queries (decoding). On a
# CPU fresh memory costs more than arithmetic: blocks that stay in the cache win from small sizes on.
DENSE_LOGITS = {"cpu": 1 << 18, "gpu": 1 << 26, "tpu": 1 << 26}
DENSE_QUERIES = 8

# One query (decoding): products without a dim of queries, over a prefix of the keys.
ROW_QUERIES = {"cpu": 1, "gpu": 0, "tpu": 0}

# The shortest prefix, and none shorter than a quarter of all keys need be. The fastest runs at Hk2 K64 (17 MB of keys
# and values at T 16384) on two cores: 0.07 ms for up to 1,024 keys, 0.3 for 4,096, 0.5 for all; 0.5 each without
# prefixes.
ROW_PREFIX = {"cpu": 256, "gpu": 1 << 62, "tpu": 1 << 62}

# (most batch * query heads, queries a block, keys a block), the first row that fits. On a CPU a block of logits should
# take about a megabyte: measured at 8, 64 and 512 rows, each about twice as fast as the next size up or down.
BLOCKS = {
    "cpu": ((16, 128, 128), (128, 64, 64), (1 << 62, 32, 32)),
    "gpu": ((1 << 62, 256, 512),),
    "tpu": ((1 << 62, 512, 512),),
}

# By device kind: (rows of queries a block, keys a block, rows and keys of the tiles that a block is worked off in, by
# how many tiles matrix products go ahead of the softmax and behind it), by the static schedules that the compiler makes
# (tests/kernels/test_attention_tpu.py). None of it was measured on a TPU.
PALLAS_TPU = {
    "other": (1024, 1024, 256, 256, 2, 1),
    "TPU v6 lite": (1024, 1024, 256, 256, 3, 2),
    "TPU7x": (1024, 1024, 256, 256, 3, 2),
}

# By padded head dim, for the forward, dq and dkv kernels: keys (dkv: queries) a step, and steps whose copies are in
# flight. Sized to fit 227 KiB of shared memory and 240 registers a thread (tests/kernels/test_attention_gpu.py). None
# of it was measured on a GPU.
PALLAS_GPU = {
    64: ((128, 2), (128, 2), (128, 2)),
    128: ((128, 2), (64, 2), (64, 2)),
}
