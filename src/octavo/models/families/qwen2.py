"""Qwen2 and Qwen2.5: Llama with biased q, k and v, and sliding windows in the upper layers when turned on."""

from octavo.models.config import MOST_LAYERS, ConfigReader
from octavo.models.decoder import build_decoder, layer_windows
from octavo.models.graph import Graph

ARCHITECTURES = ("Qwen2ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config.require("attention_bias", {True})
    layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    return build_decoder(config, qkv_bias=True, windows=layer_windows(config, layers))
