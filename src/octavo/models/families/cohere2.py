"""Cohere 2, Command-R7B and Command-A: Cohere with windows in most layers, which alone are given positions."""

from octavo.models.config import MOST_LAYERS, ConfigReader
from octavo.models.families.cohere import build_cohere
from octavo.models.graph import Graph

ARCHITECTURES = ("Cohere2ForCausalLM",)
_KINDS = ("sliding_attention", "full_attention")


def build(config: ConfigReader) -> Graph:
    """The graph, the layers' kinds from `layer_types` or from the older `sliding_window_pattern`."""
    config.require("use_qk_norm", (False,))
    layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    window = config.integer("sliding_window", 4096)
    pattern = config.integer("sliding_window_pattern", 4)
    kinds = config.values.get("layer_types")
    if kinds is None:
        kinds = [_KINDS[(index + 1) % pattern == 0] for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in _KINDS for kind in kinds):
        raise config.refusal("layer_types", f"{layers} of {' or '.join(_KINDS)}")
    return build_cohere(config, windows=[window if kind == _KINDS[0] else None for kind in kinds])
