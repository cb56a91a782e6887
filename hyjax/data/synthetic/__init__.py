"""Tasks made of numbers drawn on the spot: numpy only, vectorised, the same set for the same seed."""

from hyjax.data.synthetic.mqar import mqar
from hyjax.data.synthetic.recall import recall

__all__ = ["mqar", "recall"]
