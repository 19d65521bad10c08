"""Baichuan and Baichuan 2: Llama with q, k and v in one tensor; the 13B models have ALiBi in place of rope."""

from dataclasses import replace

from octavo.models.classic import alibi_slopes
from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("BaichuanForCausalLM", "BaiChuanForCausalLM")

# Tokens from which on a model is a Baichuan 2, whose head's rows are made as long as 1; no field says so.
SECOND_VOCABULARY = 125696


def build(config: ConfigReader) -> Graph:
    """The graph. The models without rope are those that give no max_position_embeddings, but model_max_length."""
    rotated = config.has("max_position_embeddings")
    if not rotated:
        config = config.aliased(max_position_embeddings="model_max_length")
    parts = read_parts(config, rope=rotated)
    slopes = None if rotated else alibi_slopes(parts.attention.q_heads)
    return assemble(
        config,
        parts,
        attention=replace(parts.attention, qkv="self_attn.W_pack", alibi=slopes),
        unit_head=config.integer("vocab_size") >= SECOND_VOCABULARY,
    )
