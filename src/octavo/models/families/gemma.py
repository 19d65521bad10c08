"""Gemma: norms that multiply by (1 + weight), an embedding scaled by the root of its width, and GELU."""

from dataclasses import replace

from octavo.models.blocks import Norm, as_stored
from octavo.models.config import ConfigReader
from octavo.models.decoder import Parts, Scales, assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("GemmaForCausalLM",)


def read_gemma(config: ConfigReader, *, rope: bool = True) -> Parts:
    """The parts all Gemmas have."""
    parts = read_parts(config, head_dim=256, rope=rope)
    return replace(
        parts, mlp=replace(parts.mlp, activation="gelu_tanh"), norm=Norm(parts.norm.eps, kind="rms_plus_one")
    )


def embedding_scale(config: ConfigReader, parts: Parts) -> float:
    """The root of the width, rounded to what the weights are stored in."""
    return as_stored(config, parts.attention.hidden**0.5)


def build(config: ConfigReader) -> Graph:
    """The graph. What old configurations call gelu was always its tanh approximation."""
    config.require("hidden_act", ("gelu", "gelu_pytorch_tanh"))
    config.require("hidden_activation", ("gelu_pytorch_tanh",))
    parts = read_gemma(config)
    return assemble(config, parts, scales=Scales(embedding=embedding_scale(config, parts)), tied=True)
