"""The head and its cross-entropy, a few tokens at a time: the logits of a whole batch never exist at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

# Logits that may exist at once where `loss_chunk` leaves it open: 64 MiB in float32.
LOGITS_AT_ONCE = 2**24


def chunk_length(batch: int, length: int, vocab_size: int, loss_chunk: int) -> int:
    """Time steps a chunk for rows [batch, length]: about `loss_chunk` tokens, or what fits `LOGITS_AT_ONCE`."""
    tokens = loss_chunk or LOGITS_AT_ONCE // vocab_size
    return min(length, max(1, tokens // batch))


def chunked_cross_entropy(
    x: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    head: Callable[[jax.Array], jax.Array],
    chunk: int,
) -> Mapping[str, jax.Array]:
    """Sums over tokens of what a loss and its report need; float32 scalars.

    Args:
      x: [B,T,D], what the head reads.
      targets: int [B,T], the id to predict. weights: [B,T], how much each token counts.
      head: [B,C,D] -> logits [B,C,V].
      chunk: C. Each chunk's logits are made again for the backward pass rather than kept. Chunks run along time,
        so rows stay on the devices that hold them.

    Returns:
      "loss": Σ w · (lse − logit[target]), in nats; "square_lse": Σ w · lse², for the z-loss (Zoph et al. 2022);
      "correct": Σ w over tokens whose greatest logit is the target's; "weight": Σ w.
    """
    length = x.shape[1]

    def sums(x: jax.Array, targets: jax.Array, weights: jax.Array) -> dict[str, jax.Array]:
        # a token without weight may be anything, NaN included: it is left out, not multiplied by zero
        x = jnp.where((weights > 0)[..., None], x, 0)
        logits = head(x).astype(jnp.float32)
        lse = jax.nn.logsumexp(logits, axis=-1)
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        total = lambda a: jnp.sum(a * weights)
        hit = (logits.argmax(axis=-1) == targets).astype(jnp.float32)
        return {
            "loss": total(lse - target),
            "square_lse": total(lse * lse),
            "correct": total(hit),
            "weight": weights.sum(),
        }

    weights = weights.astype(jnp.float32)
    if chunk >= length:
        return sums(x, targets, weights)
    whole = length - length % chunk
    fold = lambda a: jnp.moveaxis(a[:, :whole].reshape(a.shape[0], -1, chunk, *a.shape[2:]), 1, 0)
    step = jax.checkpoint(sums)
    body = lambda total, inputs: (jax.tree.map(jnp.add, total, step(*inputs)), None)
    zero = dict.fromkeys(("loss", "square_lse", "correct", "weight"), jnp.zeros((), jnp.float32))
    total, _ = lax.scan(body, zero, (fold(x), fold(targets), fold(weights)))
    if whole < length:
        total = jax.tree.map(jnp.add, total, step(x[:, whole:], targets[:, whole:], weights[:, whole:]))
    return total
