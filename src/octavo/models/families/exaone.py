"""EXAONE 3: Llama by the names of GPT-2."""

from dataclasses import replace

from octavo.models.blocks import Names
from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("ExaoneForCausalLM",)

NAMES = Names(
    embedding="transformer.wte",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    before_attention="ln_1",
    before_mlp="ln_2",
)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config = config.aliased(
        num_hidden_layers="num_layers", rms_norm_eps="layer_norm_epsilon", hidden_act="activation_function"
    )
    parts = read_parts(config, eps=1e-5, theta=500000.0)
    inner = "attn.attention"
    return assemble(
        config,
        parts,
        attention=replace(
            parts.attention,
            q=f"{inner}.q_proj",
            k=f"{inner}.k_proj",
            v=f"{inner}.v_proj",
            output=f"{inner}.out_proj",
        ),
        mlp=replace(parts.mlp, gate="mlp.c_fc_0", up="mlp.c_fc_1", down="mlp.c_proj"),
        names=NAMES,
    )
