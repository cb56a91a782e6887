"""A trace of a few training steps, for TensorBoard's or Perfetto's viewer."""

from pathlib import Path
from typing import Any

import jax


class StepTrace:
    """Traces `count` steps from the `first` (past compilation) into `workdir/profile`.

    Call `before(step)` and `after(step, outputs)` around each step. `close` ends a trace that the run cut short.
    """

    def __init__(self, workdir: str | Path, first: int, count: int = 3):
        self.directory = Path(workdir) / "profile"
        self._first, self._last = first, first + count - 1
        self._tracing = False

    def before(self, step: int) -> None:
        if step == self._first:
            jax.profiler.start_trace(str(self.directory))
            self._tracing = True

    def after(self, step: int, outputs: Any) -> None:
        if self._tracing and step >= self._last:
            jax.block_until_ready(outputs)  # steps are asynchronous: the trace must see them end
            self.close()

    def close(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
