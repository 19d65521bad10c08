"""EXAONE 4: norms behind each block, head norms, and rope only in layers with a sliding window, if there are any."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, patterned_windows, read_parts
from octavo.models.families.olmo2 import NAMES
from octavo.models.graph import Graph

ARCHITECTURES = ("Exaone4ForCausalLM",)


def _period(config: ConfigReader) -> int:
    """Every how many layers there is a full one: a number, or as many letters, L for local, G (global) last."""
    pattern = config.values.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return config.integer("sliding_window_pattern", 4, least=0)
    if pattern != "L" * (len(pattern) - 1) + "G":
        raise config.refusal("sliding_window_pattern", "a number, or letters like LLLG")
    return len(pattern)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config.require("attention_bias", (False,))
    parts = read_parts(config, eps=1e-5)
    attention = replace(parts.attention, norms="head")
    period = _period(config)
    windows = patterned_windows(config, parts.layers, 4096, period or parts.layers + 1)
    everywhere = config.optional("sliding_window", 4096) is None
    return assemble(
        config,
        parts,
        attention=[
            replace(
                attention, sliding_window=window, rope=None if window is None and not everywhere else attention.rope
            )
            for window in windows
        ],
        names=NAMES,
    )
