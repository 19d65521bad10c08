"""Graphs that are not well formed are refused with the node, value or weight at fault; good ones print compactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.models.graph import Add, Attention, Graph, GraphBuilder, Linear, Value
from octavo.models.registry import build_graph
from octavo.models.rewrites import optimize
from octavo.models.rope import Rope
from tests.models.test_registry import LLAMA


def small_graph(**attention: Any) -> Graph:
    """One layer without feed-forward."""
    builder = GraphBuilder("small", vocab_size=20, hidden_size=8)
    x = builder.embedding("embed")
    with builder.layer(0):
        q, k, v = (builder.linear(x, name, 8) for name in "qkv")
        options = {"q_heads": 2, "kv_heads": 2, "head_dim": 4, "rope": Rope("default", 10000.0, 4), **attention}
        attended = builder.attention(q, k, v, **options)
        x = builder.add(x, builder.linear(attended, "o", 8))
    return builder.build(builder.linear(x, "head", 20), num_layers=1, max_position=16)


def with_node(graph: Graph, index: int, **changes: Any) -> Graph:
    nodes = list(graph.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return replace(graph, nodes=tuple(nodes))


def test_every_weight_is_listed_with_its_shape() -> None:
    assert small_graph().weights() == {
        "embed": (20, 8),
        "q": (8, 8),
        "k": (8, 8),
        "v": (8, 8),
        "o": (8, 8),
        "head": (20, 8),
    }


@pytest.mark.parametrize(
    ("index", "changes", "message"),
    [
        (0, {"hidden_size": 6}, "residual|different widths"),
        (1, {"x": 4}, "Linear reads %4 before it is assigned"),
        (2, {"output": 2}, "%2 is assigned twice"),
        (2, {"weights": ("q",)}, "weight q is read by more than one node"),
        (2, {"weights": ("embed",)}, r"weight embed is read as \(20, 8\) and as \(8, 8\)"),
        (2, {"out_features": (4,)}, r"attention of layer 0: q, k, v of widths \(8, 8, 8\) needed, not \(8, 4, 8\)"),
        (2, {"biases": ()}, "must be as many"),
        (2, {"activation": "silu_mul"}, "needs gate and up of one width"),
        (2, {"activation": "mish"}, "activation 'mish' is not one of"),
        (4, {"q_heads": 3}, "widths"),
        (4, {"layer": 1}, r"attention layers \[1\] are not 0 to 0"),
        (4, {"sliding_window": 0}, "sliding window 0"),
        (4, {"chunked": True}, "chunks without a size"),
        (4, {"unit_norms": True, "q_norm": "norm"}, "norms with and without weights at once"),
        (4, {"wide_norms": True, "norm_after_rope": True}, "only RMS norms of heads come after rope"),
        (4, {"rope": Rope("default", 10000.0, 6)}, "rope over 6 of 4"),
        (6, {"b": 5}, "nothing reads %6"),
        (7, {"out_features": (21,)}, "output %8 has width 21, not 20"),
    ],
)
def test_malformed_graph_is_refused(index: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        with_node(small_graph(), index, **changes).check()


def test_query_heads_must_share_kv_heads_evenly() -> None:
    graph = small_graph()
    graph = with_node(graph, 1, out_features=(12,))
    graph = with_node(graph, 4, q_heads=3)
    with pytest.raises(ModelError, match="3 query heads cannot share 2 kv heads"):
        graph.check()


def test_gathered_rows_do_not_mix_with_all_rows() -> None:
    graph = small_graph()
    builder = GraphBuilder("mixed", 20, 8, list(graph.nodes[:-1]))
    gathered = builder.gather_sampled(7)
    output = builder.linear(builder.add(gathered, 7), "head", 20)
    with pytest.raises(ModelError, match="Add mixes all rows with sampled rows"):
        builder.build(output, num_layers=1, max_position=16)


def test_rows_are_gathered_once() -> None:
    graph = small_graph()
    builder = GraphBuilder("twice", 20, 8, list(graph.nodes[:-1]))
    output = builder.linear(builder.gather_sampled(builder.gather_sampled(7)), "head", 20)
    with pytest.raises(ModelError, match="GatherSampled of rows already gathered"):
        builder.build(output, num_layers=1, max_position=16)


def test_head_under_a_softcap_may_be_tied() -> None:
    graph = small_graph()
    builder = GraphBuilder("tied", 20, 8, list(graph.nodes[:-1]))
    output = builder.softcap(builder.scale(builder.linear(7, "embed", 20), 0.5), 30.0)
    tied = builder.build(output, num_layers=1, max_position=16)
    assert tied.tied_weights() == {"embed"}


def test_layers_must_have_kv_of_one_shape() -> None:
    builder = GraphBuilder("uneven", 20, 8)
    x = builder.embedding("embed")
    for index, heads in enumerate((2, 1)):
        with builder.layer(index):
            q, k, v = (
                builder.linear(x, f"{name}{index}", width * 4)
                for name, width in zip("qkv", (2, heads, heads), strict=True)
            )
            x = builder.attention(q, k, v, q_heads=2, kv_heads=heads, head_dim=4, rope=None)
    with pytest.raises(ModelError, match="layers differ in kv heads or head size"):
        builder.build(builder.linear(x, "head", 20), num_layers=2, max_position=16)


def test_residual_must_have_the_width_of_the_output() -> None:
    graph = small_graph()
    projection = graph.nodes[5]
    assert isinstance(projection, Linear)
    with pytest.raises(ModelError, match="residual of width 8 added to an output of width 20"):
        with_node(graph, 7, residual=1).check()


def test_attention_belongs_to_a_layer() -> None:
    builder = GraphBuilder("loose", 20, 8)
    x: Value = builder.embedding("embed")
    with pytest.raises(ModelError, match="attention outside a layer"):
        builder.attention(x, x, x, q_heads=2, kv_heads=2, head_dim=4, rope=None)


def test_graph_reports_its_kv_shape() -> None:
    graph = build_graph(LLAMA)
    assert (graph.num_layers, graph.kv_heads, graph.head_dim, graph.max_position) == (2, 2, 16, 128)


def test_equal_layers_print_once() -> None:
    config = {**LLAMA, "tie_word_embeddings": True, "num_hidden_layers": 3}
    assert str(optimize(build_graph(config))) == "\n".join(
        [
            "llama: 3 layers, hidden 64, vocabulary 300, 4 query and 2 kv heads of 16, at most 128 positions",
            "  %1[64] = embedding(model.embed_tokens.weight)",
            "layers 0 to 1, each",
            "  %1[64] = rms_norm(%in, model.layers.*.input_layernorm.weight, eps 1e-06)",
            "  %2[128] = linear(%1, model.layers.*.self_attn.q_proj.weight | model.layers.*.self_attn.k_proj.weight"
            " | model.layers.*.self_attn.v_proj.weight)",
            "  %3[64] = attention(%2, 4/2 heads of 16, rope default theta 10000)",
            "  %4[64] = linear(%3, model.layers.*.self_attn.o_proj.weight, + %in)",
            "  %5[64] = rms_norm(%4, model.layers.*.post_attention_layernorm.weight, eps 1e-06)",
            "  %6[96] = linear(%5, model.layers.*.mlp.gate_proj.weight | model.layers.*.mlp.up_proj.weight, silu_mul)",
            "  %7[64] = linear(%6, model.layers.*.mlp.down_proj.weight, + %4)",
            "layer 2",
            "  %1[64] = rms_norm(%in, model.layers.*.input_layernorm.weight, eps 1e-06)",
            "  %2[128] = linear(%1, model.layers.*.self_attn.q_proj.weight | model.layers.*.self_attn.k_proj.weight"
            " | model.layers.*.self_attn.v_proj.weight)",
            "  %3[64] = attention(%2, 4/2 heads of 16, rope default theta 10000)",
            "  %4[64] = gather_sampled(%3)",
            "  %5[64] = gather_sampled(%in)",
            "  %6[64] = linear(%4, model.layers.*.self_attn.o_proj.weight, + %5)",
            "  %7[64] = rms_norm(%6, model.layers.*.post_attention_layernorm.weight, eps 1e-06)",
            "  %8[96] = linear(%7, model.layers.*.mlp.gate_proj.weight | model.layers.*.mlp.up_proj.weight, silu_mul)",
            "  %9[64] = linear(%8, model.layers.*.mlp.down_proj.weight, + %6)",
            "  %1[64] = rms_norm(%in, model.norm.weight, eps 1e-06)",
            "  %2[300] = linear(%1, model.embed_tokens.weight)",
        ]
    )


def test_layers_that_differ_print_apart() -> None:
    config = {
        **LLAMA,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    }
    text = str(build_graph(config))
    assert "layer 0\n" in text
    assert "layer 1\n" in text
    assert "window 4" in text
    assert "bias model.layers.*.self_attn.q_proj.bias" in text


def test_nodes_of_the_whole_vocabulary_print() -> None:
    builder = GraphBuilder("all", vocab_size=20, hidden_size=8)
    x = builder.embedding("embed", scale=2.0)
    with builder.layer(0):
        h = builder.layer_norm(x, "norm", "norm_bias", 1e-5)
        a = builder.attention(
            *(builder.linear(h, name, 8) for name in "qkv"),
            q_heads=2,
            kv_heads=2,
            head_dim=4,
            rope=None,
            scale=0.25,
            q_norm="qn",
            k_norm="kn",
            norm_eps=1e-6,
            norm_plus_one=True,
            softcap=30.0,
        )
        x = builder.add(x, builder.activate(a, "gelu"))
        x = builder.gelu_mul(x, builder.scale(x, 0.5), tanh=True)
        x = builder.rms_norm(x, "post", 1e-6, plus_one=True)
    x = builder.softcap(builder.linear(builder.gather_sampled(x), "head", 20, "head_bias"), 50.0)
    text = str(builder.build(x, num_layers=1, max_position=16))
    for part in (
        "embedding(embed, scale 2)",
        "layer_norm(%in, norm | norm_bias, eps 1e-05)",
        "head norms qn | kn eps 1e-06, 1 + weight, no rope, scale 0.25, softcap 30)",
        "gelu(",
        "gelu_tanh_mul(",
        "scale(",
        "eps 1e-06, 1 + weight)",
        "bias head_bias)",
        "softcap(",
    ):
        assert part in text


def test_operands_are_listed_in_order() -> None:
    attention = small_graph().attentions[0]
    assert isinstance(attention, Attention)
    assert attention.inputs() == (2, 3, 4)
    assert Add(output=3, a=1, b=2).inputs() == (1, 2)
