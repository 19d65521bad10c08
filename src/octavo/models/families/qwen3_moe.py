"""Qwen3-MoE: Qwen3 with a mixture of experts in most or all layers."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph
from octavo.models.moe_blocks import MoeMlp, Routing, read_expert_count, read_sparse_layers, separate_experts

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph; a window, where it is turned on, is that of all layers."""
    config.require("layer_types", ())
    parts = read_parts(config)
    experts = read_expert_count(config, "num_experts", "num_local_experts")
    moe = MoeMlp(
        hidden=parts.mlp.hidden,
        intermediate=config.integer("moe_intermediate_size"),
        experts=experts,
        routing=Routing(
            top_k=config.integer("num_experts_per_tok"), renormalize=config.boolean("norm_topk_prob", False)
        ),
        names=separate_experts(experts),
    )
    window = config.integer("sliding_window") if config.boolean("use_sliding_window", False) else None
    return assemble(
        config,
        parts,
        attention=replace(parts.attention, norms="head", sliding_window=window),
        mlp=read_sparse_layers(config, parts.layers, moe, parts.mlp),
    )
