"""OLMo: Llama with layer norms that have no weights, and queries, keys and values held within a limit."""

from dataclasses import replace

from octavo.models.blocks import Norm
from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("OlmoForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    parts = replace(read_parts(config), norm=Norm(1e-5, kind="plain_layer"))
    return assemble(config, parts, attention=replace(parts.attention, clip=config.optional("clip_qkv")))
