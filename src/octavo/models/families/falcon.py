"""Falcon 7b, 40b, 180b and rw: attention and feed-forward side by side, heads rotated or (rw) under ALiBi slopes."""

from octavo.models.classic import ClassicBuilder, HeadShape, alibi_slopes, head_shape
from octavo.models.config import ConfigReader, read_rope
from octavo.models.graph import Graph, Value

ARCHITECTURES = ("FalconForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph of any generation: one kv head (7b), groups of heads with their own norms (40b, 180b), or all (rw)."""
    config = config.aliased(hidden_size="n_embed")
    config.require("apply_residual_connection_post_layernorm", (False,))
    new = config.boolean("new_decoder_architecture", False)
    single = not new and config.boolean("multi_query", True)
    parallel = config.boolean("parallel_attn", True)
    if new and not parallel:
        raise config.refusal("parallel_attn", "true where new_decoder_architecture is")
    separate = new and config.integer("num_ln_in_parallel_attn", 2, most=2) == 2
    if not separate:
        config.require("num_ln_in_parallel_attn", (1,))
    graph = ClassicBuilder.of(config, eps="layer_norm_epsilon", bias=config.boolean("bias", False))
    hidden, positions = graph.hidden_size, config.integer("max_position_embeddings", 2048)
    q_heads = config.integer("num_attention_heads")
    groups = config.integer("num_kv_heads", q_heads)
    if new and q_heads % groups:
        raise config.refusal("num_kv_heads", f"a divisor of num_attention_heads = {q_heads}")
    if not new and not single:
        config.require("num_kv_heads", (q_heads,))
    heads = head_shape(config, hidden, 1 if single else groups if new else q_heads)
    inner, activation = config.integer("ffn_hidden_size", 4 * hidden), config.activation("activation", "gelu")
    alibi = config.boolean("alibi", False)
    rope = None if alibi else read_rope(config, heads.head_dim, positions)
    # Falcon scales the sum of score and slope; here the slope is added to the scaled score.
    slopes = tuple(slope * heads.head_dim**-0.5 for slope in alibi_slopes(q_heads)) if alibi else None

    def qkv(h: Value, name: str, heads: HeadShape) -> tuple[Value, ...]:
        if heads.kv_heads == 1:
            return (graph.project(h, name, heads.q_width + 2 * heads.kv_width),)
        return graph.fused_heads(h, name, heads)

    x = graph.embedding("transformer.word_embeddings.weight")
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"transformer.h.{index}"
            h = graph.norm(x, f"{layer}.{'ln_attn' if separate else 'input_layernorm'}")
            attended = graph.attention(
                *qkv(h, f"{layer}.self_attention.query_key_value", heads),
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=rope,
                alibi=slopes,
            )
            if separate:
                h = graph.norm(x, f"{layer}.ln_mlp")
            x = graph.add(x, graph.project(attended, f"{layer}.self_attention.dense", hidden))
            if not parallel:
                h = graph.norm(x, f"{layer}.post_attention_layernorm")
            mlp = f"{layer}.mlp"
            x = graph.add(x, graph.mlp(h, f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h", inner, activation))
    return graph.finish(
        graph.norm(x, "transformer.ln_f"), embedding="transformer.word_embeddings", max_position=positions, tied=True
    )
