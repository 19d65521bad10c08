"""MiniCPM: Llama with the embedding, what each block adds and the logits scaled by the depth and width of the model."""

from octavo.models.config import ConfigReader
from octavo.models.decoder import Scales, assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("MiniCPMForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph. Depth scaling is by the root of the number of layers, width scaling by the width of a base model."""
    config.require("sparse_config", ())
    parts = read_parts(config)
    return assemble(
        config,
        parts,
        scales=Scales(
            embedding=config.number("scale_emb", 1.0),
            residual=config.number("scale_depth", 1.0) / parts.layers**0.5,
            logits=config.number("dim_model_base", 1.0) / parts.attention.hidden,
        ),
        tied=True,
    )
