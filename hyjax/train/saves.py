"""What the loop and the thread that may end its process (`signals`) both know: what is saved, what is evaluated."""

import math
from collections.abc import Mapping
from typing import Any

from hyjax.train.checkpoint import Checkpointer
from hyjax.train.step import TrainState


class Saves:
    """Saves each step at most once, whoever asks: the loop, or the thread that ends the process in its place."""

    def __init__(self, checkpointer: Checkpointer, extra: Mapping[str, Any], newest: int, evaluated: int):
        self.newest = newest  # the step that is on disk, or on its way; step 0 can be made again and counts as saved
        self.evaluated = evaluated  # the step whose evaluation is done: a run that was stopped in one begins with it
        self.loss = math.nan  # of that evaluation
        self._checkpointer, self._extra = checkpointer, extra

    def save(self, step: int, state: TrainState) -> None:
        """Returns when the arrays are copied, perhaps before they are on disk."""
        if step != self.newest:
            measured = {"loss": self.loss} if self.evaluated == step else {}
            self._checkpointer.save(step, state, {**self._extra, "evaluated": self.evaluated}, measured)
            self.newest = step

    def finish(self, step: int, state: TrainState) -> None:
        """Returns when this step, and any save before, is on disk."""
        self.save(step, state)
        self._checkpointer.wait()
