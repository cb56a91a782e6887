"""Tables for delta_scan: which form the XLA implementation takes, and how many tokens make a chunk."""

# Tokens a chunk, by backend and kind of gate. On two CPU cores 32 and 64 tokens are within 15 % of each other for head
# dims of 32 to 128, 16 is slower (its walk is longer); with one gate a channel 32 is fastest.
CHUNK = {
    "cpu": {"head": 32, "channel": 32},
    "gpu": {"head": 64, "channel": 64},
    "tpu": {"head": 64, "channel": 64},
}

# The walk over single tokens (xla_steps.py) serves where K * V is at most the first number and batch * heads at least
# the second, so that a SIMD lane is one row and the states stay in the cache. Measured forward and backward against
# chunks: 1.5 to 3 times as fast at K = V = 8, no faster at K = V = 16. An accelerator wants matrix products.
STEPS = {"cpu": (128, 16), "gpu": (0, 0), "tpu": (0, 0)}

# Tokens between two states that the walk saves; the backward pass holds the states of that many tokens at once.
STEPS_SAVED = 16

# Numbers in the largest array of a piece of chunks, walked one piece after the other: a CPU pays more for fresh memory
# than for arithmetic (8 times as much in a piece costs half as much time again). Accelerators take all chunks at once.
PIECE = {"cpu": 1 << 16, "gpu": 1 << 62, "tpu": 1 << 62}

# By device kind and kind of gate: (tokens a chunk, value heads a grid step), by the static schedules that the compiler
# makes (tests/kernels/test_delta_scan_tpu.py). None of it was measured on a TPU.
PALLAS_TPU = {
    "other": {"head": (128, 8), "channel": (64, 8)},
}

# Of the Mosaic GPU kernels (Hopper): chunks of inputs in shared memory at once. Of 227 KiB, K = V = 128 takes 203 with
# two stages. Not measured on a device.
PALLAS_GPU = {"stages": 2}
