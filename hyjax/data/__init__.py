"""Data: documents (`sources`, or a corpus on disk in `store`) → ids (`tokenizers`) → a stream of them (`corpus`) → rows
(`packing`) → batches by step number (`loader`), of several sources by weight (`mixing`).
"""

from hyjax.data.build import Data, build
from hyjax.data.fingerprint import fingerprint_diff
from hyjax.data.loader import Batch, Loader

__all__ = ["Batch", "Data", "Loader", "build", "fingerprint_diff"]
