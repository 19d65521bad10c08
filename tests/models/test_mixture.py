"""Mixtures of experts and latent attention in graphs: what is refused, where experts are found, how they are shown."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from octavo.errors import ModelError
from octavo.models.graph import GraphBuilder
from octavo.models.mixture import LatentAttention, MoeExperts, MoeRoute, SigmoidGate
from octavo.models.registry import build_graph, check_weights
from octavo.models.rewrites import optimize
from octavo.models.rope import Rope
from octavo.models.stacks import with_stacked_experts
from octavo.ptq.linears import layer_plans
from octavo.weights.checkpoint import open_checkpoint
from tests.models.tiny import read_config


def builder() -> tuple[GraphBuilder, int]:
    graph = GraphBuilder("mixture", 20, 8)
    return graph, graph.embedding("embed")


def names(count: int, kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}{index}" for index in range(count))


def experts(**changes: Any) -> dict[str, Any]:
    fields = {"gates": names(4, "g"), "ups": names(4, "u"), "downs": names(4, "d"), "intermediate": 6, "top_k": 2}
    return {**fields, **changes}


@pytest.mark.parametrize(
    ("route", "expert", "message"),
    [
        ({"top_k": 5}, {}, "5 experts of 1 groups of 4"),
        ({"top_k": 2, "groups": 3}, {}, "1 of 3 groups of 4 experts"),
        ({"top_k": 2, "groups": 4, "top_groups": 1}, {}, "2 experts of 1 groups of 1"),
        ({"top_k": 2, "scoring": "hard"}, {}, "scoring 'hard'"),
        ({"top_k": 1}, {}, "widths"),
        ({"top_k": 2}, {"ups": names(3, "u")}, "as many"),
        ({"top_k": 2}, {"gate_biases": names(4, "b")}, "biases"),
        ({"top_k": 2}, {"activation": "relu"}, "activation 'relu'"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(route: dict[str, Any], expert: dict[str, Any], message: str) -> None:
    graph, x = builder()
    logits = graph.linear(x, "router", 4, precise=True)
    chosen = graph.node(MoeRoute, x=logits, **route)
    out = graph.node(MoeExperts, x=x, route=chosen, **experts(**expert))
    with pytest.raises(ModelError, match=message):
        graph.build(graph.linear(out, "head", 20), num_layers=0, max_position=8)


def test_a_gate_of_several_columns_and_a_latent_of_the_wrong_width_are_refused() -> None:
    graph, x = builder()
    gated = graph.node(SigmoidGate, x=x, gate=x)
    with pytest.raises(ModelError, match="a gate of width 8"):
        graph.build(graph.linear(gated, "head", 20), num_layers=0, max_position=8)
    graph, x = builder()
    with graph.layer(0):
        attended = graph.node(
            LatentAttention,
            qkv=(x, x),
            q_heads=2,
            kv_heads=1,
            head_dim=12,
            scale=1.0,
            rope=Rope("default", 10000.0, 4),
            nope_dim=4,
            value_dim=4,
            rank=8,
            expansion="e",
            latent_norm="n",
            latent_eps=1e-6,
        )
    with pytest.raises(ModelError, match="widths \\(16, 12\\) needed, not \\(8, 8\\)"):
        graph.build(graph.linear(attended, "head", 20), num_layers=1, max_position=8)


def test_residuals_join_experts_and_the_gate_and_shared_expert_stay(tiny_models: dict[str, Path]) -> None:
    graph = optimize(build_graph(read_config(tiny_models["mixtral"])))
    mixtures = [node for node in graph.nodes if isinstance(node, MoeExperts)]
    assert len(mixtures) == 3
    assert all(node.residual is not None for node in mixtures)
    text = str(graph)
    assert "moe_route(%6, top 2, softmax, weights sum to 1)" in text
    assert "5 experts like model.layers.*.block_sparse_moe.experts.0.w1.weight" in text
    text = str(optimize(build_graph(read_config(tiny_models["qwen2_moe"]))))
    assert "sigmoid_gate(" in text
    text = str(optimize(build_graph(read_config(tiny_models["deepseek_v3"]))))
    assert "of 2 of 4 groups by their two best experts" in text
    assert "latent of 64 + 32" in text


@pytest.fixture(scope="module")
def stacked(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-MoE as transformers saves its own layout."""
    directory = tmp_path_factory.mktemp("stacked")
    AutoModelForCausalLM.from_pretrained(tiny_models["qwen3_moe"]).save_pretrained(
        directory, save_original_format=False
    )
    return directory


def test_stacked_experts_are_the_same_weights(stacked: Path, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    apart = load_file(tiny_models["qwen3_moe"] / "model.safetensors")
    tensors = load_file(stacked / "model.safetensors")
    three: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj"):
            prefix = name.removesuffix(".gate_up_proj")
            gate, up = np.split(tensor, 2, axis=1)
            three[f"{prefix}.gate_proj.weight"], three[f"{prefix}.up_proj.weight"] = gate.copy(), up.copy()
        else:
            three[f"{name}.weight" if name.endswith("experts.down_proj") else name] = tensor
    shutil.copy(stacked / "config.json", tmp_path / "config.json")
    save_file(three, tmp_path / "model.safetensors")
    for directory in (stacked, tmp_path):
        checkpoint = open_checkpoint(directory)
        graph = with_stacked_experts(optimize(build_graph(checkpoint.config)), set(checkpoint.names()))
        graph.check()
        check_weights(graph, checkpoint)
        assert len(graph.derived) == 2 * 8 * 3
        for name, view in graph.derived.items():
            found = view.view(checkpoint.tensor(view.source)).read_f32()
            np.testing.assert_array_equal(found, apart[name])


def test_layers_that_predict_further_tokens_are_left_out(tiny_models: dict[str, Path]) -> None:
    graph = build_graph(read_config(tiny_models["deepseek_v3"]))
    assert graph.unused == ("model.layers.3.",)
    checkpoint = open_checkpoint(tiny_models["deepseek_v3"])

    class WithMore:
        def names(self) -> list[str]:
            return [*checkpoint.names(), "model.layers.3.eh_proj.weight", *self.extra]

        extra: tuple[str, ...] = ()
        tensor = staticmethod(checkpoint.tensor)

    more = WithMore()
    check_weights(graph, more)
    more.extra = ("model.layers.4.eh_proj.weight",)
    with pytest.raises(ModelError, match=r"unknown 1: model\.layers\.4\.eh_proj\.weight"):
        check_weights(graph, more)


def test_quantising_ahead_refuses_mixtures_by_name(tiny_models: dict[str, Path]) -> None:
    graph = build_graph(read_config(tiny_models["mixtral"]))
    with pytest.raises(ModelError, match="architecture mixtral: experts cannot be quantised ahead yet"):
        layer_plans(graph)
