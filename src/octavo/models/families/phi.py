"""Phi-1, 1.5 and 2: attention and feed-forward side by side, biases on all linears, part of each head rotated."""

from octavo.models.classic import ClassicBuilder, head_shape
from octavo.models.config import ConfigReader, read_rope
from octavo.models.graph import Graph

ARCHITECTURES = ("PhiForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config.require("qk_layernorm", (False,))
    graph = ClassicBuilder.of(config)
    hidden, positions = graph.hidden_size, config.integer("max_position_embeddings", 2048)
    heads = head_shape(config, hidden)
    inner, activation = config.integer("intermediate_size"), config.activation("hidden_act", "gelu_new")
    rope = read_rope(config, heads.head_dim, positions, partial=0.5)
    x = graph.embedding("model.embed_tokens.weight")
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"model.layers.{index}"
            attention = f"{layer}.self_attn"
            h = graph.norm(x, f"{layer}.input_layernorm")
            attended = graph.attention(
                graph.project(h, f"{attention}.q_proj", heads.q_width),
                graph.project(h, f"{attention}.k_proj", heads.kv_width),
                graph.project(h, f"{attention}.v_proj", heads.kv_width),
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=rope,
            )
            x = graph.add(x, graph.project(attended, f"{attention}.dense", hidden))
            x = graph.add(x, graph.mlp(h, f"{layer}.mlp.fc1", f"{layer}.mlp.fc2", inner, activation))
    return graph.finish(
        graph.norm(x, "model.final_layernorm"),
        embedding="model.embed_tokens",
        max_position=positions,
        head_bias=True,
    )
