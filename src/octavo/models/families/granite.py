"""Granite: Llama with numbers that scale the embedding, attention scores, what each block adds, and the logits."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import Scales, assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("GraniteForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    parts = read_parts(config)
    return assemble(
        config,
        parts,
        attention=replace(parts.attention, scale=config.number("attention_multiplier", 1.0)),
        mlp=replace(parts.mlp, bias=config.boolean("mlp_bias", False)),
        scales=Scales(
            embedding=config.number("embedding_multiplier", 1.0),
            residual=config.number("residual_multiplier", 1.0),
            logits=1.0 / config.number("logits_scaling", 1.0),
        ),
    )
