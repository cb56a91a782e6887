"""Vectorised draws that the synthetic tasks share."""

import numpy as np


def distinct(rng: np.random.Generator, num_rows: int, population: int, size: int) -> np.ndarray:
    """int64 [num_rows, size]: `size` different numbers below `population` a row, drawn uniformly, in random order.

    Floyd's algorithm, a column at a time (Bentley and Floyd, "A sample of brilliance", 1987): the work is
    rows * size², whatever the population, where shuffling the population would be rows * population.
    """
    chosen = np.empty((size, num_rows), np.int64)
    for column, top in enumerate(range(population - size, population)):
        draw = rng.integers(0, top + 1, num_rows)
        taken = (chosen[:column] == draw).any(axis=0)
        chosen[column] = np.where(taken, top, draw)
    return rng.permuted(np.ascontiguousarray(chosen.T), axis=1)  # Floyd's sets are uniform, their order is not


def weighted_distinct(rng: np.random.Generator, num_rows: int, weights: np.ndarray, size: int) -> np.ndarray:
    """int64 [num_rows, size]: successive draws without replacement a row, i with probability ~ weights[i].

    An exponential race: clock i rings at Exp(1) / weights[i], and the order of ringing is the order of
    successive weighted draws. Rows are drawn a block at a time to bound memory.
    """
    block = 1 + 2**22 // len(weights)
    parts = []
    for start in range(0, num_rows, block):
        clocks = rng.standard_exponential((min(block, num_rows - start), len(weights))) / weights
        parts.append(np.argsort(clocks, axis=1)[:, :size])
    return np.concatenate(parts) if parts else np.empty((0, size), np.int64)
