"""Ministral: Mistral with a kind of attention for each layer, sliding or full."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, patterned_windows, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("MinistralForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config.require("attention_bias", (False,))
    parts = read_parts(config)
    windows = patterned_windows(config, parts.layers, 4096, parts.layers + 1)
    return assemble(config, parts, attention=[replace(parts.attention, sliding_window=window) for window in windows])
