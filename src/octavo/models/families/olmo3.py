"""OLMo 3: OLMo 2 with a sliding window in three layers of four, which may have a rope of their own."""

from dataclasses import replace

from octavo.models.config import ConfigReader, read_layer_ropes
from octavo.models.decoder import assemble, patterned_windows, read_parts, usable_positions
from octavo.models.families.olmo2 import NAMES
from octavo.models.graph import Graph

ARCHITECTURES = ("Olmo3ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    parts = read_parts(config, eps=1e-5, rope=False)
    theta = config.number("rope_theta", 500000.0)
    full, local = read_layer_ropes(config, parts.attention.head_dim, parts.max_position, theta=theta, local_theta=theta)
    attention = replace(parts.attention, norms="wide")
    return assemble(
        config,
        replace(parts, max_position=usable_positions(config, full, parts.max_position)),
        attention=[
            replace(attention, sliding_window=window, rope=full if window is None else local)
            for window in patterned_windows(config, parts.layers, 4096, 4)
        ],
        names=NAMES,
    )
