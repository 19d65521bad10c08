"""StableLM: gated feed-forward under layer norms, part of each head rotated; 12b has norms of heads, 1.6b biases."""

from octavo.models.classic import ClassicBuilder, head_shape
from octavo.models.config import ConfigReader, read_rope
from octavo.models.graph import Graph

ARCHITECTURES = ("StableLmForCausalLM",)


def build(config: ConfigReader) -> Graph:
    """The graph; with `qk_layernorm` every head of q and k has a layer norm of its own."""
    config.require("hidden_act", ("silu",))
    graph = ClassicBuilder.of(config, bias=False)
    hidden, positions = graph.hidden_size, config.integer("max_position_embeddings")
    heads = head_shape(config, hidden)
    inner = config.integer("intermediate_size")
    rope = read_rope(config, heads.head_dim, positions, partial=0.25)
    parallel, qkv_bias = config.boolean("use_parallel_residual", False), config.boolean("use_qkv_bias", False)
    head_norms = config.boolean("qk_layernorm", False)

    def norms(name: str, count: int) -> tuple[str, ...] | None:
        return tuple(f"{name}.norms.{head}.weight" for head in range(count)) if head_norms else None

    x = graph.embedding("model.embed_tokens.weight")
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"model.layers.{index}"
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            h = graph.norm(x, f"{layer}.input_layernorm")
            attended = graph.attention(
                graph.project(h, f"{attention}.q_proj", heads.q_width, qkv_bias),
                graph.project(h, f"{attention}.k_proj", heads.kv_width, qkv_bias),
                graph.project(h, f"{attention}.v_proj", heads.kv_width, qkv_bias),
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=rope,
                q_norm=norms(f"{attention}.q_layernorm", heads.q_heads),
                k_norm=norms(f"{attention}.k_layernorm", heads.kv_heads),
                norm_eps=graph.eps if head_norms else 0.0,
                norm_layer=head_norms,
            )
            x = graph.add(x, graph.project(attended, f"{attention}.o_proj", hidden))
            if not parallel:
                h = graph.norm(x, f"{layer}.post_attention_layernorm")
            gate, up = (graph.project(h, f"{mlp}.{part}_proj", inner) for part in ("gate", "up"))
            gated = graph.silu_mul(gate, up)
            x = graph.add(x, graph.project(gated, f"{mlp}.down_proj", hidden))
    return graph.finish(graph.norm(x, "model.norm"), embedding="model.embed_tokens", max_position=positions)
