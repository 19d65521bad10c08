"""Phi-3, Phi-3.5 and Phi-4: Llama with q, k, v and gate, up in one tensor each, LongRoPE, and heads rotated in part."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("Phi3ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config.require("attention_bias", (False,))
    parts = read_parts(config, eps=1e-5, partial=1.0)
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return assemble(
        config,
        parts,
        attention=replace(parts.attention, qkv="self_attn.qkv_proj", sliding_window=window),
        mlp=replace(parts.mlp, gate_up="mlp.gate_up_proj"),
    )
