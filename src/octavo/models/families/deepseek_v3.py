"""DeepSeek-V3 and R1: DeepSeek-V2 with sigmoid scores, and a bias of each expert that only its choice depends on."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.families.deepseek_v2 import build_deepseek
from octavo.models.graph import Graph
from octavo.models.moe_blocks import Routing

ARCHITECTURES = ("DeepseekV3ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph; layers for multi-token prediction, which come after the others, are not run."""
    routing = read_routing(config, groups=8, top_groups=4, scale=2.5)
    graph = build_deepseek(config, routing, neighbours=config.boolean("rope_interleave", True))
    return without_prediction_layers(config, graph)


def read_routing(config: ConfigReader, *, groups: int, top_groups: int, scale: float) -> Routing:
    """Routing by sigmoid scores and corrections (arXiv 2412.19437, section 2.1.2), with the family's defaults."""
    config.require("scoring_func", ("sigmoid",))
    config.require("topk_method", ("noaux_tc",))
    return Routing(
        top_k=config.integer("num_experts_per_tok"),
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", scale),
        correction="mlp.gate.e_score_correction_bias",
        groups=config.integer("n_group", groups),
        top_groups=config.integer("topk_group", top_groups),
        group_pairs=True,
    )


def without_prediction_layers(config: ConfigReader, graph: Graph) -> Graph:
    """The graph, for a checkpoint that may hold layers for multi-token prediction behind its own."""
    name = "num_nextn_predict_layers" if config.has("num_nextn_predict_layers") else "num_mtp_layers"
    count = config.integer(name, 1, least=0, most=64)
    return replace(graph, unused=tuple(f"model.layers.{graph.num_layers + index}." for index in range(count)))
