"""GPT-BigCode: SantaCoder, StarCoder; GPT-2 with one kv head (or q, k and v interleaved), weights stored [out, in]."""

from octavo.models.classic import ClassicBuilder, head_shape
from octavo.models.config import ConfigReader
from octavo.models.graph import Graph, Value

ARCHITECTURES = ("GPTBigCodeForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config = config.aliased(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    graph = ClassicBuilder.of(config, eps="layer_norm_epsilon")
    hidden, positions = graph.hidden_size, config.integer("max_position_embeddings")
    single = config.boolean("multi_query", True)
    heads = head_shape(config, hidden, 1 if single else config.integer("num_attention_heads"))
    inner = config.integer("n_inner", 4 * hidden)
    activation = config.activation("activation_function", "gelu_pytorch_tanh")
    scale = heads.head_dim**-0.5 if config.boolean("scale_attn_weights", True) else 1.0

    def qkv(h: Value, name: str) -> tuple[Value, ...]:
        if single:
            return (graph.project(h, name, heads.q_width + 2 * heads.kv_width),)
        return graph.fused_heads(h, name, heads)

    x = graph.add(
        graph.embedding("transformer.wte.weight"), graph.position_embedding("transformer.wpe.weight", positions)
    )
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"transformer.h.{index}"
            attended = graph.attention(
                *qkv(graph.norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn"),
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=None,
                scale=scale,
            )
            x = graph.add(x, graph.project(attended, f"{layer}.attn.c_proj", hidden))
            h = graph.norm(x, f"{layer}.ln_2")
            x = graph.add(x, graph.mlp(h, f"{layer}.mlp.c_fc", f"{layer}.mlp.c_proj", inner, activation))
    return graph.finish(
        graph.norm(x, "transformer.ln_f"),
        embedding="transformer.wte",
        max_position=positions,
        tied=True,
        buffers=r"\.attn\.(bias|masked_bias)$",
    )
