"""attention by kernels that JAX ships, for the calls that they can serve: a second opinion, and a mark to beat.

`splash` is jax.experimental's flash attention for TPU, `cudnn` NVIDIA's for GPU. Each has its own rule of gradients.
"""

import jax
import jax.numpy as jnp

from hyjax.kernels import varying

SPLASH_BLOCK = 512
LANES = 128


def splash_refusal(q, k, by_position: bool, own_kv_ids: bool) -> str | None:
    """Why splash attention can't serve a call, or None. Rows that see nothing have no defined softmax there."""
    if by_position:
        return "splash attention goes by place in the row, and the call has q_positions and kv_positions"
    if own_kv_ids:
        return "splash attention needs a visible key in every row, and the call has kv_segment_ids of its own"
    if q.shape[1] > k.shape[1]:
        return f"splash attention needs a visible key in every row, and Tq={q.shape[1]} exceeds Tk={k.shape[1]}"
    if q.shape[1] % LANES or k.shape[1] % LANES:
        return f"splash attention needs lengths that are multiples of {LANES}, not Tq={q.shape[1]}, Tk={k.shape[1]}"
    if varying.axes(q):
        return "splash attention doesn't run under shard_map with check_vma=True"
    return None


def splash(q, k, v, segment_ids, sinks, options, interpret: bool = False) -> jax.Array:
    """q [B,Tq,Hq,K], k [B,Tk,Hk,K], v [B,Tk,Hk,V], segment_ids [B,T] or None -> [B,Tq,Hq,V]; options: xla.Options."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    shape = (q.shape[1], k.shape[1])
    mask: library.Mask = library.FullMask(shape)
    if options.window is not None:
        mask = library.LocalMask(shape, (options.window - 1, 0), shape[1] - shape[0])
    elif options.causal:
        mask = library.CausalMask(shape, shape[1] - shape[0])
    q_size, k_size = (next(size for size in (SPLASH_BLOCK, 256, LANES) if n % size == 0) for n in shape)
    run = library.make_splash_mha(
        library.MultiHeadMask([mask] * q.shape[2]),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=options.soft_cap,
        block_sizes=library.BlockSizes(
            block_q=q_size, block_kv=k_size, block_kv_compute=k_size,
            block_q_dkv=q_size, block_kv_dkv=k_size, block_kv_dkv_compute=k_size,
            block_q_dq=q_size, block_kv_dq=k_size,
        ),
        interpret=interpret,
    )  # fmt: skip
    q, k, v = (x.swapaxes(1, 2) for x in ((q * options.scale).astype(q.dtype), k, v))
    if segment_ids is None:
        out = jax.vmap(lambda q, k, v: run(q, k, v, sinks=sinks))(q, k, v)
        return out.swapaxes(1, 2)
    ids = lambda row: library.SegmentIds(row, row)
    out = jax.vmap(lambda q, k, v, row: run(q, k, v, ids(row), sinks=sinks))(q, k, v, segment_ids)
    # Queries of id 0 saw keys of id 0 there.
    return jnp.where((segment_ids != 0)[..., None, None], out.swapaxes(1, 2), 0)


def cudnn_refusal(q, k, v, by_position: bool, packed: bool, causal: bool, soft_cap, sinks) -> str | None:
    """Why cuDNN can't serve a call, or None."""
    if by_position or packed:
        return f"cuDNN knows no {'positions' if by_position else 'segment ids'}"
    if soft_cap is not None or sinks is not None:
        return f"cuDNN knows no {'sinks' if soft_cap is None else 'soft cap'}"
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes q, k, v all bfloat16 or all float16, not {q.dtype}, {k.dtype}, {v.dtype}"
    if causal and q.shape[1] != k.shape[1]:
        return f"cuDNN aligns queries with the start of the keys, and Tq={q.shape[1]} is not Tk={k.shape[1]}"
    if q.shape[3] != v.shape[3] or q.shape[3] % 8 or q.shape[3] > 128:
        return f"cuDNN takes K = V, a multiple of 8 up to 128, not K={q.shape[3]}, V={v.shape[3]}"
    return None


def cudnn(q, k, v, options) -> jax.Array:
    """q [B,T,Hq,K], k, v [B,Tk,Hk,·] -> [B,T,Hq,V]; options: xla.Options."""
    # JAX counts a window by the keys left of the query, which are one less.
    window = None if options.window is None else (options.window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, scale=options.scale, is_causal=options.causal, local_window_size=window, implementation="cudnn"
    )
