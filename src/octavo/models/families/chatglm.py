"""ChatGLM 2 and 3, and GLM-4 as first published: GLM by other names, with q, k and v in one tensor."""

from dataclasses import replace

from octavo.models.blocks import Names
from octavo.models.config import ConfigReader
from octavo.models.decoder import assemble, read_parts
from octavo.models.graph import Graph

ARCHITECTURES = ("ChatGLMModel", "ChatGLMForConditionalGeneration")

NAMES = Names(
    embedding="transformer.embedding.word_embeddings",
    layers="transformer.encoder.layers",
    final_norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer",
)
# What a configuration of another value would change.
_FIXED: dict[str, tuple[object, ...]] = {
    "rmsnorm": (True,),
    "original_rope": (True,),
    "post_layer_norm": (True,),
    "apply_residual_connection_post_layernorm": (False,),
    "add_bias_linear": (False,),
    "quantization_bit": (0,),
    "pre_seq_len": (),
}


def build(config: ConfigReader) -> Graph:
    """The graph. `rope_ratio` stretches the base of the rotation, half of each head is rotated."""
    for name, allowed in _FIXED.items():
        config.require(name, allowed)
    config = config.aliased(
        num_hidden_layers="num_layers",
        vocab_size="padded_vocab_size",
        intermediate_size="ffn_hidden_size",
        head_dim="kv_channels",
        rms_norm_eps="layernorm_epsilon",
        max_position_embeddings="seq_length",
        attention_bias="add_qkv_bias",
        **({"num_key_value_heads": "multi_query_group_num"} if config.boolean("multi_query_attention", False) else {}),
    )
    parts = read_parts(config, eps=1e-5, theta=10000.0 * config.number("rope_ratio", 1.0), partial=0.5)
    return assemble(
        config,
        parts,
        attention=replace(
            parts.attention,
            qkv="self_attention.query_key_value",
            output="self_attention.dense",
            output_bias=False,
            neighbours=True,
        ),
        mlp=replace(parts.mlp, gate_up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
        names=NAMES,
    )
