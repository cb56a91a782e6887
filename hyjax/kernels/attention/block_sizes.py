"""Tables for attention: the form that the XLA implementation takes, and its blocks."""

# All logits at once up to this many (batch * query heads * Tq * Tk), or with at most so many queries (decoding). On a
# CPU fresh memory costs more than arithmetic: blocks that stay in the cache win from small sizes on.
DENSE_LOGITS = {"cpu": 1 << 18, "gpu": 1 << 26, "tpu": 1 << 26}
DENSE_QUERIES = 8

# One query at a time by products and sums over the keys as they lie in the cache, without transposing it: on a CPU 8x
# faster than the matrix product at B8 T4096 Hk4 K64, where the keys don't fit the cache.
ROW_QUERIES = {"cpu": 1, "gpu": 0, "tpu": 0}

# (most batch * query heads, queries a block, keys a block), the first row that fits. On a CPU a block of logits should
# take about a megabyte: measured at 8, 64 and 512 rows, each about twice as fast as the next size up or down.
BLOCKS = {
    "cpu": ((16, 128, 128), (128, 64, 64), (1 << 62, 32, 32)),
    "gpu": ((1 << 62, 256, 512),),
    "tpu": ((1 << 62, 512, 512),),
}
