"""OLMo 2: norms behind each block instead of before it, and one over the whole of the queries and of the keys."""

from dataclasses import replace

from octavo.models.blocks import Names
from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("Olmo2ForCausalLM",)

NAMES = Names(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    parts = read_parts(config, eps=1e-5)
    return assemble(config, parts, attention=replace(parts.attention, norms="wide"), names=NAMES)
