"""Ministral 3: Mistral with YaRN, and queries that grow with the logarithm of their position."""

from dataclasses import replace

from octavo.models.config import ConfigReader, read_rope
from octavo.models.decoder import assemble, read_parts, usable_positions
from octavo.models.graph import Graph
from octavo.models.rope import QueryScaling

ARCHITECTURES = ("Ministral3ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config.require("attention_bias", (False,))
    parts = read_parts(config, head_dim=128, eps=1e-5, rope=False)
    also = ("llama_4_scaling_beta", "max_position_embeddings")
    rope = read_rope(config, parts.attention.head_dim, parts.max_position, theta=1e6, also=also)
    given = config.mapping("rope_parameters")
    scaling = QueryScaling(
        given.number("llama_4_scaling_beta"), given.integer("original_max_position_embeddings", parts.max_position)
    )
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return assemble(
        config,
        replace(parts, max_position=usable_positions(config, rope, parts.max_position)),
        attention=replace(parts.attention, rope=rope, query_scaling=scaling, sliding_window=window),
    )
