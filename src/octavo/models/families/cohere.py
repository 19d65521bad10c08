"""Cohere Command-R, Command-R+ and Aya: attention and gated feed-forward side by side from one norm, scaled logits."""

from collections.abc import Sequence

from octavo.models.classic import ClassicBuilder, head_shape
from octavo.models.config import ConfigReader, read_rope
from octavo.models.derived import rotated_pairs
from octavo.models.graph import Graph, Value

ARCHITECTURES = ("CohereForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph; with `use_qk_norm` (Command-R+) every head of q and k has a layer norm of its own."""
    config.require("layer_types", ())
    config.require("sliding_window", ())
    return build_cohere(config, head_norms=config.boolean("use_qk_norm", False))


def build_cohere(
    config: ConfigReader, *, head_norms: bool = False, windows: Sequence[int | None] | None = None
) -> Graph:
    """The graph; with `windows`, one for each layer, layers without a window have no positions at all (Command-R7B)."""
    config.require("hidden_act", ("silu",))
    graph = ClassicBuilder.of(config, bias=config.boolean("attention_bias", False), norm_bias=False)
    hidden, positions = graph.hidden_size, config.integer("max_position_embeddings")
    heads, inner = head_shape(config, hidden), config.integer("intermediate_size")
    rope, pairs = read_rope(config, heads.head_dim, positions), rotated_pairs(heads.head_dim)

    def rotated(h: Value, name: str, width: int) -> Value:
        return graph.project_rows(h, name, pairs, "pairs", width, width)

    def norms(name: str, count: int) -> tuple[str, ...] | None:
        shape = (count, heads.head_dim)
        parts = range(count if head_norms else 0)
        return tuple(graph.derive(f"{name}.weight", str(i), shape, part=i, rows=pairs) for i in parts) or None

    x = graph.embedding("model.embed_tokens.weight")
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"model.layers.{index}"
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            window = None if windows is None else windows[index]
            turned = windows is None or window is not None
            project = rotated if turned else graph.project
            h = graph.norm(x, f"{layer}.input_layernorm")
            attended = graph.attention(
                project(h, f"{attention}.q_proj", heads.q_width),
                project(h, f"{attention}.k_proj", heads.kv_width),
                graph.project(h, f"{attention}.v_proj", heads.kv_width),
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=rope if turned else None,
                q_norm=norms(f"{attention}.q_norm", heads.q_heads),
                k_norm=norms(f"{attention}.k_norm", heads.kv_heads),
                norm_eps=graph.eps if head_norms else 0.0,
                norm_layer=head_norms,
                sliding_window=window,
            )
            x = graph.add(x, graph.project(attended, f"{attention}.o_proj", hidden))
            gated = graph.silu_mul(
                graph.project(h, f"{mlp}.gate_proj", inner, bias=False),
                graph.project(h, f"{mlp}.up_proj", inner, bias=False),
            )
            x = graph.add(x, graph.project(gated, f"{mlp}.down_proj", hidden, bias=False))
    return graph.finish(
        graph.norm(x, "model.norm"),
        embedding="model.embed_tokens",
        max_position=positions,
        tied=True,
        logit_scale=config.number("logit_scale", 0.0625),
    )
