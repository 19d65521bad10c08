"""SmolLM3: Llama with every fourth layer left without rope, and windows, if any, in those layers."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("SmolLM3ForCausalLM",)


def rotated_layers(config: ConfigReader, layers: int) -> list[bool]:
    """Which layers have rope: those with a 1 in `no_rope_layers`, else all but every `no_rope_layer_interval`-th."""
    given = config.values.get("no_rope_layers")
    config.read.add("no_rope_layers")
    if given is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return [index % interval != 0 for index in range(1, layers + 1)]
    if not isinstance(given, list) or len(given) != layers or not all(item in (0, 1) for item in given):
        raise config.refusal("no_rope_layers", f"{layers} of 0 and 1")
    return [bool(item) for item in given]


def build(config: ConfigReader) -> Graph:
    """The graph."""
    parts = read_parts(config, theta=2e6)
    rotated = rotated_layers(config, parts.layers)
    window = config.integer("sliding_window") if config.boolean("use_sliding_window", False) else None
    allowed = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    kinds = config.choices("layer_types", parts.layers, allowed)
    if kinds is None:
        kinds = [allowed[0] if rope else allowed[-1] for rope in rotated]
    return assemble(
        config,
        parts,
        attention=[
            replace(
                parts.attention,
                rope=parts.attention.rope if rope else None,
                sliding_window=window if kind == "sliding_attention" else None,
            )
            for rope, kind in zip(rotated, kinds, strict=True)
        ],
        mlp=replace(parts.mlp, bias=config.boolean("mlp_bias", False)),
        tied=True,
    )
