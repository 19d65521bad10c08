"""GLM-4 (transformers' glm): Llama with half of each head rotated in neighbouring pairs, and gate, up in one tensor."""

from dataclasses import replace

from octavo.models.config import ConfigReader
from octavo.models.decoder import Parts, assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("GlmForCausalLM",)


def read_glm(config: ConfigReader) -> Parts:
    """The parts of the GLMs."""
    parts = read_parts(config, head_dim=128, eps=1.5625e-7, partial=0.5, bias=True)
    return replace(
        parts,
        attention=replace(parts.attention, output_bias=False, neighbours=True),
        mlp=replace(parts.mlp, gate_up="mlp.gate_up_proj"),
    )


def build(config: ConfigReader) -> Graph:
    """The graph."""
    return assemble(config, read_glm(config))
