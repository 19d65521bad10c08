"""GPT-J: attention and feed-forward side by side from one norm, pairs of neighbours rotated in part of each head."""

from collections.abc import Callable

from octavo.models.classic import ClassicBuilder, head_shape
from octavo.models.config import ConfigReader
from octavo.models.derived import rotated_pairs
from octavo.models.graph import Graph, Value
from octavo.models.rope import Rope

QkvBuilder = Callable[[ClassicBuilder, Value, str, int], tuple[Value, ...]]
ARCHITECTURES = ("GPTJForCausalLM",)
SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config = config.aliased(**SIZES)

    def qkv(graph: ClassicBuilder, h: Value, attention: str, rotary: int) -> tuple[Value, ...]:
        hidden = graph.hidden_size
        pairs = rotated_pairs(hidden // config.integer("num_attention_heads"), rotary)
        return (
            graph.project_rows(h, f"{attention}.q_proj", pairs, "pairs", hidden, hidden),
            graph.project_rows(h, f"{attention}.k_proj", pairs, "pairs", hidden, hidden),
            graph.project(h, f"{attention}.v_proj", hidden),
        )

    return build_gptj(config, qkv, r"\.attn\.(bias|masked_bias)$")


def build_gptj(config: ConfigReader, qkv: QkvBuilder, buffers: str) -> Graph:
    """The graph with its projections to q, k and v, which CodeGen fuses in its own way."""
    graph = ClassicBuilder.of(config, eps="layer_norm_epsilon", bias=False)
    hidden, positions = graph.hidden_size, config.integer("max_position_embeddings")
    heads = head_shape(config, hidden, config.integer("num_attention_heads"))
    inner = config.integer("n_inner", 4 * hidden)
    activation = config.activation("activation_function", "gelu_new")
    rotary = config.integer("rotary_dim", most=heads.head_dim)
    if rotary % 2:
        raise config.refusal("rotary_dim", "even")
    x = graph.embedding("transformer.wte.weight")
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"transformer.h.{index}"
            h = graph.norm(x, f"{layer}.ln_1")
            attended = graph.attention(
                *qkv(graph, h, f"{layer}.attn", rotary),
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=Rope("default", 10000.0, rotary),
            )
            x = graph.add(x, graph.project(attended, f"{layer}.attn.out_proj", hidden))
            x = graph.add(x, graph.mlp(h, f"{layer}.mlp.fc_in", f"{layer}.mlp.fc_out", inner, activation, bias=True))
    return graph.finish(
        graph.norm(x, "transformer.ln_f"),
        embedding="transformer.wte",
        max_position=positions,
        head_bias=True,
        buffers=buffers,
    )
