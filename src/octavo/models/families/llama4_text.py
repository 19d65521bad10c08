"""Llama 4 (text): chunks of attention in layers with rope, one expert of many beside a shared one."""

from dataclasses import replace

from octavo.models.blocks import GatedMlp, SelfAttention
from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.families.smollm3 import rotated_layers
from octavo.models.graph import Graph
from octavo.models.moe_blocks import MoeMlp, Routing, read_expert_count, stacked_experts
from octavo.models.rope import QueryScaling

ARCHITECTURES = ("Llama4ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph. A token's experts are given what the sigmoid of their logits leaves of it."""
    parts = read_parts(config, head_dim=128, eps=1e-5, theta=500000.0)
    hidden, intermediate = parts.mlp.hidden, parts.mlp.intermediate
    experts = read_expert_count(config, "num_local_experts")
    moe = MoeMlp(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        routing=Routing(top_k=config.integer("num_experts_per_tok", 1), scoring="sigmoid"),
        names=stacked_experts(
            experts,
            hidden,
            intermediate,
            gate_up="feed_forward.experts.gate_up_proj",
            down="feed_forward.experts.down_proj",
            transposed=True,
        ),
        router="feed_forward.router",
        scale_inputs=True,
        shared=_mlp(hidden, intermediate, "feed_forward.shared_expert"),
    )
    dense = _mlp(hidden, config.integer("intermediate_size_mlp", 16384), "feed_forward")
    sparse = _sparse_layers(config, parts.layers)
    return assemble(
        config,
        parts,
        attention=_attentions(config, parts.attention, parts.layers),
        mlp=[moe if index in sparse else dense for index in range(parts.layers)],
    )


def _mlp(hidden: int, intermediate: int, prefix: str) -> GatedMlp:
    gate, up, down = (f"{prefix}.{name}_proj" for name in ("gate", "up", "down"))
    return GatedMlp(hidden=hidden, intermediate=intermediate, gate=gate, up=up, down=down)


def _sparse_layers(config: ConfigReader, layers: int) -> set[int]:
    """The layers with experts: those named, else every `interleave_moe_layer_step`-th."""
    step = config.integer("interleave_moe_layer_step", 1)
    given = config.values.get("moe_layers")
    config.read.add("moe_layers")
    if given is None:
        return set(range(step - 1, layers, step))
    if not isinstance(given, list) or not all(isinstance(index, int) and 0 <= index < layers for index in given):
        raise config.refusal("moe_layers", f"layer numbers from 0 to {layers - 1}")
    return set(given)


def _attentions(config: ConfigReader, attention: SelfAttention, layers: int) -> list[SelfAttention]:
    """Layers with rope have norms of heads behind it, and chunks; queries of the others grow with their position."""
    chunks = config.optional("attention_chunk_size", 8192) is not None
    size = config.integer("attention_chunk_size", 8192) if chunks else None
    rotated = rotated_layers(config, layers)
    allowed = ("full_attention",) if size is None else ("full_attention", "chunked_attention")
    kinds = config.choices("layer_types", layers, allowed)
    if kinds is None:
        kinds = [allowed[-1] if rope else allowed[0] for rope in rotated]
    norms = config.boolean("use_qk_norm", True)
    scaling = None
    if config.boolean("attn_temperature_tuning", True):
        scaling = QueryScaling(config.number("attn_scale", 0.1), config.integer("floor_scale", 8192), 1)
    with_rope = replace(attention, neighbours=True, norms="unit" if norms else None, norm_after_rope=norms)
    without = replace(attention, rope=None, query_scaling=scaling)
    return [
        replace(
            with_rope if rope else without,
            sliding_window=size if kind == "chunked_attention" else None,
            chunked=kind == "chunked_attention",
        )
        for rope, kind in zip(rotated, kinds, strict=True)
    ]
