"""MPT: ALiBi slopes, no biases, one plain stack of q, k and v, optionally clipped."""

import math

from octavo.models.classic import ClassicBuilder, head_shape
from octavo.models.config import ConfigReader
from octavo.models.graph import Graph

ARCHITECTURES = ("MPTForCausalLM", "MptForCausalLM")


def build(config: ConfigReader) -> Graph:
    """The graph of the variants transformers has: ALiBi, multi-head attention, layer norms."""
    config = config.aliased(hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads")
    config.require("no_bias", (True,))
    config.require("expansion_ratio", (4,))
    config.require("embedding_fraction", (1.0,))
    config.require("norm_type", ("low_precision_layernorm", "layernorm"))
    config.require("logit_scale", ())
    attention = config.mapping("attn_config")
    attention.require("attn_type", ("multihead_attention",))
    attention.require("alibi", (True,))
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attention.require(name, (False,))
    graph = ClassicBuilder.of(config, eps="layer_norm_epsilon", bias=False, norm_bias=False)
    hidden = graph.hidden_size
    heads = head_shape(config, hidden, config.integer("num_attention_heads"))
    slopes = _slopes(heads.q_heads, attention.integer("alibi_bias_max", 8))
    clip = attention.number("clip_qkv") if attention.values.get("clip_qkv") else None
    scale = attention.number("softmax_scale", heads.head_dim**-0.5)
    x = graph.embedding("transformer.wte.weight")
    for index in range(graph.layers):
        with graph.layer(index):
            layer = f"transformer.blocks.{index}"
            attended = graph.attention(
                graph.project(graph.norm(x, f"{layer}.norm_1"), f"{layer}.attn.Wqkv", 3 * hidden),
                q_heads=heads.q_heads,
                kv_heads=heads.kv_heads,
                head_dim=heads.head_dim,
                rope=None,
                scale=scale,
                alibi=slopes,
                clip=clip,
            )
            x = graph.add(x, graph.project(attended, f"{layer}.attn.out_proj", hidden))
            h = graph.norm(x, f"{layer}.norm_2")
            x = graph.add(x, graph.mlp(h, f"{layer}.ffn.up_proj", f"{layer}.ffn.down_proj", 4 * hidden, "gelu"))
    return graph.finish(
        graph.norm(x, "transformer.norm_f"),
        embedding="transformer.wte",
        max_position=config.integer("max_seq_len", 2048),
        tied=True,
    )


def _slopes(heads: int, largest: int) -> tuple[float, ...]:
    """MPT's own: 2^(-largest·i/n) for the next power of two n, every second one first where that is not the heads."""
    count = 1 << math.ceil(math.log2(heads))
    slopes = [math.pow(2.0, -(i + 1) * largest / count) for i in range(count)]
    return tuple(slopes if count == heads else (slopes[1::2] + slopes[::2])[:heads])
