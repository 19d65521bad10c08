"""Every family computes what transformers computes, from the same checkpoint, before and after the rewrites."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.models.reference import reference_logits
from octavo.models.registry import build_graph
from octavo.models.rewrites import optimize
from tests.models.tiny import (
    TINY_MODELS,
    TinyModel,
    make_tiny_model,
    random_tokens,
    read_config,
    read_weights,
    transformers_logits,
)

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

VARIANTS: dict[str, TinyModel] = {
    "llama with all biases": TinyModel("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without grouped heads": TinyModel("llama", {"num_key_value_heads": 4}),
    "llama with one kv head": TinyModel("llama", {"num_key_value_heads": 1}),
    "llama with linear rope": TinyModel("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama with yarn": TinyModel("llama", {"rope_parameters": YARN}),
    "llama with yarn of given temperatures": TinyModel(
        "llama",
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "llama with yarn of a given attention factor": TinyModel(
        "llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}}
    ),
    "mistral without a window": TinyModel("mistral", {"sliding_window": None}),
    "qwen2 without windows": TinyModel("qwen2", {"sliding_window": 5, "max_window_layers": 0}),
    "qwen2 with given layer types": TinyModel(
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 with biases, windows and yarn": TinyModel(
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
            "rope_parameters": YARN,
        },
    ),
}


def assert_equals_transformers(directory: Path) -> None:
    config, weights = read_config(directory), read_weights(directory)
    tokens = random_tokens(48, config["vocab_size"])
    expected = transformers_logits(directory, tokens)
    graph = build_graph(config)
    weights |= {name: view.array(weights[view.source]) for name, view in graph.derived.items()}
    for form in (graph, optimize(graph)):
        logits = reference_logits(form, weights.__getitem__, tokens)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tiny_model_gives_transformers_logits(name: str, tiny_models: dict[str, Path]) -> None:
    assert_equals_transformers(tiny_models[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    assert_equals_transformers(make_tiny_model(VARIANTS[name], tmp_path))
