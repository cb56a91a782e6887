"""A few million parameters on the running Python's own standard library: 10.7 MB of code, read half once.

    hyjax train --config=configs/small.py --workdir=runs/small

3.7 M parameters, 1,200 steps of 4,096 bytes (4.9 MB): 19 min on two CPU cores.

Expected held-out bits per byte: 1.59, below gzip -9's 2.06 and a byte trigram's 2.73 on the same files. The curve
is experiments/small.png.
"""

from hyjax.config import base


def get_config():
    return base(
        model=dict(layout="(GGAG)*2", width=192, heads=6, legend=dict(G=dict(conv_width=4)), remat="kernels"),
        data=dict(source="stdlib", seq_len=512, heldout=0.1),
        optimizer=dict(learning_rate=3e-3, warmup_steps=100, weight_decay=0.1),
        train=dict(steps=1200, batch_size=8, log_every=50, checkpoint_every=300),
        eval=dict(every=300, batches=24, prompt="def "),
    )
