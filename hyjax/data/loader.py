"""Batches addressed by step: batch = f(seed, step), so that a loader's state is the step number.

Rows come from a set of known length (packed text, recall sequences). Training reads an endless stream: epoch after
epoch of all rows, each epoch a new permutation; batch s is rows s·B to (s+1)·B - 1 of that stream, so every row comes
once an epoch even where B does not divide it. Of a mixture each source has such a stream of its own, of which rows are
taken by weight. The held-out set is a set of its own (never a slice of the shuffled training rows) and is read once,
in order.

Host h of n reads the h-th of n equal shares of every batch: one after the other they are the batch, whatever n is.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from hyjax.config.errors import multiples_near
from hyjax.data.mixing import ENDLESS, Rows, Turns, source_seed

Batch = dict[str, np.ndarray]


class RowSet(Protocol):
    """What a loader reads from: rows by number, and what one pass over them holds."""

    @property
    def num_targets(self) -> int: ...  # sum of the weights of all rows

    @property
    def num_bytes(self) -> int: ...  # bytes of text that the targets stand for; 0 where the data is no text

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Batch: ...


class Loader:
    """Batches of a set of rows: shuffled and endless with a seed, in order and once without.

    Batch: tokens int32 [b, T] or [b, T, streams], targets int32 [b, T], weights float32 [b, T], positions and
    segment_ids int32 [b, T], where b = batch_size / hosts. `workers` threads prefetch in `batches`; no value depends
    on their number.

    Args:
      rows: of one source, or `Rows` of several.
      batch_size: of all hosts together.
      turns: for training on `Rows`, whose row is next.
      host: (number of this host, how many there are).

    Raises ValueError: a number out of its range, or a batch that can't be shared equally among the hosts.
    """

    def __init__(
        self,
        rows: RowSet,
        batch_size: int,
        *,
        seed: int | None,
        workers: int = 0,
        turns: Turns | None = None,
        host: tuple[int, int] = (0, 1),
    ):
        import grain  # here, so that models and synthetic tasks load without grain

        index, hosts = host
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        if seed is not None and not 0 <= seed < 2**32:
            raise ValueError(f"seed={seed} must be from 0 to 2**32 - 1")
        if workers < 0:
            raise ValueError(f"data.workers={workers} must be 0 or more")
        if not 0 <= index < hosts:
            raise ValueError(f"host={host} must be (number, how many) with 0 <= number < how many")
        if batch_size % hosts:
            near = multiples_near(batch_size, hosts)
            raise ValueError(f"train.batch_size={batch_size} can't be shared equally by {hosts} hosts: use {near}")
        self.rows, self.batch_size, self.workers, self.host = rows, batch_size, workers, host
        self.endless = seed is not None
        if seed is None:
            stream = grain.MapDataset.range(self.num_batches * batch_size)  # numbers past the last row are padding
        elif turns is None:
            # Shuffling per epoch and *then* batching: rows that don't fill a batch lead the next epoch's first.
            stream = grain.MapDataset.range(len(rows)).shuffle(seed).repeat(-(-ENDLESS // len(rows)))
        else:
            assert isinstance(rows, Rows)
            # Past its end a shuffled dataset goes on with its next epoch, so that no source is ever exhausted.
            sources = [
                grain.MapDataset.range(first, last).shuffle(source_seed(seed, source))
                for source, (first, last) in enumerate(zip(rows.edges, rows.edges[1:], strict=False))
            ]
            stream = grain.MapDataset.select_from_datasets(sources, turns)
        share = stream.batch(batch_size // hosts)
        self._numbers = share if hosts == 1 else share[index::hosts]
        self._batches = self._numbers.map(self._read)
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

    def row_numbers(self, step: int) -> np.ndarray:
        """int64 [b], the numbers in `self.rows` of the rows of batch `step`; -1 for one that is made up."""
        self._check(step)
        numbers = self._numbers[step]
        return np.where(numbers < len(self.rows), numbers, -1)

    def batch(self, step: int) -> Batch:
        """Batch `step`, whatever was read before. Held-out: IndexError from num_batches on."""
        self._check(step)
        return self._batches[step]

    def batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Batches from start_step on, prefetched; endless for training, to the end of the pass for held-out."""
        if start_step < 0:
            raise IndexError(f"batches start at step 0, not {start_step}")
        if not self.endless and start_step >= self.num_batches:
            return iter(())
        return iter(self._batches[start_step:].to_iter_dataset(self._options))

    def _check(self, step: int) -> None:
        if step < 0 or (not self.endless and step >= self.num_batches):
            raise IndexError(f"batch {step} of {'an endless' if self.endless else self.num_batches}")

    def _read(self, numbers: np.ndarray) -> Batch:
        """The rows of these numbers, stacked; past the last one they are made up, with weight 0 and segment 0."""
        size = len(self.rows)
        rows = [self.rows[number] for number in numbers.tolist() if number < size]
        example = rows[0] if rows else self.rows[0]
        rows += [{key: np.zeros_like(value) for key, value in example.items()}] * (len(numbers) - len(rows))
        return {key: np.stack([row[key] for row in rows]) for key in example}
