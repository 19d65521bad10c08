"""GPT-NeoX: Pythia, Dolly v2, RedPajama; attention and feed-forward side by side, part of each head rotated."""

from octavo.models.classic import ClassicBuilder, head_shape
from octavo.models.config import ConfigReader, read_rope
from octavo.models.graph import Graph

ARCHITECTURES = ("GPTNeoXForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph, with parallel or (`use_parallel_residual` false) sequential residuals."""
    config = config.aliased(partial_rotary_factor="rotary_pct", rope_theta="rotary_emb_base")
    attention_bias = config.boolean("attention_bias", True)
    graph = ClassicBuilder.of(config)
    hidden, positions = graph.hidden_size, config.integer("max_position_embeddings")
    heads = head_shape(config, hidden, config.integer("num_attention_heads"))
    inner, activation = config.integer("intermediate_size"), config.activation("hidden_act", "gelu")
    rope = read_rope(config, heads.head_dim, positions, partial=0.25)
    parallel = config.boolean("use_parallel_residual", True)
    x = graph.embedding("gpt_neox.embed_in.weight")
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"gpt_neox.layers.{index}"
            h = graph.norm(x, f"{layer}.input_layernorm")
            attended = graph.attention(
                *graph.fused_heads(h, f"{layer}.attention.query_key_value", heads, attention_bias),
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=rope,
            )
            if parallel:
                h = graph.norm(x, f"{layer}.post_attention_layernorm")
            x = graph.add(x, graph.project(attended, f"{layer}.attention.dense", hidden, attention_bias))
            if not parallel:
                h = graph.norm(x, f"{layer}.post_attention_layernorm")
            x = graph.add(
                x, graph.mlp(h, f"{layer}.mlp.dense_h_to_4h", f"{layer}.mlp.dense_4h_to_h", inner, activation)
            )
    return graph.finish(
        graph.norm(x, "gpt_neox.final_layer_norm"),
        embedding="gpt_neox.embed_in",
        head="embed_out",
        max_position=positions,
        renames=(("embed_out.", "lm_head."),),
        buffers=r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
    )
