"""Several sources in one stream of rows: whose turn it is at row n, and rows numbered through all sources.

grain's own `mix` is not used: it cuts weights to whole numbers (0.7 and 0.3 become 233 and 100 of 333, so that the
share of the first is off by 300 rows in a million), and its nested rounding lets one of six sources be three rows off
at times. Its selection of one dataset out of several by a given map is used, and so are its shuffle and its epochs.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hyjax.data.loader import Batch, RowSet

# "Endless" in rows: a length that no run reaches and that grain can still multiply.
ENDLESS = 2**40
LONGEST_PERIOD = 2**16


class Turns:
    """Which source has row n of an endless stream, and its how many-th row that is: `turns[n] -> (source, number)`.

    The weights become whole numbers, `counts`, of a period of sum(counts) rows: the shortest period of at most
    LONGEST_PERIOD rows that holds them exactly (any shares of four decimals), else the one that comes nearest, which
    misses a share by less than 1e-5. After n rows a source has had count / period * n rows, to within one, for every n
    and any number of sources.
    """

    def __init__(self, weights: Sequence[float]):
        self.counts = _period(np.array(weights, float))
        self.period = sum(self.counts)
        self.order = _order(self.counts)
        ranks = np.zeros(self.period, np.int64)
        for source, count in enumerate(self.counts):
            ranks[self.order == source] = np.arange(count)
        self._ranks = ranks

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, row: int) -> tuple[int, int]:
        periods, place = divmod(row, self.period)
        source = int(self.order[place])
        return source, periods * self.counts[source] + int(self._ranks[place])


def _period(weights: np.ndarray) -> list[int]:
    """The rows that each source has in a period: 1/P is the unit that holds all shares exactly, or most nearly."""
    if not (weights.size and (weights > 0).all() and np.isfinite(weights).all()):
        raise ValueError(f"data.weights={tuple(weights.tolist())} must be numbers above 0, one a source")
    shares = weights / weights.max()
    shares /= shares.sum()
    periods = np.arange(len(shares), LONGEST_PERIOD + 1)
    counts = np.rint(shares * periods[:, None])
    whole = (counts.sum(axis=1) == periods) & (counts >= 1).all(axis=1)
    if not whole.any():
        least = int(np.argmin(shares))
        raise ValueError(
            f"data.weights[{least}]={weights[least]} is {shares[least]:.2g} of the whole, less than 1/{LONGEST_PERIOD}:"
            " leave that source out or give it more"
        )
    error = np.where(whole, np.abs(counts / periods[:, None] - shares).max(axis=1), np.inf)
    exact = error < 1 / ENDLESS  # a weight's own rounding: less than a row in the whole stream
    best = int(np.argmax(exact)) if exact.any() else int(np.argmin(error))
    return counts[best].astype(int).tolist()


def _order(counts: Sequence[int]) -> np.ndarray:
    """The source of each row of a period: of those that are due a row, the one whose row must come soonest.

    With share w = count / period, a source's row j = 1, 2, ... may come after (j - 1) / w rows of the stream, rounded
    down, and must be among the first j / w, rounded up: that is to be within one of w n at all n. Taking the
    earliest deadline keeps all deadlines wherever they can be kept (unit jobs, one at a time), and they can: a stream
    that gave each source its w of every row would.
    """
    period = sum(counts)
    had = [0] * len(counts)
    deadline = [-(-period // count) for count in counts]
    order = np.empty(period, np.int16)
    for row in range(period):
        due = (i for i, count in enumerate(counts) if had[i] * period // count <= row and had[i] < count)
        source = min(due, key=deadline.__getitem__)
        order[row] = source
        had[source] += 1
        deadline[source] = -(-(had[source] + 1) * period // counts[source])
    return order


def source_seed(seed: int, source: int) -> int:
    """The seed of one source's shuffle. grain takes seed + epoch for each epoch: neighbours would repeat each other."""
    return int(np.random.SeedSequence((seed, source)).generate_state(1)[0])


class Rows:
    """The rows of several sets, one set after the other, under one numbering."""

    def __init__(self, parts: Sequence["RowSet"]):
        self.parts = tuple(parts)
        self.edges = [0, *accumulate(len(part) for part in parts)]  # set i has the numbers edges[i] to edges[i+1] - 1

    def __len__(self) -> int:
        return self.edges[-1]

    def __getitem__(self, row: int) -> "Batch":
        part = bisect_right(self.edges, row) - 1
        return self.parts[part][row - self.edges[part]]

    @property
    def num_targets(self) -> int:
        return sum(part.num_targets for part in self.parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)
