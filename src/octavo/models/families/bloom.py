"""BLOOM: ALiBi slopes in place of positions, a layer norm on the embedding, q, k and v interleaved head by head."""

from octavo.models.classic import ClassicBuilder, alibi_slopes, head_shape
from octavo.models.config import ConfigReader
from octavo.models.graph import Graph

ARCHITECTURES = ("BloomForCausalLM",)
# Slopes have no end of their own; the models were trained on sequences of this length.
_TRAINED_LENGTH = 2048


def build(config: ConfigReader) -> Graph:
    """The graph; the residual is the layer's input, or its norm with `apply_residual_connection_post_layernorm`."""
    config = config.aliased(hidden_size="n_embed", num_hidden_layers="n_layer", num_attention_heads="n_head")
    graph = ClassicBuilder.of(config, eps="layer_norm_epsilon")
    hidden = graph.hidden_size
    heads = head_shape(config, hidden, config.integer("num_attention_heads"))
    after_norm = config.boolean("apply_residual_connection_post_layernorm", False)
    x = graph.norm(graph.embedding("transformer.word_embeddings.weight"), "transformer.word_embeddings_layernorm")
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"transformer.h.{index}"
            h = graph.norm(x, f"{layer}.input_layernorm")
            attended = graph.attention(
                *graph.fused_heads(h, f"{layer}.self_attention.query_key_value", heads),
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=None,
                alibi=alibi_slopes(heads.q_heads),
            )
            residual = h if after_norm else x
            x = graph.add(residual, graph.project(attended, f"{layer}.self_attention.dense", hidden))
            h = graph.norm(x, f"{layer}.post_attention_layernorm")
            residual, mlp = h if after_norm else x, f"{layer}.mlp"
            x = graph.add(
                residual, graph.mlp(h, f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h", 4 * hidden, "gelu_tanh")
            )
    return graph.finish(
        graph.norm(x, "transformer.ln_f"),
        embedding="transformer.word_embeddings",
        max_position=config.integer("seq_length", _TRAINED_LENGTH),
        tied=True,
        renames=(("transformer.", ""),),
    )
