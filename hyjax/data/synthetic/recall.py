"""Associative recall in its simplest form: pairs first, then every key once more, in another order."""

from collections.abc import Sequence

import numpy as np

from hyjax.data.corpus import checksum
from hyjax.data.synthetic.sampling import distinct


def recall(
    num_seqs: int,
    num_pairs: int,
    *,
    num_keys: int = 64,
    num_values: int = 32,
    seed: int | Sequence[int] = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """A set of sequences; the same arguments give the same set.

    A token is a key and a value. The first half of a sequence binds num_pairs different keys, each to a value
    drawn anew; the second half shows the same keys in a random order with the reserved value `num_values`, and asks
    for what each was bound to. Chance is 1 / num_values.

    Returns:
      tokens int32 [num_seqs, 2·num_pairs, 2] (key, value or num_values);
      targets int32 [num_seqs, 2·num_pairs], -1 in the first half.
    """
    if num_pairs > num_keys:
        raise ValueError(f"num_pairs={num_pairs} different keys can't be drawn from num_keys={num_keys}")
    for name, value in dict(num_pairs=num_pairs, num_values=num_values).items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    rng = np.random.default_rng(seed)
    keys = distinct(rng, num_seqs, num_keys, num_pairs)
    values = rng.integers(0, num_values, (num_seqs, num_pairs))
    order = distinct(rng, num_seqs, num_pairs, num_pairs)
    tokens = np.full((num_seqs, 2 * num_pairs, 2), num_values, np.int32)
    tokens[:, :num_pairs, 0], tokens[:, :num_pairs, 1] = keys, values
    tokens[:, num_pairs:, 0] = np.take_along_axis(keys, order, axis=1)
    targets = np.full((num_seqs, 2 * num_pairs), -1, np.int32)
    targets[:, num_pairs:] = np.take_along_axis(values, order, axis=1)
    return tokens, targets


class RecallSet:
    """Recall sequences as rows for the loader: tokens [T, 2], weight 1 where there is a target."""

    def __init__(self, num_seqs: int, num_pairs: int, num_keys: int, num_values: int, seed: Sequence[int]):
        if num_seqs < 1:
            raise ValueError("data.train_sequences and data.heldout_sequences must be at least 1")
        self.tokens, self.targets = recall(num_seqs, num_pairs, num_keys=num_keys, num_values=num_values, seed=seed)
        self.num_targets = num_seqs * num_pairs
        self.num_bytes = 0  # no text
        self.checksum = checksum(self.tokens, self.targets)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        targets = self.targets[row]
        return {
            "tokens": self.tokens[row],
            "targets": np.maximum(targets, 0),
            "weights": (targets >= 0).astype(np.float32),
            "positions": np.arange(len(targets), dtype=np.int32),
            "segment_ids": np.ones(len(targets), np.int32),
        }
