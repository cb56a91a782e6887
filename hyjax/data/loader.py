"""Batches addressed by step: batch = f(seed, step), so that a loader's state is the step number.

Rows come from a set of known length (packed text, recall sequences). Training reads an endless stream: epoch after
epoch of all rows, each epoch a new permutation; batch s is rows s·B to (s+1)·B - 1 of that stream, so every row comes
once an epoch even where B does not divide it. The held-out set is a set of its own (never a slice of the shuffled
training rows) and is read once, in order.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]


class RowSet(Protocol):
    """What a loader reads from: rows by number, and what one pass over them holds."""

    @property
    def num_targets(self) -> int: ...  # sum of the weights of all rows

    @property
    def num_bytes(self) -> int: ...  # bytes of text that the targets stand for; 0 where the data is no text

    @property
    def content(self) -> tuple[np.ndarray, ...]: ...  # what the rows are made from, for the fingerprint

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Batch: ...


class Loader:
    """Batches of a set of rows: shuffled and endless with a seed, in order and once without.

    Batch: tokens int32 [B, T] or [B, T, streams], targets int32 [B, T], weights float32 [B, T], positions and
    segment_ids int32 [B, T]. `workers` threads prefetch in `batches`; no value depends on their number.
    """

    def __init__(self, rows: RowSet, batch_size: int, *, seed: int | None, workers: int = 0):
        import grain  # here, so that models and synthetic tasks load without grain

        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if seed is not None and not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} must be from 0 to 2**32 - 1")
        if workers < 0:
            raise ValueError(f"data.workers={workers} must be 0 or more")
        self.rows, self.batch_size, self.workers = rows, batch_size, workers
        self.endless = seed is not None
        if self.endless:
            # Shuffling per epoch and *then* batching: rows that don't fill a batch lead the next epoch's first.
            # "Endless" is 2**40 rows: a length that no run reaches and that grain can still multiply.
            epochs = -(-(2**40) // len(rows))
            stream = grain.MapDataset.source(rows).shuffle(seed).repeat(epochs)
        else:
            stream = grain.MapDataset.source(_Padded(rows, batch_size))
        self._batches = stream.batch(batch_size)
        self._options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)

    @property
    def num_examples(self) -> int:
        """Rows in one pass."""
        return len(self.rows)

    @property
    def num_batches(self) -> int:
        """Batches that hold one pass, the last one perhaps in part."""
        return -(-len(self.rows) // self.batch_size)

    @property
    def num_targets(self) -> int:
        """Sum of the weights of one pass."""
        return self.rows.num_targets

    @property
    def num_bytes(self) -> int:
        """Bytes of text the targets of one pass stand for: bits per byte = loss in bits / num_bytes."""
        return self.rows.num_bytes

    def batch(self, step: int) -> Batch:
        """Batch `step`, whatever was read before. Held-out: IndexError from num_batches on."""
        if step < 0 or (not self.endless and step >= self.num_batches):
            raise IndexError(f"batch {step} of {'an endless' if self.endless else self.num_batches}")
        return self._batches[step]

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Batches from start_step on, prefetched; endless for training, to the end of the pass for held-out."""
        if start_step < 0:
            raise IndexError(f"batches start at step 0, not {start_step}")
        if not self.endless and start_step >= self.num_batches:
            return iter(())
        return iter(self._batches[start_step:].to_iter_dataset(self._options))


class _Padded:
    """Rows up to a multiple of the batch; those that are made up have weight 0 and segment 0."""

    def __init__(self, rows: RowSet, batch_size: int):
        self.rows = rows
        self.length = -(-len(rows) // batch_size) * batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, row: int) -> Batch:
        if row < len(self.rows):
            return self.rows[row]
        return {key: np.zeros_like(value) for key, value in self.rows[0].items()}
