"""A few million parameters on the running Python's own standard library: code, 11 MB.

hyjax train --config=configs/small.py --workdir=runs/small
"""

from hyjax.config import base


def get_config(arg=""):
    return base(
        model=dict(layout="(GGAG)*2", width=192, heads=6, legend=dict(G=dict(conv_width=4)), remat="kernels"),
        data=dict(source="stdlib", seq_len=512, heldout=0.1),
        optimizer=dict(learning_rate=3e-3, warmup_steps=100, weight_decay=0.1),
        train=dict(steps=1200, batch_size=8, log_every=50, checkpoint_every=300),
        eval=dict(every=300, batches=24, prompt="def "),
    )
