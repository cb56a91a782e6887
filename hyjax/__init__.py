"""hyjax: pretrain, ablate and evaluate hybrid language models (a few attention layers, many recurrences).

Importing this package does no array work and loads no framework: `hyjax.kernels` needs jax alone.
"""

__version__ = "0.1.0"
