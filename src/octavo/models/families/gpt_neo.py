"""GPT-Neo and TinyStories: GPT-2 with separate unscaled q, k and v, every second layer looking back a window only."""

from octavo.models.classic import ClassicBuilder, head_shape
from octavo.models.config import MOST_LAYERS, ConfigReader
from octavo.models.graph import Graph

ARCHITECTURES = ("GPTNeoForCausalLM",)
_KINDS = ("global", "local")


def build(config: ConfigReader) -> Graph:
    """The graph, its windows by `attention_types`."""
    config = config.aliased(num_hidden_layers="num_layers", num_attention_heads="num_heads")
    graph = ClassicBuilder.of(config, eps="layer_norm_epsilon")
    hidden, positions = graph.hidden_size, config.integer("max_position_embeddings")
    heads = head_shape(config, hidden, config.integer("num_attention_heads"))
    inner = config.integer("intermediate_size", 4 * hidden)
    activation = config.activation("activation_function", "gelu_new")
    window, kinds = config.integer("window_size", 256), _layer_kinds(config, graph.layers)
    x = graph.add(
        graph.embedding("transformer.wte.weight"), graph.position_embedding("transformer.wpe.weight", positions)
    )
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"transformer.h.{index}"
            attention = f"{layer}.attn.attention"
            h = graph.norm(x, f"{layer}.ln_1")
            attended = graph.attention(
                *(graph.project(h, f"{attention}.{part}_proj", hidden, bias=False) for part in "qkv"),
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=None,
                scale=1.0,
                sliding_window=window if kinds[index] == "local" else None,
            )
            x = graph.add(x, graph.project(attended, f"{attention}.out_proj", hidden))
            h = graph.norm(x, f"{layer}.ln_2")
            x = graph.add(x, graph.mlp(h, f"{layer}.mlp.c_fc", f"{layer}.mlp.c_proj", inner, activation))
    return graph.finish(
        graph.norm(x, "transformer.ln_f"),
        embedding="transformer.wte",
        max_position=positions,
        tied=True,
        buffers=r"\.attn\.attention\.(bias|masked_bias)$",
    )


def _layer_kinds(config: ConfigReader, layers: int) -> list[str]:
    """The kind of each layer: `attention_types` is pairs of a pattern and how often it is repeated."""
    kinds: list[str] = []
    given = config.values.get("attention_types", [[["global", "local"], 12]])
    try:
        for pattern, times in given:
            if not isinstance(times, int) or not 1 <= times * len(pattern) <= MOST_LAYERS:
                raise ValueError
            kinds.extend(list(pattern) * times)
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or not all(kind in _KINDS for kind in kinds):
        raise config.refusal("attention_types", f"patterns of {' and '.join(_KINDS)}, repeated to {layers} layers")
    return kinds
