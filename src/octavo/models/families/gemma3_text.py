"""Gemma 3, its text model: Gemma 2 with norms of queries and keys for the caps, and two ropes, local and global."""

from dataclasses import replace

from octavo.models.config import ConfigReader, read_layer_ropes
from octavo.models.decoder import Scales, assemble, patterned_windows, usable_positions
from octavo.models.families.gemma import embedding_scale, read_gemma
from octavo.models.families.gemma2 import NAMES
from octavo.models.graph import Graph

ARCHITECTURES = ("Gemma3ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    for name in ("hidden_act", "hidden_activation"):
        config.require(name, ("gelu_pytorch_tanh",))
    parts = read_gemma(config, rope=False)
    full, local = read_layer_ropes(config, parts.attention.head_dim, parts.max_position, theta=1e6, local_theta=1e4)
    attention = replace(
        parts.attention,
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        norms="head",
        norm_plus_one=True,
    )
    windows = patterned_windows(config, parts.layers, 4096, config.integer("sliding_window_pattern", 6))
    return assemble(
        config,
        replace(parts, max_position=usable_positions(config, full, parts.max_position)),
        attention=[
            replace(attention, sliding_window=window, rope=full if window is None else local) for window in windows
        ],
        names=NAMES,
        scales=Scales(embedding=embedding_scale(config, parts), softcap=config.optional("final_logit_softcapping")),
        tied=True,
    )
