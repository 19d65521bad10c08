"""StarCoder 2: layer norms, biases everywhere, a feed-forward of two linears, a sliding window where one is given."""

from octavo.models.classic import ClassicBuilder, head_shape
from octavo.models.config import ConfigReader, read_rope
from octavo.models.graph import Graph

ARCHITECTURES = ("Starcoder2ForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config.require("layer_types", ())
    config.require("norm_type", ("layer_norm",))
    config.require("mlp_type", ("default",))
    graph = ClassicBuilder.of(config, eps="norm_epsilon", bias=config.boolean("use_bias", True))
    hidden, positions = graph.hidden_size, config.integer("max_position_embeddings")
    heads = head_shape(config, hidden)
    inner, activation = config.integer("intermediate_size"), config.activation("hidden_act", "gelu_pytorch_tanh")
    rope = read_rope(config, heads.head_dim, positions)
    window = config.integer("sliding_window") if config.has("sliding_window") else None
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
                sliding_window=window,
            )
            x = graph.add(x, graph.project(attended, f"{attention}.o_proj", hidden))
            h = graph.norm(x, f"{layer}.post_attention_layernorm")
            x = graph.add(x, graph.mlp(h, f"{layer}.mlp.c_fc", f"{layer}.mlp.c_proj", inner, activation))
    return graph.finish(graph.norm(x, "model.norm"), embedding="model.embed_tokens", max_position=positions, tied=True)
