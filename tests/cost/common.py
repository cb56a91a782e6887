"""Model configs that the tests of the cost package share."""

# The reference study's stack: its three layouts have known parameter counts.
RECALL = dict(
    width=32, heads=4, norm="layernorm", ffn="gelu", position="learned", max_positions=128,
    streams=(64, 33), vocab_size=32, head_bias=True,
)  # fmt: skip
# Every kind of mixer and of state, with heads of odd sizes, a layer without mixer and one without FFN.
MIXED = dict(
    layout="GWA-G", width=24, heads=4, kv_heads=2, head_dim=10, window=50, vocab_size=97, qk_norm=True,
    legend=dict(G=dict(conv_width=4, value_dim=6, gated=True), A=dict(gated=True, ffn=None), W=dict(ffn="relu2")),
)  # fmt: skip
LARGE = dict(layout="(GGGA)*16", width=8192, heads=64, kv_heads=8, ffn_width=28672, vocab_size=152_000)
