"""A hybrid of six recurrences and two attention layers learns English, byte by byte."""

from hyjax.config import base


def get_config(arg=""):
    return base(
        model=dict(layout="(GGAG)*2", width=128, heads=4, legend=dict(G=dict(conv_width=4)), remat="kernels"),
        data=dict(source="topics", seq_len=256, heldout=0.1),
        train=dict(steps=350, batch_size=16, log_every=25, checkpoint_every=100),
        optimizer=dict(learning_rate=3e-3, warmup_steps=30, weight_decay=0.1),
        eval=dict(every=100, prompt="The "),
    )
