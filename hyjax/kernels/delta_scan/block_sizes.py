"""Tables for delta_scan: which form the XLA implementation takes, and how many tokens make a chunk."""

# Tokens a chunk, by backend and kind of gate.
CHUNK = {
    "cpu": {"head": 32, "channel": 32},
    "gpu": {"head": 64, "channel": 64},
    "tpu": {"head": 64, "channel": 64},
}

# The walk over single tokens (xla_steps.py) serves where K * V is at most the first number and batch * heads at least
# the second, so that a SIMD lane is one row and the states stay in the cache. An accelerator wants matrix products.
STEPS = {"cpu": (128, 16), "gpu": (0, 0), "tpu": (0, 0)}

# Tokens between two states that the walk saves; the backward pass holds the states of that many tokens at once.
STEPS_SAVED = 16

# Numbers in the largest array of a piece of chunks, walked one piece after the other: a CPU pays more for fresh memory
# than for arithmetic. Accelerators take all chunks at once.
PIECE = {"cpu": 1 << 17, "gpu": 1 << 62, "tpu": 1 << 62}
