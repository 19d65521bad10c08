"""The numpy oracle: its operations equal torch's, rows are picked by GatherSampled, rounding is torch's bf16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from octavo.models.graph import GraphBuilder
from octavo.models.reference import reference_logits, round_to_bf16
from octavo.models.registry import build_graph
from octavo.models.rewrites import optimize
from tests.models.tiny import random_tokens, read_config, read_weights


def test_rounding_equals_torch_bf16() -> None:
    values = np.random.default_rng(0).standard_normal(10000).astype(np.float32)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0, 3.3e38], np.float32)
    values = np.concatenate([values, ties])
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(round_to_bf16(values), expected)


def test_sampled_rows_are_those_of_the_full_logits(tiny_models: dict[str, Path]) -> None:
    weights = read_weights(tiny_models["qwen3"])
    graph = optimize(build_graph(read_config(tiny_models["qwen3"])))
    tokens = random_tokens(20)
    full = reference_logits(graph, weights.__getitem__, tokens)
    rows = reference_logits(graph, weights.__getitem__, tokens, rows=[19, 3])
    np.testing.assert_allclose(rows, full[[19, 3]], rtol=1e-5, atol=1e-5)


def test_bf16_inputs_change_logits_a_little(tiny_models: dict[str, Path]) -> None:
    weights = read_weights(tiny_models["llama"])
    graph = optimize(build_graph(read_config(tiny_models["llama"])))
    tokens = random_tokens(20)
    exact = reference_logits(graph, weights.__getitem__, tokens)
    rounded = reference_logits(graph, weights.__getitem__, tokens, round_inputs=True)
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 1e-5 < error < 3e-2


def test_operations_no_family_uses_yet_equal_torch() -> None:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {
        "embed": random(20, 8),
        "norm": random(8),
        "norm_bias": random(8),
        "post": random(8),
        "head": random(20, 8),
    }
    weights |= {name: random(8, 8) for name in "qkv"} | {"qn": random(4), "kn": random(4)}
    builder = GraphBuilder("all", vocab_size=20, hidden_size=8)
    x = builder.embedding("embed", scale=1.5)
    with builder.layer(0):
        h = builder.layer_norm(x, "norm", "norm_bias", 1e-5)
        q, k, v = (builder.linear(h, name, 8) for name in "qkv")
        x = builder.attention(
            q,
            k,
            v,
            q_heads=2,
            kv_heads=2,
            head_dim=4,
            rope=None,
            scale=0.7,
            q_norm="qn",
            k_norm="kn",
            norm_eps=1e-6,
            norm_plus_one=True,
            softcap=2.0,
        )
        x = builder.gelu_mul(
            builder.activate(x, "gelu"), builder.activate(builder.scale(x, 0.5), "gelu_tanh"), tanh=True
        )
        x = builder.gelu_mul(x, x, tanh=False)
        x = builder.rms_norm(x, "post", 1e-6, plus_one=True)
    graph = builder.build(builder.softcap(builder.linear(x, "head", 20), 3.0), num_layers=1, max_position=16)

    tokens = [1, 5, 7, 19, 0]
    h = functional.layer_norm(weights["embed"][tokens] * 1.5, (8,), weights["norm"], weights["norm_bias"], 1e-5)
    heads = {name: (h @ weights[name].T).reshape(5, 2, 4).transpose(0, 1) for name in "qkv"}
    heads["q"] = functional.rms_norm(heads["q"], (4,), 1 + weights["qn"], 1e-6)
    heads["k"] = functional.rms_norm(heads["k"], (4,), 1 + weights["kn"], 1e-6)
    scores = torch.tanh(heads["q"] @ heads["k"].transpose(1, 2) * 0.7 / 2.0) * 2.0
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    y = (scores.softmax(-1) @ heads["v"]).transpose(0, 1).reshape(5, 8)
    y = functional.gelu(functional.gelu(y), approximate="tanh") * functional.gelu(y * 0.5, approximate="tanh")
    y = functional.rms_norm(functional.gelu(y) * y, (8,), 1 + weights["post"], 1e-6)
    expected = torch.tanh(y @ weights["head"].T / 3.0) * 3.0

    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    np.testing.assert_allclose(
        reference_logits(graph, arrays.__getitem__, tokens), expected.numpy(), rtol=1e-4, atol=1e-5
    )
