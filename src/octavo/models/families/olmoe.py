"""OLMoE: Llama with a norm over all queries and one over all keys, and a mixture of experts in every layer."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph
from octavo.models.moe_blocks import MoeMlp, Routing, read_expert_count, separate_experts

ARCHITECTURES = ("OlmoeForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    parts = read_parts(config, eps=1e-5)
    experts = read_expert_count(config, "num_experts", "num_local_experts")
    moe = MoeMlp(
        hidden=parts.mlp.hidden,
        intermediate=parts.mlp.intermediate,
        experts=experts,
        routing=Routing(
            top_k=config.integer("num_experts_per_tok"), renormalize=config.boolean("norm_topk_prob", False)
        ),
        names=separate_experts(experts),
    )
    return assemble(config, parts, attention=replace(parts.attention, norms="wide"), mlp=moe)
