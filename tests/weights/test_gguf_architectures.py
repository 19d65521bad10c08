"""A checkpoint converted to GGUF is the same model: the same tensors, the same graph, the same logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.models.derived import derived_source
from octavo.models.reference import reference_logits
from octavo.models.registry import build_graph, check_weights, fit_names, supported_families
from octavo.weights import Checkpoint, open_checkpoint
from octavo.weights.gguf_families import ARCHITECTURES
from tests.models.tiny import TINY_MODELS, make_tiny_model, random_tokens, tiny_models
from tests.weights.gguf_conversion import CONVERSIONS, convert

__all__ = ["tiny_models"]  # a fixture

# Of the families' own tiny models those that llama.cpp has: it has no Falcon with slopes, and octavo no larger Baichuan
# from GGUF.
CONVERTED = sorted(
    name
    for name, recipe in TINY_MODELS.items()
    if name in CONVERSIONS or (recipe.model_type in CONVERSIONS and recipe.disguise is None and name != "falcon rw")
)
# What its converter leaves out, or knows of a family without being told.
CHANGES: dict[str, dict[str, Any]] = {
    "chatglm": {"head_dim": 16},
    "cohere2": {"num_hidden_layers": 5, "sliding_window_pattern": 4},
    "deepseek_v3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.1,
            "mscale_all_dim": 1.1,
        }
    },
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None},
    "llama4_text": {
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2,
        "moe_layers": None,
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0 + 0.1 * i for i in range(12)],
            "long_factor": [1.5 + 0.5 * i for i in range(12)],
        }
    },
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": []},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "use_sliding_window": False},
    "starcoder2": {"sliding_window": None},
}


def logits(checkpoint: Checkpoint, tokens: list[int]) -> np.ndarray:
    graph = fit_names(build_graph(checkpoint.config), checkpoint.names())
    check_weights(graph, checkpoint)
    weights = derived_source(checkpoint, graph.derived)
    return reference_logits(graph, lambda name: weights.tensor(name).read_f32(), tokens)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_checkpoint_is_the_same_model(name: str, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    recipe, directory = TINY_MODELS[name], tiny_models[name]
    if name in CHANGES:
        values = {key: value for key, value in {**recipe.values, **CHANGES[name]}.items() if value is not None}
        directory = make_tiny_model(replace(recipe, values=values), tmp_path)
    stored, converted = open_checkpoint(directory), open_checkpoint(convert(directory, tmp_path / "model.gguf"))
    graphs = [fit_names(build_graph(each.config), each.names()) for each in (stored, converted)]
    for weight in graphs[0].sources().keys() & set(converted.names()):
        found, wanted = converted.tensor(weight), stored.tensor(weight)
        if recipe.model_type != "gpt2":  # its matrices are transposed
            np.testing.assert_allclose(found.read_f32(), wanted.read_f32(), rtol=0, atol=1e-6, err_msg=weight)
    tokens = random_tokens(40, graphs[0].vocab_size)
    expected = logits(stored, tokens)
    np.testing.assert_allclose(logits(converted, tokens), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert (graphs[1].max_position, graphs[1].num_layers) == (graphs[0].max_position, graphs[0].num_layers)


def test_every_architecture_is_converted_by_some_test() -> None:
    families = {family.model_type for family in supported_families()}
    tested = {
        CONVERSIONS[name if name in CONVERSIONS else TINY_MODELS[name].model_type].architecture for name in CONVERTED
    }
    run = {name for name, architecture in ARCHITECTURES.items() if architecture.model_type in families}
    # What nothing is converted to any more: a name that some of Llama's files had.
    assert run - tested == {"mistral"}
