"""Tables for selective_scan: how many tokens are walked one after the other, and between two states that are saved."""

# Tokens a chunk; all chunks are walked side by side. None: the row is one chunk. On a CPU a token's B * D * N numbers
# and their exponentials outweigh the loop around them: at B1 T2048 D256 N16 chunks of 256 take 1.6 times as long. On an
# accelerator (not measured) chunks cut the steps from T to 2 * 256 + T / 256.
CHUNK = {"cpu": None, "gpu": 256, "tpu": 256}

# Tokens between two saved states: the forward pass saves 1 state in SAVED, and the backward pass holds SAVED states of
# each chunk at once, so that the expanded states [B, T, D, N] are never there: 1/SAVED + SAVED/T of their size is (CPU)
# or 1/SAVED + SAVED/CHUNK (accelerators).
SAVED = {"cpu": 32, "gpu": 16, "tpu": 16}

# By device kind: (channels a block, registers of states that are walked side by side, sixteens of tokens that a step of
# the loop takes). The states of 128 channels take N/8 registers. The more there is in a step, the better the compiler
# fills its bundles: on v5e, a token and 1000 channels take 36 forward and 104 backward at (4, 1), 30 and 85 at (8, 2),
# 28 and 81 at (8, 4), which compile in 1, 3 and 5 seconds. None of it was measured on a TPU.
PALLAS_TPU = {"other": (2048, 8, 4)}
