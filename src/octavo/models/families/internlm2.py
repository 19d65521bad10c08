"""InternLM 2 and 2.5: Llama by other names, with q, k and v of each kv head together in one tensor."""

from dataclasses import replace

from octavo.models.blocks import Names
from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("InternLM2ForCausalLM",)

NAMES = Names(embedding="model.tok_embeddings", head="output", before_attention="attention_norm", before_mlp="ffn_norm")


def build(config: ConfigReader) -> Graph:
    """The graph. `bias` is that of the attention's projections."""
    parts = read_parts(config)
    bias = config.boolean("bias", False)
    return assemble(
        config,
        parts,
        attention=replace(
            parts.attention,
            qkv="attention.wqkv",
            output="attention.wo",
            grouped=True,
            qkv_bias=bias,
            output_bias=bias,
        ),
        mlp=replace(parts.mlp, gate="feed_forward.w1", up="feed_forward.w3", down="feed_forward.w2"),
        names=NAMES,
    )
