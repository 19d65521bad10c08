"""Rewrites leave fewer operations that compute the same logits, and leave alone what other nodes still read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from octavo.models.graph import Add, Attention, GatherSampled, GeluMul, Graph, GraphBuilder, Linear, SiluMul, Value
from octavo.models.reference import reference_logits
from octavo.models.registry import build_graph
from octavo.models.rewrites import (
    fold_activations,
    fold_residuals,
    gather_sampled_rows,
    merge_gate_up,
    merge_qkv,
    optimize,
)
from tests.models.test_registry import LLAMA


def block(
    inside: Callable[[GraphBuilder, Value], Value], after: Callable[[GraphBuilder, Value], Value] | None = None
) -> Graph:
    """An attention layer followed by whatever `inside` adds to it, and a head that `after` may follow."""
    builder = GraphBuilder("block", vocab_size=20, hidden_size=8)
    x = builder.embedding("embed")
    with builder.layer(0):
        q, k, v = (builder.linear(x, name, 8, f"{name}_bias") for name in "qkv")
        x = builder.add(x, builder.attention(q, k, v, q_heads=2, kv_heads=2, head_dim=4, rope=None))
        x = inside(builder, x)
    x = builder.linear(builder.layer_norm(x, "norm", "norm_bias", 1e-5), "head", 20)
    return builder.build(x if after is None else after(builder, x), num_layers=1, max_position=16)


def random_weights(graph: Graph) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in graph.weights().items()}


def assert_same_logits(before: Graph, after: Graph) -> None:
    weights, tokens = random_weights(before), [3, 1, 4, 1, 5, 9]
    after.check()
    assert after.weights() == before.weights()
    expected = reference_logits(before, weights.__getitem__, tokens)
    np.testing.assert_allclose(reference_logits(after, weights.__getitem__, tokens), expected, rtol=1e-4, atol=1e-4)


def kinds(graph: Graph, layer: int | None) -> list[str]:
    return [type(node).__name__ for node in graph.nodes if node.layer == layer]


def test_optimised_layer_is_seven_operations() -> None:
    graph = optimize(build_graph(LLAMA))
    before, after = ["RmsNorm", "Linear", "Attention"], ["Linear", "RmsNorm", "Linear", "Linear"]
    assert kinds(graph, 0) == before + after
    assert kinds(graph, 1) == [*before, "GatherSampled", "GatherSampled", *after]
    assert kinds(graph, None) == ["Embedding", "RmsNorm", "Linear"]
    qkv, output, gate_up, down = (node for node in graph.nodes if isinstance(node, Linear) and node.layer == 1)
    assert [name.split(".")[-2] for name in qkv.weights] == ["q_proj", "k_proj", "v_proj"]
    assert qkv.out_features == (64, 32, 32)
    assert [name.split(".")[-2] for name in gate_up.weights] == ["gate_proj", "up_proj"]
    assert gate_up.activation == "silu_mul"
    assert output.residual is not None
    assert down.residual == output.output


def test_rewriting_twice_changes_nothing_more() -> None:
    graph = optimize(build_graph(LLAMA))
    assert optimize(graph) == graph


def test_rewriting_leaves_the_original_graph_valid() -> None:
    graph = build_graph(LLAMA)
    before = graph.nodes
    optimize(graph)
    assert graph.nodes == before
    graph.check()


def test_tied_head_reads_the_embedding() -> None:
    graph = optimize(build_graph({**LLAMA, "tie_word_embeddings": True}))
    assert graph.tied_weights() == {"model.embed_tokens.weight"}
    assert "lm_head.weight" not in graph.weights()


def test_biases_follow_their_weights_when_merged() -> None:
    graph = block(lambda builder, x: x)
    merged = merge_qkv(graph)
    linear = next(node for node in merged.nodes if isinstance(node, Linear))
    assert linear.weights == ("q", "k", "v")
    assert linear.biases == ("q_bias", "k_bias", "v_bias")
    assert_same_logits(graph, merged)


@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_gates_merge(tanh: bool) -> None:
    def gated(builder: GraphBuilder, x: Value) -> Value:
        gate, up = builder.linear(x, "gate", 12), builder.linear(x, "up", 12)
        return builder.add(builder.linear(builder.gelu_mul(gate, up, tanh=tanh), "down", 8), x)

    graph = block(gated)
    after = optimize(graph)
    assert not any(isinstance(node, GeluMul) for node in after.nodes)
    assert {node.activation for node in after.nodes if isinstance(node, Linear)} == {
        None,
        "gelu_tanh_mul" if tanh else "gelu_mul",
    }
    assert_same_logits(graph, after)


def test_gate_another_node_reads_is_not_merged() -> None:
    def gated(builder: GraphBuilder, x: Value) -> Value:
        gate, up = builder.linear(x, "gate", 8), builder.linear(x, "up", 8)
        return builder.add(gate, builder.silu_mul(gate, up))

    graph = block(gated)
    after = merge_gate_up(graph)
    assert any(isinstance(node, SiluMul) for node in after.nodes)
    assert_same_logits(graph, optimize(graph))


def test_projections_of_different_values_are_not_merged() -> None:
    def gated(builder: GraphBuilder, x: Value) -> Value:
        return builder.silu_mul(builder.linear(x, "gate", 8), builder.linear(builder.scale(x, 0.5), "up", 8))

    graph = block(gated)
    assert merge_gate_up(graph) == graph


def test_addition_to_what_is_not_a_linear_stays() -> None:
    graph = block(lambda builder, x: x)
    assert any(isinstance(node, Add) for node in fold_residuals(graph).nodes)


def test_addition_of_two_linears_joins_the_later() -> None:
    def twice(builder: GraphBuilder, x: Value) -> Value:
        return builder.add(builder.linear(x, "first", 8), builder.linear(x, "second", 8))

    graph = block(twice)
    after = fold_residuals(graph)
    linear = next(node for node in after.nodes if isinstance(node, Linear) and node.residual is not None)
    assert linear.weights == ("second",)
    assert_same_logits(graph, after)


def test_linear_takes_one_residual_only() -> None:
    def summed(builder: GraphBuilder, x: Value) -> Value:
        half = builder.scale(x, 0.5)
        return builder.add(builder.add(builder.linear(x, "only", 8), x), half)

    graph = block(summed)
    after = fold_residuals(fold_residuals(graph))
    assert sum(isinstance(node, Add) for node in after.nodes) == 2
    assert_same_logits(graph, after)


def test_doubling_a_linear_is_not_folded_into_itself() -> None:
    def doubled(builder: GraphBuilder, x: Value) -> Value:
        x = builder.linear(x, "only", 8)
        return builder.add(x, x)

    graph = block(doubled)
    assert_same_logits(graph, optimize(graph))


def test_rows_are_gathered_behind_the_last_attention() -> None:
    graph = block(lambda builder, x: x, lambda builder, x: builder.softcap(builder.scale(x, 0.5), 30.0))
    after = gather_sampled_rows(graph)
    assert kinds(after, 0) == ["Linear"] * 3 + ["Attention", "GatherSampled", "GatherSampled", "Add"]
    assert kinds(after, None) == ["Embedding", "LayerNorm", "Linear", "Scale", "SoftCap"]
    assert_same_logits(graph, after)


def test_a_value_that_several_nodes_read_behind_the_last_attention_is_gathered_once() -> None:
    builder = GraphBuilder("parallel", vocab_size=20, hidden_size=8)
    x = builder.embedding("embed")
    with builder.layer(0):
        normed = builder.layer_norm(x, "norm", None, 1e-5)
        q, k, v = (builder.linear(normed, name, 8) for name in "qkv")
        attended = builder.attention(q, k, v, q_heads=2, kv_heads=2, head_dim=4, rope=None)
        mlp = builder.linear(
            builder.silu_mul(builder.linear(normed, "gate", 8), builder.linear(normed, "up", 8)), "d", 8
        )
        x = builder.add(x, builder.add(attended, mlp))
    graph = builder.build(builder.linear(x, "head", 20), num_layers=1, max_position=16)
    after = optimize(graph)
    gathers = [node.x for node in after.nodes if isinstance(node, GatherSampled)]
    assert sorted(gathers) == sorted({attended, normed, 1})
    assert_same_logits(graph, after)


def test_graph_that_gathers_already_is_left_alone() -> None:
    graph = gather_sampled_rows(block(lambda builder, x: x))
    assert gather_sampled_rows(graph) is graph
    assert sum(isinstance(node, GatherSampled) for node in graph.nodes) == 2


def test_layers_stay_in_order() -> None:
    graph = optimize(build_graph({**LLAMA, "num_hidden_layers": 12}))
    assert [node.layer for node in graph.nodes if isinstance(node, Attention)] == list(range(12))


def test_an_activation_becomes_that_of_its_product_when_nothing_else_reads_it() -> None:
    def feed_forward(builder: GraphBuilder, x: Value) -> Value:
        h = builder.activate(builder.linear(x, "up", 8, "up_bias"), "relu2")
        read_twice = builder.linear(h, "other", 8)
        return builder.add(builder.add(x, builder.activate(read_twice, "gelu")), read_twice)

    graph = block(feed_forward)
    after = fold_activations(graph)
    activations = {node.weights[0]: node.activation for node in after.nodes if isinstance(node, Linear)}
    assert (activations["up"], activations["other"]) == ("relu2", None)
    assert kinds(after, 0).count("Activate") == 1
    assert_same_logits(graph, optimize(graph))


def test_parallel_branches_are_added_by_their_products() -> None:
    builder = GraphBuilder("parallel", vocab_size=20, hidden_size=8)
    x = builder.embedding("embed")
    with builder.layer(0):
        h = builder.layer_norm(x, "norm", None, 1e-5)
        attended = builder.attention(
            builder.linear(h, "qkv", 24), q_heads=2, kv_heads=2, head_dim=4, rope=None, alibi=(0.5, 0.25)
        )
        x = builder.add(x, builder.linear(attended, "o", 8))
        x = builder.add(x, builder.linear(builder.activate(builder.linear(h, "up", 8), "gelu"), "down", 8))
    graph = builder.build(builder.linear(x, "head", 20), num_layers=1, max_position=16)
    after = optimize(graph)
    assert (
        kinds(after, 0)
        == ["LayerNorm", "Linear", "Attention", "GatherSampled"] + ["GatherSampled"] * 2 + ["Linear"] * 3
    )
    assert_same_logits(graph, after)
