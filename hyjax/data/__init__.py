"""Data: documents (`sources`) → ids (`tokenizers`) → rows (`packing`) → batches by step number (`loader`)."""

from hyjax.data.build import Data, build
from hyjax.data.fingerprint import fingerprint_diff
from hyjax.data.loader import Batch, Loader

__all__ = ["Batch", "Data", "Loader", "build", "fingerprint_diff"]
