"""A character model of The Time Machine, the seed experiment's second half: where loss does not tell stacks apart.

    hyjax train --config=configs/time_machine.py --config.data.path=timemachine.txt --workdir=runs/time_machine

The text is Project Gutenberg's no. 35 in the form that the checksum names (178,979 bytes): every run of non-letters
is one space, in lower case: 28 ids. The three matched stacks of `recall.py` (GGGG, AAAA, GGAG) see 51,200 windows of
128 characters in batches of 64: 800 steps.

Expected held-out loss in nats a character: GGGG 1.606, GGAG 1.610, AAAA 1.842, a minute each on two CPU cores.
"""

from hyjax.config import base, parse_arg

WINDOWS, BATCH = 51_200, 64


def get_config(arg=""):
    arg = parse_arg(arg, layout="GGAG")
    return base(
        model=dict(
            layout=arg.layout,
            vocab_size=28,
            width=32,
            heads=4,
            norm="layernorm",
            ffn="gelu",
            position="learned",
            max_positions=128,
            head_bias=True,
            remat="kernels",
        ),
        data=dict(
            source="text",
            path="timemachine.txt",
            checksum="090b5e7e70c295757f55df93cb0a180b9691891a",
            tokenizer="letters",
            seq_len=128,
        ),
        optimizer=dict(learning_rate=3e-3, schedule="constant", b2=0.999, clip_norm=0.0),
        train=dict(steps=WINDOWS // BATCH, batch_size=BATCH, log_every=50, checkpoint_every=400),
        eval=dict(every=200, prompt="the time traveller ", sample_tokens=100),
    )
