"""HunYuan, dense: Llama with norms of queries and keys behind the rotation."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("HunYuanDenseV1ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config.require("use_qk_norm", (True,))
    parts = read_parts(config, eps=1e-5)
    attention = replace(
        parts.attention,
        norms="head",
        norm_after_rope=True,
        q_norm="self_attn.query_layernorm",
        k_norm="self_attn.key_layernorm",
    )
    return assemble(config, parts, attention=attention)
