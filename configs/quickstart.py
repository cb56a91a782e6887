"""The first run: a hybrid of six recurrences and two attention layers learns English, byte by byte, on a CPU.

    hyjax train --config=configs/quickstart.py --workdir=runs/quickstart

The text is the running Python's own help topics (`help("topics")`), every paragraph once: 400,869 tokens; eight of
the 65 topics (9 %) are held out. 1.7 M parameters, 350 steps of 4,096 bytes: 3 min on two CPU cores, with compilation.

Expected held-out bits per byte: 1.99 (a byte trigram 2.69, gzip -9 2.41 on the same text).
"""

from hyjax.config import base


def get_config():
    return base(
        model=dict(layout="(GGAG)*2", width=128, heads=4, legend=dict(G=dict(conv_width=4)), remat="kernels"),
        data=dict(source="topics", seq_len=256, heldout=0.1),
        optimizer=dict(learning_rate=3e-3, warmup_steps=30, weight_decay=0.1),
        train=dict(steps=350, batch_size=16, log_every=25, checkpoint_every=100),
        eval=dict(every=100, prompt="The "),
    )
