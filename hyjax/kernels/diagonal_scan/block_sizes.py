"""Tables for diagonal_scan: how many tokens are walked one after the other."""

# Tokens a chunk; all chunks are walked side by side. None: the row is one chunk. On two CPU cores that is fastest: at
# B1 T4096 D512, forward and backward, chunks of 64 or 512 tokens take twice as long, since a step of a few hundred
# numbers outweighs the loop around it. On an accelerator (not measured) chunks cut the steps from T to 2 * 64 + T / 64.
CHUNK = {"cpu": None, "gpu": 64, "tpu": 64}

# By device kind: (tokens a block, channels a block). Registers hold 8 tokens of 128 channels: eight side by side hide
# how long one waits for the one before. None of it was measured on a TPU.
PALLAS_TPU = {"other": (256, 1024)}
