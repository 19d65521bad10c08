"""ERNIE 4.5: Llama with heads rotated in neighbouring pairs."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("Ernie4_5ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph. One field says whether all projections have biases."""
    config.require("attention_bias", (False,))
    parts = read_parts(config, head_dim=128, eps=1e-5, theta=500000.0)
    bias = config.boolean("use_bias", False)
    return assemble(
        config,
        parts,
        attention=replace(parts.attention, qkv_bias=bias, output_bias=bias, neighbours=True),
        mlp=replace(parts.mlp, bias=bias),
        tied=True,
    )
