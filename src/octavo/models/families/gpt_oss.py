"""gpt-oss: attention with a sink for each head, in every second layer to a window, and experts of a clamped SwiGLU."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, patterned_windows, read_parts
from octavo.models.graph import Graph
from octavo.models.moe_blocks import MoeMlp, Routing, read_expert_count, stacked_experts

ARCHITECTURES = ("GptOssForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph. Experts are chosen by logit, and weighted by a softmax over those chosen.

    Matrices of experts are stored [in, out], but those in MXFP4 [out, in], as blocks of a row lie along what is summed.
    """
    parts = read_parts(config, head_dim=64, eps=1e-5, theta=150000.0, bias=True)
    hidden, intermediate = parts.mlp.hidden, parts.mlp.intermediate
    experts = read_expert_count(config, "num_local_experts", "num_experts")
    top_k = config.integer("num_experts_per_tok", 4)
    config.require("experts_per_token", (top_k,))
    moe = MoeMlp(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        routing=Routing(top_k=top_k, scoring="softmax_of_chosen"),
        names=stacked_experts(
            experts,
            hidden,
            intermediate,
            gate_up="mlp.experts.gate_up_proj",
            down="mlp.experts.down_proj",
            transposed=not _in_mxfp4(config),
            alternating=True,
            biases=True,
        ),
        router="mlp.router",
        router_bias=True,
        activation="clamped_silu_mul",
        limits={"alpha": config.number("swiglu_alpha", 1.702), "limit": config.number("swiglu_limit", 7.0)},
    )
    windows = patterned_windows(config, parts.layers, 128, 2)
    attention = replace(parts.attention, sinks="self_attn.sinks")
    return assemble(config, parts, attention=[replace(attention, sliding_window=window) for window in windows], mlp=moe)


def _in_mxfp4(config: ConfigReader) -> bool:
    details = config.values.get("quantization_config")
    return isinstance(details, dict) and details.get("quant_method") == "mxfp4"
