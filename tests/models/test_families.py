"""Every family computes what transformers computes, from the same checkpoint, before and after the rewrites."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.models.families import baichuan
from octavo.models.reference import reference_logits
from octavo.models.registry import build_graph, fit_names
from octavo.models.rewrites import optimize
from tests.models.disguises import as_baichuan2, as_stored_at_first
from tests.models.tiny import (
    TINY_MODELS,
    WITH_VISION,
    TinyModel,
    make_tiny_model,
    random_tokens,
    read_config,
    read_weights,
    transformers_logits,
)

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

VARIANTS: dict[str, TinyModel] = {
    "bloom with residuals behind norms": TinyModel("bloom", {"apply_residual_connection_post_layernorm": True}),
    "cohere2 with given layer types": TinyModel(
        "cohere2", {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    ),
    "falcon 11b": TinyModel(
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1}
    ),
    "falcon with its own feed-forward": TinyModel("falcon", {"ffn_hidden_size": 96, "tie_word_embeddings": False}),
    "gpt2 with scales by layer": TinyModel("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2 without scales": TinyModel("gpt2", {"scale_attn_weights": False, "activation_function": "relu"}),
    "gpt_bigcode with all kv heads": TinyModel("gpt_bigcode", {"multi_query": False}),
    "gpt_neox with sequential residuals": TinyModel("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox without attention biases": TinyModel(
        "gpt_neox", {"attention_bias": False, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}
    ),
    "mpt without clipping": TinyModel("mpt", {"attn_config": {"softmax_scale": 0.3}}),
    "opt without biases and final norm": TinyModel(
        "opt", {"ffn_dim": 96, "enable_bias": False, "_remove_final_layer_norm": True}
    ),
    "phi with its head tied": TinyModel("phi", {"tie_word_embeddings": True, "hidden_act": "relu2"}),
    "stablelm wholly rotated": TinyModel(
        "stablelm", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0}}
    ),
    "starcoder2 without biases": TinyModel("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "exaone4 with letters for its windows": TinyModel(
        "exaone4", {"sliding_window": 8, "sliding_window_pattern": "LG", "layer_types": _ALTERNATING}
    ),
    "exaone4 without windows": TinyModel("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "gemma3_text with six layers": TinyModel(
        "gemma3_text", {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7}
    ),
    "gemma3 as it was stored at first": TinyModel("gemma3", WITH_VISION, disguise=as_stored_at_first),
    "gemma2 without caps": TinyModel(
        "gemma2", {"head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    ),
    "granite with biases": TinyModel("granite", {"attention_bias": True, "mlp_bias": True}),
    "llama with all biases": TinyModel("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without grouped heads": TinyModel("llama", {"num_key_value_heads": 4}),
    "llama with one kv head": TinyModel("llama", {"num_key_value_heads": 1}),
    "llama with linear rope": TinyModel("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama with dynamic rope": TinyModel("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}}),
    "llama with yarn": TinyModel("llama", {"rope_parameters": YARN}),
    "llama with yarn of given temperatures": TinyModel(
        "llama",
        {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "llama with yarn of a given attention factor": TinyModel(
        "llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}}
    ),
    "mistral without a window": TinyModel("mistral", {"sliding_window": None}),
    "olmo without a limit": TinyModel("olmo", {"tie_word_embeddings": True}),
    "olmo3 with yarn in its full layers": TinyModel(
        "olmo3",
        {
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "phi3 of many lengths": TinyModel(
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.5 + 0.5 * i for i in range(8)],
            },
        },
    ),
    "phi3 of its first length": TinyModel(
        "phi3",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [1.5 + 0.5 * i for i in range(8)],
            },
        },
    ),
    "phi3 without longrope": TinyModel("phi3"),
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
    "smollm3 with given layers": TinyModel("smollm3", {"no_rope_layers": [0, 1, 1], "attention_bias": True}),
    "yi, which is llama": TinyModel("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "rope_theta": 5e6}),
}


def assert_equals_transformers(directory: Path) -> None:
    config, weights = read_config(directory), read_weights(directory)
    tokens = random_tokens(48, config["vocab_size"])
    expected = transformers_logits(directory, tokens)
    graph = fit_names(build_graph(config), weights)
    weights |= {name: view.array(weights[view.source]) for name, view in graph.derived.items()}
    for form in (graph, optimize(graph)):
        logits = reference_logits(form, weights.__getitem__, tokens)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tiny_model_gives_transformers_logits(name: str, tiny_models: dict[str, Path]) -> None:
    assert_equals_transformers(tiny_models[name])


def test_baichuan2_divides_the_rows_of_its_head_by_their_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baichuan, "SECOND_VOCABULARY", 300)
    recipe = TinyModel("llama", {"num_key_value_heads": 4}, disguise=as_baichuan2)
    directory = make_tiny_model(recipe, tmp_path)
    weights = read_weights(directory)
    graph = build_graph(read_config(directory))
    weights |= {name: view.array(weights[view.source]) for name, view in graph.derived.items()}
    tokens = random_tokens(20)
    # The original's head has rows of other lengths than 1: what it gives is divided by them too.
    lengths = np.linalg.norm(read_weights(directory / "original")["lm_head.weight"], axis=1)
    expected = transformers_logits(directory, tokens) / lengths
    logits = reference_logits(optimize(graph), weights.__getitem__, tokens)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    assert_equals_transformers(make_tiny_model(VARIANTS[name], tmp_path))
