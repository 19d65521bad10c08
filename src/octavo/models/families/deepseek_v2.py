"""DeepSeek-V2: latent attention, and from some layer on experts in groups beside shared ones."""

import math
from dataclasses import replace

from octavo.models.blocks import Block
from octavo.models.config import ConfigReader
from octavo.models.decoder import Parts, assemble, read_parts
from octavo.models.graph import Graph
from octavo.models.moe_blocks import LatentSelfAttention, MoeMlp, Routing, read_expert_count, separate_experts

ARCHITECTURES = ("DeepseekV2ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config.require("norm_topk_prob", (False,))
    config.require("scoring_func", ("softmax",))
    config.require("topk_method", ("greedy", "group_limited_greedy"))
    grouped = config.values.get("topk_method") == "group_limited_greedy"
    routing = Routing(
        top_k=config.integer("num_experts_per_tok"),
        scale=config.number("routed_scaling_factor", 1.0),
        groups=config.integer("n_group") if grouped else 1,
        top_groups=config.integer("topk_group") if grouped else 1,
    )
    return build_deepseek(config, routing, neighbours=True)


def build_deepseek(config: ConfigReader, routing: Routing, *, neighbours: bool) -> Graph:
    """What the versions have in common; `neighbours` is how rotated pairs lie."""
    rope_dim = config.integer("qk_rope_head_dim")
    config.require("head_dim", (rope_dim,))
    parts = read_parts(config, head_dim=rope_dim)
    heads = parts.attention.q_heads
    config.require("num_key_value_heads", (heads,))
    nope_dim = config.integer("qk_nope_head_dim")
    config.require("qk_head_dim", (nope_dim + rope_dim,))
    assert parts.attention.rope is not None
    attention = LatentSelfAttention(
        hidden=parts.mlp.hidden,
        heads=heads,
        nope_dim=nope_dim,
        value_dim=config.integer("v_head_dim"),
        rank=config.integer("kv_lora_rank"),
        q_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
        rope=parts.attention.rope,
        scale=_temperature(config) / math.sqrt(nope_dim + rope_dim),
        neighbours=neighbours,
        bias=parts.attention.qkv_bias,
    )
    dense = replace(parts.mlp, bias=config.boolean("mlp_bias", False))
    return assemble(config, parts, attention=attention, mlp=feed_forwards(config, parts, dense, routing))


def feed_forwards(config: ConfigReader, parts: Parts, dense: Block, routing: Routing) -> list[Block]:
    """Dense layers first, then mixtures."""
    config.require("moe_layer_freq", (1,))
    experts = read_expert_count(config, "n_routed_experts", "num_experts", "num_local_experts")
    size = config.integer("moe_intermediate_size")
    moe = MoeMlp(
        hidden=parts.mlp.hidden,
        intermediate=size,
        experts=experts,
        routing=routing,
        names=separate_experts(experts),
        shared=replace(
            parts.mlp,
            intermediate=size * config.integer("n_shared_experts"),
            gate="mlp.shared_experts.gate_proj",
            up="mlp.shared_experts.up_proj",
            down="mlp.shared_experts.down_proj",
            bias=config.boolean("mlp_bias", False),
        ),
    )
    first = config.integer("first_k_dense_replace", 0, least=0)
    return [dense if index < first else moe for index in range(parts.layers)]


def _temperature(config: ConfigReader) -> float:
    """What YaRN (arXiv 2309.00071, section 3.4) multiplies scores by where `mscale_all_dim` asks for it."""
    scaling = config.mapping("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    weight = scaling.number("mscale_all_dim") if scaling.values.get("mscale_all_dim") else None
    factor = scaling.number("factor", 1.0)
    return 1.0 if weight is None or factor <= 1 else (0.1 * weight * math.log(factor) + 1.0) ** 2
