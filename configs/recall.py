"""Associative recall, the seed experiment: what a fixed state forgets and one attention layer buys back.

    hyjax train --config=configs/recall.py --workdir=runs/recall
    hyjax train --config=configs/recall.py:pairs=64,layout=GGGG --workdir=runs/recall_gggg_64

A row shows `pairs` random (key, value) pairs, then every key once more, in another order; the model names its value.
The three matched stacks of the reference study are GGGG, AAAA and GGAG: width 32, 4 heads of 8, 58,544, 57,984 and
58,404 parameters. 16 epochs of 8,192 sequences (16,384 above 16 pairs) in batches of 128 are 1,024 (2,048) steps.

Expected held-out accuracy (chance 0.031) at 16 pairs, a minute on two CPU cores: AAAA 0.999, GGAG 1.000, GGGG 0.895;
at 64 pairs GGGG 0.443.
"""

from hyjax.config import base, parse_arg

EPOCHS, BATCH = 16, 128


def get_config(arg=""):
    arg = parse_arg(arg, pairs=16, layout="GGAG")
    sequences = 8192 if arg.pairs <= 16 else 16384
    steps = EPOCHS * sequences // BATCH  # 16 · 8192 / 128 = 1024
    return base(
        model=dict(
            layout=arg.layout,
            streams=(64, 33),  # keys; values and, where one is asked for, the reserved 33rd
            vocab_size=32,
            width=32,
            heads=4,
            norm="layernorm",
            ffn="gelu",
            position="learned",
            max_positions=128,
            head_bias=True,
            remat="kernels",
        ),
        data=dict(source="recall", num_pairs=arg.pairs, seq_len=2 * arg.pairs, train_sequences=sequences),
        optimizer=dict(learning_rate=3e-3, schedule="constant", b2=0.999, clip_norm=0.0),
        train=dict(steps=steps, batch_size=BATCH, log_every=64, checkpoint_every=steps),
        eval=dict(every=steps // 4, batches=16),
    )
