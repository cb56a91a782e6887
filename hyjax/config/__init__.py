"""Configs: the defaults, how a file and overrides change them, and the check that comes before any use.

    config = load("configs/quickstart.py:tiny", ["--config.model.layout=GGAG"])

A config is sections of scalars, strings and tuples; `model.legend` goes one deeper: `legend.LETTER.FIELD`.
Nothing may be None but `mixer` and `ffn` of a legend entry. What is wrong is a `ConfigError`: a sentence that
names the dotted key. Only functions that return a ConfigDict (`base`, `load`, `from_json`) import ml_collections.
"""

from hyjax.config.defaults import CHOICES, DEFAULTS, ELEMENTS, RANGES
from hyjax.config.errors import ConfigError
from hyjax.config.load import base, load, parse_arg
from hyjax.config.schema import check, validate_model
from hyjax.config.text import defaulted, diff, fingerprint, from_json, resolved_text, to_json

__all__ = [
    "CHOICES",
    "DEFAULTS",
    "ELEMENTS",
    "RANGES",
    "ConfigError",
    "base",
    "check",
    "defaulted",
    "diff",
    "fingerprint",
    "from_json",
    "load",
    "parse_arg",
    "resolved_text",
    "to_json",
    "validate_model",
]
