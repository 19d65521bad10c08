"""GLM-4-0414 (transformers' glm4): GLM with norms behind its blocks too."""

from octavo.models.blocks import Names
from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble
from octavo.models.families.glm import read_glm
from octavo.models.graph import Graph

ARCHITECTURES = ("Glm4ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    names = Names(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
    return assemble(config, read_glm(config), names=names)
