"""Gemma 2: Gemma with norms behind its blocks too, soft caps, and a sliding window in every other layer."""

from dataclasses import replace

from octavo.models.blocks import Names
from octavo.models.config import ConfigReader
from octavo.models.decoder import Scales, assemble, patterned_windows
from octavo.models.families.gemma import embedding_scale, read_gemma
from octavo.models.graph import Graph

ARCHITECTURES = ("Gemma2ForCausalLM",)

NAMES = Names(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    for name in ("hidden_act", "hidden_activation"):
        config.require(name, ("gelu_pytorch_tanh",))
    parts = read_gemma(config)
    attention = replace(
        parts.attention,
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=config.optional("attn_logit_softcapping", 50.0),
    )
    return assemble(
        config,
        parts,
        attention=[
            replace(attention, sliding_window=window) for window in patterned_windows(config, parts.layers, 4096, 2)
        ],
        names=NAMES,
        scales=Scales(
            embedding=embedding_scale(config, parts), softcap=config.optional("final_logit_softcapping", 30.0)
        ),
        tied=True,
    )
