"""OPT: learned positions from the third row on, ReLU, layer norms before each part or (350m) after it.

The embedding of OPT-350m is narrower than the model and projected in and out; Galactica has no biases.
"""

from octavo.models.classic import ClassicBuilder, head_shape
from octavo.models.config import ConfigReader
from octavo.models.graph import Graph, Value

ARCHITECTURES = ("OPTForCausalLM",)
_FIRST_POSITION = 2


def build(config: ConfigReader) -> Graph:
    """The graph."""
    config.require("layer_norm_elementwise_affine", (True,))
    graph = ClassicBuilder.of(config, bias=config.boolean("enable_bias", True))
    hidden, positions = graph.hidden_size, config.integer("max_position_embeddings")
    heads = head_shape(config, hidden, config.integer("num_attention_heads"))
    inner, activation = config.integer("ffn_dim"), config.activation("activation_function", "relu")
    before = config.boolean("do_layer_norm_before", True)
    embedded = config.integer("word_embed_proj_dim", hidden)
    decoder = "model.decoder"

    def norm(x: Value, name: str, wanted: bool) -> Value:
        return graph.norm(x, name) if wanted else x

    x = graph.embedding(f"{decoder}.embed_tokens.weight", width=embedded)
    if embedded != hidden:
        x = graph.project(x, f"{decoder}.project_in", hidden, bias=False)
    x = graph.add(
        x,
        graph.position_embedding(
            f"{decoder}.embed_positions.weight", positions + _FIRST_POSITION, offset=_FIRST_POSITION
        ),
    )
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"{decoder}.layers.{index}"
            attention = f"{layer}.self_attn"
            h = norm(x, f"{layer}.self_attn_layer_norm", before)
            attended = graph.attention(
                *(graph.project(h, f"{attention}.{part}_proj", hidden) for part in "qkv"),
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=None,
            )
            x = graph.add(x, graph.project(attended, f"{attention}.out_proj", hidden))
            x = norm(x, f"{layer}.self_attn_layer_norm", not before)
            h = norm(x, f"{layer}.final_layer_norm", before)
            x = graph.add(x, graph.mlp(h, f"{layer}.fc1", f"{layer}.fc2", inner, activation))
            x = norm(x, f"{layer}.final_layer_norm", not before)
    x = norm(x, f"{decoder}.final_layer_norm", before and not config.boolean("_remove_final_layer_norm", False))
    if embedded != hidden:
        x = graph.project(x, f"{decoder}.project_out", embedded, bias=False)
    return graph.finish(
        x,
        embedding=f"{decoder}.embed_tokens",
        max_position=positions,
        tied=True,
        renames=((f"{decoder}.", "decoder."),),
    )
