"""The encoder that BERT introduced: post-norm layers in which every token sees the whole text."""

from __future__ import annotations

from octavo.models.config import MOST_LAYERS, ConfigReader
from octavo.models.graph import Activation, Graph, GraphBuilder

__all__ = ["build_encoder"]

_ACTIVATIONS: dict[object, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}


def build_encoder(config: ConfigReader, first_position: int = 0) -> Graph:
    """The graph; the table of positions begins with `first_position` rows that no token has."""
    config.require("position_embedding_type", ("absolute",))
    config.require("is_decoder", (False,))
    config.require("add_cross_attention", (False,))
    config.require("hidden_act", tuple(_ACTIVATIONS))
    hidden = config.integer("hidden_size")
    vocab = config.integer("vocab_size")
    layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    heads = config.integer("num_attention_heads")
    inner = config.integer("intermediate_size")
    positions = config.integer("max_position_embeddings", least=first_position + 1)
    eps = config.number("layer_norm_eps", 1e-12)
    activation = _ACTIVATIONS[config.values.get("hidden_act") or "gelu"]
    if hidden % heads:
        raise config.refusal("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    graph = GraphBuilder(config.family, vocab, hidden)

    def project(x: int, name: str, width: int) -> int:
        return graph.linear(x, f"{name}.weight", width, f"{name}.bias")

    def norm(x: int, name: str) -> int:
        return graph.layer_norm(x, f"{name}.weight", f"{name}.bias", eps)

    places = graph.position_embedding(
        "embeddings.position_embeddings.weight",
        positions,
        first_position,
        plus="embeddings.token_type_embeddings.weight",
        plus_rows=config.integer("type_vocab_size", 2),
    )
    x = norm(graph.add(graph.embedding("embeddings.word_embeddings.weight"), places), "embeddings.LayerNorm")
    for index in range(layers):
        with graph.layer(index):
            layer = f"encoder.layer.{index}"
            attended = graph.attention(
                project(x, f"{layer}.attention.self.query", hidden),
                project(x, f"{layer}.attention.self.key", hidden),
                project(x, f"{layer}.attention.self.value", hidden),
                q_heads=heads,
                kv_heads=heads,
                head_dim=hidden // heads,
                rope=None,
            )
            x = graph.add(x, project(attended, f"{layer}.attention.output.dense", hidden))
            x = norm(x, f"{layer}.attention.output.LayerNorm")
            h = graph.activate(project(x, f"{layer}.intermediate.dense", inner), activation)
            x = norm(graph.add(x, project(h, f"{layer}.output.dense", hidden)), f"{layer}.output.LayerNorm")
    return graph.build(
        x,
        num_layers=layers,
        max_position=positions - first_position,
        buffers=r"^(pooler\.dense\.(weight|bias)|embeddings\.position_ids)$",
        encoder=True,
    )
