"""Seed-OSS: Llama with biased q, k and v, and a head size of its own."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("SeedOssForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    parts = read_parts(config, head_dim=128, bias=True)
    return assemble(
        config,
        parts,
        attention=replace(parts.attention, output_bias=config.boolean("attention_out_bias", False)),
        mlp=replace(parts.mlp, bias=config.boolean("mlp_bias", False)),
    )
