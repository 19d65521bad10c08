"""Tiny random checkpoints of every family, made with transformers, and the logits transformers gives for them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "A sheet folded three times makes an octavo: sixteen pages, eight leaves, one signature.",
    "def add(left: int, right: int) -> int:\n    return left + right\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 日本語の文章です。 Привет, мир! 🙂",
    "0 1 2 3 10 11 12 100 1000 3.14159 2024-01-01",
]


@dataclass(frozen=True)
class TinyModel:
    """A recipe: `model_type` and configuration values that differ from the common small ones."""

    model_type: str
    values: Mapping[str, Any] = field(default_factory=dict)
    shard_size: str = "1GB"

    def config(self) -> Any:
        """The transformers configuration."""
        common = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        return AutoConfig.for_model(self.model_type, **{**common, **self.values})


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# One or two models a family, together covering what back ends must handle: hidden sizes that are not a multiple of 64,
# vocabularies that are not a multiple of 16, GQA, tied and untied heads, biases, rope scaling, windows shorter than a
# sequence, heads wider than hidden / heads, sharded files.
TINY_MODELS: dict[str, TinyModel] = {
    "bloom": TinyModel("bloom", {"hidden_size": 96, "num_attention_heads": 6}),
    "codegen": TinyModel("codegen", {"rotary_dim": 8, "n_inner": 160}),
    "cohere": TinyModel("cohere", {"attention_bias": True}),
    "cohere with head norms": TinyModel("cohere", {"use_qk_norm": True}),
    "cohere2": TinyModel("cohere2", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "falcon 7b": TinyModel("falcon"),
    "falcon 40b": TinyModel("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon rw": TinyModel("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "gpt2": TinyModel("gpt2", {"hidden_size": 96, "num_attention_heads": 6, "n_inner": 160}),
    "gpt_bigcode": TinyModel("gpt_bigcode", {"n_inner": 160}),
    "gpt_neo": TinyModel("gpt_neo", {"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 8}),
    "gpt_neox": TinyModel("gpt_neox"),
    "gptj": TinyModel("gptj", {"rotary_dim": 8, "n_inner": 160}),
    "llama": TinyModel("llama", {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16}),
    "llama3": TinyModel(
        "llama", {"hidden_size": 128, "tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}, shard_size="100KB"
    ),
    "mistral": TinyModel("mistral", {"hidden_size": 96, "head_dim": 32, "sliding_window": 8}),
    "mpt": TinyModel("mpt", {"hidden_size": 96, "num_attention_heads": 6, "attn_config": {"clip_qkv": 1.5}}),
    "opt": TinyModel("opt", {"ffn_dim": 160}),
    "opt 350m": TinyModel("opt", {"ffn_dim": 160, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "phi": TinyModel("phi"),
    "qwen2": TinyModel(
        "qwen2",
        {
            "vocab_size": 320,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 1,
        },
    ),
    "qwen3": TinyModel("qwen3", {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "stablelm": TinyModel("stablelm", {"use_qkv_bias": True}),
    "stablelm 12b": TinyModel("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": TinyModel("starcoder2", {"sliding_window": 8}),
}


def make_tiny_model(recipe: TinyModel, directory: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint and its tokenizer into `directory`; the same recipe always gives the same numbers."""
    config = recipe.config()
    generator = torch.Generator().manual_seed(zlib.crc32(repr(recipe).encode()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight") or (name.endswith("weight") and parameter.ndim == 1):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            else:
                # Large enough that attention is far from uniform and logits are spread, unlike a fresh initialisation.
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    model.to(dtype).save_pretrained(directory, max_shard_size=recipe.shard_size)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE of exactly VOCAB_SIZE tokens with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def transformers_logits(directory: Path, token_ids: list[int]) -> NDArray[np.float32]:
    """What transformers computes in float32: logits [tokens, vocab]."""
    # Its eager Falcon adds the slopes of ALiBi twice: to the mask, and to the scores.
    kernels = "sdpa" if read_config(directory).get("alibi") else "eager"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=kernels)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].numpy()


def read_config(directory: Path) -> dict[str, Any]:
    """config.json."""
    return json.loads((directory / "config.json").read_text())


def read_weights(directory: Path) -> dict[str, NDArray[np.float32]]:
    """All tensors of all shards."""
    weights: dict[str, NDArray[np.float32]] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        weights.update(load_file(shard))
    return weights


def random_tokens(count: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> list[int]:
    """Token ids of a made-up sequence."""
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


@cache
def _make_all(root: Path) -> dict[str, Path]:
    return {name: make_tiny_model(recipe, root / name.replace(" ", "-")) for name, recipe in TINY_MODELS.items()}


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directory of a tiny float32 checkpoint by name (the keys of TINY_MODELS); import it into a conftest to use it."""
    root = tmp_path_factory.getbasetemp() / "tiny-models"
    root.mkdir(exist_ok=True)
    return _make_all(root)
