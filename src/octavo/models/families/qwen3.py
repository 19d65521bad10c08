"""Qwen3: Llama with RMS norms on each head of q and k, a head size of its own, and Qwen2's windows."""

from octavo.models.config import MOST_LAYERS, ConfigReader
from octavo.models.decoder import build_decoder, layer_windows
from octavo.models.graph import Graph

ARCHITECTURES = ("Qwen3ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    bias = config.boolean("attention_bias", False)
    return build_decoder(
        config,
        qkv_bias=bias,
        output_bias=bias,
        head_norms=True,
        head_dim=128,
        windows=layer_windows(config, layers),
    )
