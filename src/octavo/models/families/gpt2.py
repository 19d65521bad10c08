"""GPT-2: learned positions, layer norms, one fused projection to q, k and v, weights stored [in, out].

GGUF files hold the same weights [out, in]; their configuration says so with `conv1d` false.
"""

from octavo.models.classic import ClassicBuilder, head_shape
from octavo.models.config import ConfigReader
from octavo.models.graph import Graph, Value

ARCHITECTURES = ("GPT2LMHeadModel",)


def build(config: ConfigReader) -> Graph:
    """The graph, with the scales of attention that the configuration asks for."""
    config = config.aliased(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    graph = ClassicBuilder.of(config, eps="layer_norm_epsilon")
    hidden, positions = graph.hidden_size, config.integer("max_position_embeddings")
    heads = head_shape(config, hidden, config.integer("num_attention_heads"))
    inner = config.integer("n_inner", 4 * hidden)
    activation = config.activation("activation_function", "gelu_new")
    base_scale = heads.head_dim**-0.5 if config.boolean("scale_attn_weights", True) else 1.0
    by_layer = config.boolean("scale_attn_by_inverse_layer_idx", False)
    transposed = config.boolean("conv1d", True)

    def conv1d(x: Value, name: str, inputs: int, outputs: int) -> Value:
        if not transposed:
            return graph.project(x, name, outputs)
        weight = graph.derive(f"{name}.weight", "transposed", (inputs, outputs), transposed=True)
        return graph.linear(x, weight, outputs, f"{name}.bias")

    x = graph.add(
        graph.embedding("transformer.wte.weight"), graph.position_embedding("transformer.wpe.weight", positions)
    )
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"transformer.h.{index}"
            qkv = conv1d(graph.norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn", hidden, 3 * hidden)
            attended = graph.attention(
                qkv,
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=None,
                scale=base_scale / (index + 1 if by_layer else 1),
            )
            x = graph.add(x, conv1d(attended, f"{layer}.attn.c_proj", hidden, hidden))
            h = conv1d(graph.norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc", hidden, inner)
            x = graph.add(x, conv1d(graph.activate(h, activation), f"{layer}.mlp.c_proj", inner, hidden))
    return graph.finish(
        graph.norm(x, "transformer.ln_f"),
        embedding="transformer.wte",
        max_position=positions,
        tied=True,
        renames=(("transformer.", ""),),
        buffers=r"\.attn\.(bias|masked_bias)$",
    )
