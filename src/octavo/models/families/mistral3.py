"""Mistral Small 3.1 and Ministral 3 with their vision tower, of which the text model is run."""

from octavo.models.config import ConfigReader
from octavo.models.families import ministral3, mistral
from octavo.models.graph import Graph
from octavo.models.text_part import build_text_part

ARCHITECTURES = ("Mistral3ForConditionalGeneration",)

_BUILDERS = {"mistral": mistral.build, "ministral3": ministral3.build}


def build(config: ConfigReader) -> Graph:
    """The graph; the text model is either of two families."""
    text = config.mapping("text_config")
    text.require("model_type", _BUILDERS)
    return build_text_part(config, _BUILDERS[text.values.get("model_type", "mistral")])
