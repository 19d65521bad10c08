"""Encoders compute the token vectors transformers computes, in the reference and on the CPU back end."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel

from octavo.errors import ModelError
from octavo.models.reference import reference_logits
from octavo.models.registry import build_graph, check_weights
from octavo.models.rewrites import optimize
from octavo.weights.checkpoint import open_checkpoint
from tests.models.tiny import random_tokens, read_config, read_weights, write_tokenizer

COMMON = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"layer_norm_eps": 1e-12}),
    "bert with relu and wider heads": ("bert", {"hidden_act": "relu", "num_attention_heads": 2, "type_vocab_size": 1}),
    "roberta": ("roberta", {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "xlm-roberta": ("xlm-roberta", {"pad_token_id": 1, "type_vocab_size": 1, "hidden_act": "gelu_new"}),
}


def make_tiny_encoder(folder: Path, model_type: str = "bert", values: dict[str, Any] | None = None) -> Path:
    """A tiny random encoder with a tokenizer; the same arguments always give the same numbers."""
    config = AutoConfig.for_model(model_type, **{**COMMON, **(values or {})})
    model = AutoModel.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{model_type}{values}".encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 1 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 and "embeddings" not in name else 0.3
            parameter.copy_(1 + 0.2 * noise if "LayerNorm.weight" in name else 1.5 * scale * noise)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def transformers_vectors(folder: Path, tokens: list[int]) -> np.ndarray:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_reference_gives_the_vectors_of_transformers(name: str, tmp_path: Path) -> None:
    folder = make_tiny_encoder(tmp_path, *VARIANTS[name])
    tokens = [token if token != 1 else 2 for token in random_tokens(50)]  # padding has no place of its own in RoBERTa
    expected = transformers_vectors(folder, tokens)
    config, weights = read_config(folder), read_weights(folder)
    graph = build_graph(config)
    assert graph.encoder
    check_weights(graph, open_checkpoint(folder))
    for form in (graph, optimize(graph)):
        found = reference_logits(form, weights.__getitem__, tokens)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_fields_that_change_the_arithmetic_are_refused(tmp_path: Path) -> None:
    config = json.loads((make_tiny_encoder(tmp_path) / "config.json").read_text())
    for field, value in (
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("hidden_act", "mish"),
        ("num_attention_heads", 7),
    ):
        with pytest.raises(ModelError, match=field):
            build_graph({**config, field: value})
