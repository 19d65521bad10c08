"""Llama 4 with its vision model, of which the text model is run."""

from octavo.models.config import ConfigReader
from octavo.models.families import llama4_text
from octavo.models.graph import Graph
from octavo.models.text_part import build_text_part

ARCHITECTURES = ("Llama4ForConditionalGeneration",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    return build_text_part(config, llama4_text.build)
