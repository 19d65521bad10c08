"""GLM-4.5: grouped-query attention that rotates half of each head, and DeepSeek-V3's experts."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.families.deepseek_v2 import feed_forwards
from octavo.models.families.deepseek_v3 import read_routing, without_prediction_layers
from octavo.models.graph import Graph

ARCHITECTURES = ("Glm4MoeForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph; layers for multi-token prediction, which come after the others, are not run."""
    parts = read_parts(config, eps=1e-5, partial=0.5)
    norms = config.boolean("use_qk_norm", False)
    attention = replace(parts.attention, output_bias=False, norms="head" if norms else None)
    routing = read_routing(config, groups=1, top_groups=1, scale=1.0)
    mlp = feed_forwards(config, parts, parts.mlp, routing)
    return without_prediction_layers(config, assemble(config, parts, attention=attention, mlp=mlp))
