"""Gemma 3 with its vision tower, of which the text model is run."""

from octavo.models.config import ConfigReader
from octavo.models.families import gemma3_text
from octavo.models.graph import Graph
from octavo.models.text_part import build_text_part

ARCHITECTURES = ("Gemma3ForConditionalGeneration",)

# Published configurations leave out what transformers takes for granted.
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}


def build(config: ConfigReader) -> Graph:
    """The graph."""
    return build_text_part(config, gemma3_text.build, _DEFAULTS)
