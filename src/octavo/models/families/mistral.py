"""Mistral: Llama without biases, every layer attending to a sliding window where one is given."""

from octavo.models.config import ConfigReader
from octavo.models.decoder import build_decoder
from octavo.models.graph import Graph

ARCHITECTURES = ("MistralForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config.require("attention_bias", {False})
    config.require("layer_types", ())
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    config.require("use_sliding_window", (window is not None,))
    return build_decoder(config, windows=window)
