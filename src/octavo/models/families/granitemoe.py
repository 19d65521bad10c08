"""Granite MoE: Granite with a mixture of experts in every layer, weighted by a softmax over those chosen."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import Scales, assemble, read_parts
from octavo.models.graph import Graph
from octavo.models.moe_blocks import MoeMlp, Routing, read_expert_count, stacked_experts

ARCHITECTURES = ("GraniteMoeForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    parts = read_parts(config)
    hidden, intermediate = parts.mlp.hidden, parts.mlp.intermediate
    experts = read_expert_count(config, "num_local_experts")
    moe = MoeMlp(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        routing=Routing(top_k=config.integer("num_experts_per_tok"), scoring="softmax_of_chosen"),
        names=stacked_experts(
            experts,
            hidden,
            intermediate,
            gate_up="block_sparse_moe.input_linear.weight",
            down="block_sparse_moe.output_linear.weight",
        ),
        router="block_sparse_moe.router.layer",
    )
    return assemble(
        config,
        parts,
        attention=replace(parts.attention, scale=config.number("attention_multiplier", 1.0)),
        mlp=moe,
        scales=Scales(
            embedding=config.number("embedding_multiplier", 1.0),
            residual=config.number("residual_multiplier", 1.0),
            logits=1.0 / config.number("logits_scaling", 1.0),
        ),
    )
