"""Mixtral: Mistral with a mixture of experts in every layer, two of eight of them for each token."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph
from octavo.models.moe_blocks import MoeMlp, Routing, read_expert_count, separate_experts

ARCHITECTURES = ("MixtralForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph: weights of a token's experts sum to one."""
    config.require("attention_bias", (False,))
    parts = read_parts(config, eps=1e-5, theta=1e6)
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    experts = read_expert_count(config, "num_local_experts", "num_experts")
    moe = MoeMlp(
        hidden=parts.mlp.hidden,
        intermediate=parts.mlp.intermediate,
        experts=experts,
        routing=Routing(top_k=config.integer("num_experts_per_tok", 2), renormalize=True),
        names=separate_experts(experts, "block_sparse_moe.experts", "w1", "w3", "w2"),
        router="block_sparse_moe.gate",
    )
    return assemble(config, parts, attention=replace(parts.attention, sliding_window=window), mlp=moe)
