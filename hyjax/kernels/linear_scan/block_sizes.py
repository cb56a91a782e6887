"""Tables for linear_scan: which form the XLA implementation takes, and how many tokens make a chunk."""

# Tokens a chunk, by backend and kind of gate. On two CPU cores, with one gate a head, 16, 32 and 64 tokens are within
# 20 % of each other for head dims of 32 to 64; with one a channel 16 is fastest.
CHUNK = {
    "cpu": {"head": 32, "channel": 16},
    "gpu": {"head": 64, "channel": 64},
    "tpu": {"head": 128, "channel": 64},
}

# The walk over single tokens (xla_steps.py) serves where K * V is at most the first number and batch * heads at least
# the second, so that a SIMD lane is one row and the states stay in the cache. An accelerator wants matrix products.
STEPS = {"cpu": (256, 16), "gpu": (0, 0), "tpu": (0, 0)}

# Tokens between two states that the walk saves; the backward pass holds the states of that many tokens at once.
STEPS_SAVED = 16

# Numbers in the largest array of a piece of chunks, walked one piece after the other: a CPU pays more for fresh memory
# than for arithmetic. Accelerators take all chunks at once.
PIECE = {"cpu": 1 << 17, "gpu": 1 << 62, "tpu": 1 << 62}

# By device kind and kind of gate: (tokens a grid step, between which states are saved; value heads a grid step), by
# the static schedules that the compiler makes (tests/kernels/test_linear_scan_tpu.py). None was measured on a TPU.
PALLAS_TPU = {
    "other": {"head": (256, 4), "channel": (256, 2)},
}

# Of the Mosaic GPU kernels (Hopper): chunks of inputs in shared memory at once. Of 227 KiB, K = V = 128 takes 155 with
# two stages. Not measured on a device.
PALLAS_GPU = {"stages": 2}
