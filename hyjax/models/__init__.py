"""Models as pure functions: `HybridLM(config).init` and `.apply`."""

from hyjax.models.context import Context
from hyjax.models.lm import HybridLM, Output, State

__all__ = ["Context", "HybridLM", "Output", "State"]
