"""Text from a model: `generate_text` and `TextStream` for texts, `Generator` for ids, `Sampling` for what is asked."""

from hyjax.generate.decoder import Decoder
from hyjax.generate.generator import Continuation, Generation, Generator, NonFiniteLogitsError, make_sampler
from hyjax.generate.sampling import Sampling
from hyjax.generate.text import TextContinuation, TextStream, generate_text, prompt_ids

__all__ = [
    "Continuation",
    "Decoder",
    "Generation",
    "Generator",
    "NonFiniteLogitsError",
    "Sampling",
    "TextContinuation",
    "TextStream",
    "generate_text",
    "make_sampler",
    "prompt_ids",
]
