"""Llama 2 and 3.x, and the models that share their architecture, SmolLM2 among them."""

from octavo.models.config import ConfigReader
from octavo.models.decoder import build_decoder
from octavo.models.graph import Graph

ARCHITECTURES = ("LlamaForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph: biases where the configuration asks for them, no sliding window."""
    config.require("sliding_window", ())
    config.require("use_sliding_window", (False,))
    config.require("layer_types", ())
    bias = config.boolean("attention_bias", False)
    return build_decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.boolean("mlp_bias", False))
