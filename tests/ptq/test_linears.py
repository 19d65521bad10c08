"""Which linears share inputs, and that factors taken out of them where they are said to change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.models.reference import reference_logits
from octavo.models.registry import build_graph, fit_names
from octavo.ptq.layer import LayerResult, absorb
from octavo.ptq.linears import layer_plans
from tests.models.tiny import random_tokens, read_config, read_weights, tiny_models

__all__ = ["tiny_models"]


def test_a_llama_layer_has_four_inputs(tiny_models: dict[str, Path]) -> None:
    plans = layer_plans(build_graph(read_config(tiny_models["llama"])))
    assert [plan.layer for plan in plans] == [0, 1, 2]
    groups = plans[1].groups
    names = [
        [name.removeprefix("model.layers.1.").removesuffix(".weight") for name in group.weights] for group in groups
    ]
    assert names == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    assert [group.clip for group in groups] == [(False, False, True), (True,), (True, True), (True,)]
    assert [group.absorber is not None and group.absorber.is_norm for group in groups] == [True, False, True, False]


@pytest.mark.parametrize(("name", "groups"), [("llama", 12), ("qwen2", 12), ("qwen3", 12), ("gpt_neox", 6)])
def test_factors_absorbed_change_no_logits(tiny_models: dict[str, Path], name: str, groups: int) -> None:
    weights = read_weights(tiny_models[name])
    graph = fit_names(build_graph(read_config(tiny_models[name])), weights)
    ids = random_tokens(12)

    def weight(asked: str) -> np.ndarray:
        view = graph.derived.get(asked)
        return weights[asked] if view is None else view.array(weights[view.source])

    expected = reference_logits(graph, weight, ids)
    rng = np.random.default_rng(0)
    absorbed = 0
    for plan in layer_plans(graph):
        for group in plan.groups:
            if group.absorber is None:
                continue
            factors = np.exp(rng.standard_normal(group.k)).astype(np.float32)
            if group.absorber.heads is not None:
                q_heads, kv_heads, head_dim = group.absorber.heads
                shared = factors.reshape(kv_heads, q_heads // kv_heads, head_dim)[:, :1]
                factors = np.broadcast_to(shared, (kv_heads, q_heads // kv_heads, head_dim)).reshape(-1).copy()
            for each in group.weights:
                weights[each] = weights[each] * factors
            absorb(group.absorber, factors, weights, weights, LayerResult())
            absorbed += 1
    assert absorbed == groups
    found = reference_logits(graph, weight, ids)
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())


def test_projections_in_one_tensor_are_quantised_as_one(tiny_models: dict[str, Path]) -> None:
    weights = read_weights(tiny_models["gpt_neox"])
    plan = layer_plans(fit_names(build_graph(read_config(tiny_models["gpt_neox"])), weights))[0]
    assert all(name in weights for name in plan.weights)
    assert len(plan.weights) == 4
    assert not plan.groups[0].clip[0]  # queries and keys are in it


def test_matrices_stored_the_other_way_round_are_refused_by_name(tiny_models: dict[str, Path]) -> None:
    graph = fit_names(build_graph(read_config(tiny_models["gpt2"])), read_weights(tiny_models["gpt2"]))
    with pytest.raises(ModelError, match=r"tensor .*c_attn\.weight: is stored otherwise"):
        layer_plans(graph)


def test_a_graph_without_linears_is_refused(tiny_models: dict[str, Path]) -> None:
    from dataclasses import replace

    graph = build_graph(read_config(tiny_models["llama"]))
    with pytest.raises(ModelError, match="has no linears in its layers"):
        layer_plans(replace(graph, nodes=graph.nodes[:2], output=graph.nodes[1].output))  # embedding and norm
