"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts of a size of their own beside a shared one that a sigmoid weighs."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph
from octavo.models.moe_blocks import MoeMlp, Routing, read_expert_count, read_sparse_layers, separate_experts

ARCHITECTURES = ("Qwen2MoeForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph; windows, where they are turned on, are those of every second layer below `max_window_layers`."""
    config.require("attention_bias", (True,))
    parts = read_parts(config)
    experts = read_expert_count(config, "num_experts")
    moe = MoeMlp(
        hidden=parts.mlp.hidden,
        intermediate=config.integer("moe_intermediate_size"),
        experts=experts,
        routing=Routing(
            top_k=config.integer("num_experts_per_tok"), renormalize=config.boolean("norm_topk_prob", False)
        ),
        names=separate_experts(experts),
        shared=replace(
            parts.mlp,
            intermediate=config.integer("shared_expert_intermediate_size"),
            gate="mlp.shared_expert.gate_proj",
            up="mlp.shared_expert.up_proj",
            down="mlp.shared_expert.down_proj",
        ),
        shared_gate="mlp.shared_expert_gate",
    )
    attention = replace(parts.attention, qkv_bias=config.boolean("qkv_bias", True), output_bias=False)
    return assemble(
        config,
        parts,
        attention=[replace(attention, sliding_window=window) for window in _windows(config, parts.layers)],
        mlp=read_sparse_layers(config, parts.layers, moe, parts.mlp),
    )


def _windows(config: ConfigReader, layers: int) -> list[int | None]:
    window = config.integer("sliding_window") if config.boolean("use_sliding_window", False) else None
    allowed = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    kinds = config.choices("layer_types", layers, allowed)
    if kinds is None:
        below = config.integer("max_window_layers", 28, least=0)
        return [window if index % 2 == 0 and index < below else None for index in range(layers)]
    return [window if kind == "sliding_attention" else None for kind in kinds]
