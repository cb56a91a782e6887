"""Multi-query associative recall (Arora et al., "Zoology", 2023, arXiv:2312.04927)."""

import numpy as np

from hyjax.data.synthetic.sampling import distinct, weighted_distinct

NO_LABEL = -100


def mqar(
    num_examples: int,
    *,
    vocab_size: int,
    seq_len: int,
    num_kv_pairs: int,
    power_a: float = 0.01,
    random_non_queries: bool = True,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """A set of examples; the same arguments give the same set.

    With V = vocab_size, N = seq_len, D = num_kv_pairs: D different keys from [1, V/2) and D different values from
    [V/2, V) stand first, as k v k v ... (2D tokens). The remaining N - 2D places are (N - 2D)/2 slots of two; each
    key appears once more at the first place of a slot of its own. Slots i = 1, 2, ... are drawn without
    replacement with p_i ~ a i^(a-1), so a small a puts queries near the pairs. The label *at* the query is the key's
    value; the value itself does not follow. All other places hold 0 or, with random_non_queries, a token drawn from the
    whole vocabulary (which may by chance be a key or a value: the pairs of the first 2D tokens are what counts).

    Returns inputs int32 [num_examples, N] and labels int32 [num_examples, N], -100 where there is none.

    Raises ValueError: N odd, 4D > N, or a vocabulary too small for D different keys and values.
    """
    _check(vocab_size, seq_len, num_kv_pairs, power_a)
    rng = np.random.default_rng(seed)
    half, context = vocab_size // 2, 2 * num_kv_pairs
    keys = 1 + distinct(rng, num_examples, half - 1, num_kv_pairs)
    values = half + distinct(rng, num_examples, vocab_size - half, num_kv_pairs)
    slots = (seq_len - context) // 2
    weights = power_a * np.arange(1, slots + 1, dtype=np.float64) ** (power_a - 1)
    queries = context + 2 * weighted_distinct(rng, num_examples, weights, num_kv_pairs)

    if random_non_queries:
        inputs = rng.integers(0, vocab_size, (num_examples, seq_len), dtype=np.int32)
    else:
        inputs = np.zeros((num_examples, seq_len), np.int32)
    inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
    np.put_along_axis(inputs, queries, keys.astype(np.int32), axis=1)
    labels = np.full((num_examples, seq_len), NO_LABEL, np.int32)
    np.put_along_axis(labels, queries, values.astype(np.int32), axis=1)
    return inputs, labels


def _check(vocab_size: int, seq_len: int, num_kv_pairs: int, power_a: float) -> None:
    if num_kv_pairs < 1:
        raise ValueError(f"num_kv_pairs={num_kv_pairs} must be at least 1")
    if seq_len % 2:
        raise ValueError(f"seq_len={seq_len} must be even: {seq_len + 1} would do")
    if 4 * num_kv_pairs > seq_len:
        raise ValueError(f"num_kv_pairs={num_kv_pairs} needs a seq_len of at least {4 * num_kv_pairs}, not {seq_len}")
    smallest = 2 * (num_kv_pairs + 1)  # keys are 1 ... V/2 - 1
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for {num_kv_pairs} keys and values: {smallest} is enough"
        )
    if power_a <= 0:
        raise ValueError(f"power_a={power_a} must be positive")
