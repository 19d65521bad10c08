"""Tiny random checkpoints of every family, made with transformers, and the logits transformers gives for them."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from tests.models.disguises import Disguise, as_baichuan, as_chatglm, as_family, as_internlm2

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 300
_ALIBI = "alibi"  # a file that says that it wants a bias
_ORIGINAL = "original"  # where a disguised model is as transformers saved it
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
    """A recipe: `model_type` and configuration values that differ from the common small ones.

    `disguise` is for families that transformers lacks: a model of one it has that computes the same, stored as theirs,
    or computes it when given a bias of `alibi` with its mask.
    """

    model_type: str
    values: Mapping[str, Any] = field(default_factory=dict)
    shard_size: str = "1GB"
    disguise: Disguise | None = field(default=None, repr=False)
    alibi: bool = False
    norm_weights: float = 1.0  # about which those of norms lie

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


_LATENT = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "kv_lora_rank": 64,
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
}
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 1.1,
}
_QWEN_MOE = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WITH_VISION = {
    "text_config": {**_TEXT, "sliding_window": 8, "sliding_window_pattern": 2},
    "vision_config": _VISION,
    "mm_tokens_per_image": 4,
}

_LLAMA4 = {
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_layers": [0, 2],
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 16,
    "floor_scale": 16,
    "attn_scale": 0.3,
}

# One or two models a family, together covering what back ends must handle: hidden sizes that are not a multiple of 64,
# vocabularies that are not a multiple of 16, GQA, tied and untied heads, biases, rope scaling, windows shorter than a
# sequence, heads wider than hidden / heads, sharded files.
TINY_MODELS: dict[str, TinyModel] = {
    "baichuan": TinyModel("llama", {"num_key_value_heads": 4}, disguise=as_baichuan),
    "baichuan 13b": TinyModel(
        "smollm3",
        {"num_key_value_heads": 4, "no_rope_layers": [0, 0, 0], "tie_word_embeddings": False},
        disguise=as_baichuan,
        alibi=True,
    ),
    "bloom": TinyModel("bloom", {"hidden_size": 96, "num_attention_heads": 6}),
    "chatglm": TinyModel("glm", {"head_dim": 32, "rope_theta": 40000.0}, disguise=as_chatglm),
    "codegen": TinyModel("codegen", {"rotary_dim": 8, "n_inner": 160}),
    "cohere": TinyModel("cohere", {"attention_bias": True}),
    "cohere with head norms": TinyModel("cohere", {"use_qk_norm": True}),
    "cohere2": TinyModel("cohere2", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "deepseek_v2": TinyModel("deepseek_v2", {**_LATENT, "first_k_dense_replace": 1, "q_lora_rank": None}),
    "deepseek_v3": TinyModel(
        "deepseek_v3",
        {
            **_LATENT,
            "first_k_dense_replace": 1,
            "q_lora_rank": 48,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    ),
    "ernie4_5": TinyModel("ernie4_5", {"head_dim": 32, "use_bias": True}),
    "exaone": TinyModel(
        "exaone",
        disguise=as_family(
            "exaone",
            "ExaoneForCausalLM",
            num_layers=3,
            num_hidden_layers=None,
            layer_norm_epsilon=1e-5,
            rms_norm_eps=None,
            activation_function="silu",
            hidden_act=None,
        ),
    ),
    "exaone4": TinyModel("exaone4", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "falcon 40b": TinyModel("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon 7b": TinyModel("falcon"),
    "falcon rw": TinyModel("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "gemma": TinyModel("gemma", {"head_dim": 32, "hidden_size": 96}, norm_weights=0.0),
    "gemma2": TinyModel(
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
        norm_weights=0.0,
    ),
    "gemma3": TinyModel("gemma3", WITH_VISION, norm_weights=0.0),
    "gemma3_text": TinyModel(
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
        norm_weights=0.0,
    ),
    "glm": TinyModel("glm", {"head_dim": 32}),
    "glm4": TinyModel("glm4", {"head_dim": 16, "partial_rotary_factor": 0.75}),
    "glm4_moe": TinyModel(
        "glm4_moe",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "moe_intermediate_size": 48,
            "num_experts_per_tok": 2,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt2": TinyModel("gpt2", {"hidden_size": 96, "num_attention_heads": 6, "n_inner": 160}),
    "gpt_bigcode": TinyModel("gpt_bigcode", {"n_inner": 160}),
    "gpt_neo": TinyModel("gpt_neo", {"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 8}),
    "gpt_neox": TinyModel("gpt_neox"),
    "gpt_oss": TinyModel(
        "gpt_oss", {"intermediate_size": 48, "head_dim": 32, "sliding_window": 8, "num_local_experts": 6}
    ),
    "gptj": TinyModel("gptj", {"rotary_dim": 8, "n_inner": 160}),
    "granite": TinyModel(
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "granitemoe": TinyModel(
        "granitemoe",
        {
            "intermediate_size": 48,
            "num_local_experts": 6,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
        },
    ),
    "hunyuan_v1_dense": TinyModel(
        "hunyuan_v1_dense",
        {"head_dim": 32, "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}},
    ),
    "internlm2": TinyModel("llama", {"attention_bias": True}, disguise=as_internlm2),
    "internlm3": TinyModel(
        "internlm3",
        {"head_dim": 16, "qkv_bias": True, "bias": True},
        disguise=as_family("internlm3", "InternLM3ForCausalLM"),
    ),
    "llama": TinyModel("llama", {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16}),
    "llama3": TinyModel(
        "llama", {"hidden_size": 128, "tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}, shard_size="100KB"
    ),
    "llama4": TinyModel("llama4", {"text_config": {**_TEXT, **_LLAMA4}, "vision_config": _VISION}),
    "llama4_text": TinyModel("llama4_text", _LLAMA4),
    "minicpm": TinyModel(
        "granite",
        {
            "embedding_multiplier": 4.0,
            "residual_multiplier": 1.2 / 3**0.5,
            "attention_multiplier": 0.25,
            "logits_scaling": 64 / 24,
            "tie_word_embeddings": True,
        },
        disguise=as_family(
            "minicpm",
            "MiniCPMForCausalLM",
            scale_emb=4,
            scale_depth=1.2,
            dim_model_base=24,
            embedding_multiplier=None,
            residual_multiplier=None,
            attention_multiplier=None,
            logits_scaling=None,
        ),
    ),
    "ministral": TinyModel("ministral", {"head_dim": 16, "sliding_window": 8, "layer_types": _ALTERNATING}),
    "ministral3": TinyModel(
        "ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "mistral3": TinyModel(
        "mistral3",
        {"text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None}, "vision_config": _VISION},
    ),
    "mistral": TinyModel("mistral", {"hidden_size": 96, "head_dim": 32, "sliding_window": 8}),
    "mixtral": TinyModel("mixtral", {"intermediate_size": 96, "num_local_experts": 5}),
    "mpt": TinyModel("mpt", {"hidden_size": 96, "num_attention_heads": 6, "attn_config": {"clip_qkv": 1.5}}),
    "olmo": TinyModel("olmo", {"clip_qkv": 1.0}),
    "olmo2": TinyModel("olmo2"),
    "olmo3": TinyModel("olmo3", {"sliding_window": 8, "layer_types": _ALTERNATING}),
    "olmoe": TinyModel(
        "olmoe", {"intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4}
    ),
    "opt": TinyModel("opt", {"ffn_dim": 160}),
    "opt 350m": TinyModel("opt", {"ffn_dim": 160, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "phi": TinyModel("phi"),
    "phi3": TinyModel(
        "phi3",
        {
            "hidden_size": 128,
            "partial_rotary_factor": 0.75,
            "sliding_window": 40,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "attention_factor": 1.0,
                "short_factor": [1.0 + 0.1 * i for i in range(12)],
                "long_factor": [1.5 + 0.5 * i for i in range(12)],
            },
        },
    ),
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
    "qwen2_moe": TinyModel("qwen2_moe", {**_QWEN_MOE, "shared_expert_intermediate_size": 96}),
    "qwen3": TinyModel("qwen3", {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3_moe": TinyModel("qwen3_moe", {**_QWEN_MOE, "head_dim": 32, "norm_topk_prob": True}),
    "seed_oss": TinyModel("seed_oss", {"head_dim": 32, "mlp_bias": True}),
    "smollm3": TinyModel(
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "stablelm": TinyModel("stablelm", {"use_qkv_bias": True}),
    "stablelm 12b": TinyModel("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": TinyModel("starcoder2", {"sliding_window": 8}),
}


def make_tiny_model(recipe: TinyModel, directory: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Write the checkpoint and its tokenizer into `directory`; the same recipe always gives the same numbers."""
    config = recipe.config()
    generator = torch.Generator().manual_seed(zlib.crc32(repr(recipe).encode()))
    model = _auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight") or (name.endswith("weight") and parameter.ndim == 1):
                parameter.copy_(recipe.norm_weights + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            else:
                # Large enough that attention is far from uniform and logits are spread, unlike a fresh initialisation.
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    original = directory if recipe.disguise is None else directory / _ORIGINAL
    with _complex_buffers():
        model.to(dtype).save_pretrained(original, max_shard_size=recipe.shard_size)
    if recipe.disguise is not None:
        if recipe.alibi:
            (original / _ALIBI).touch()
        stored, tensors = recipe.disguise(read_config(original), load_tensors(original / "model.safetensors"))
        save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(stored))
    write_tokenizer(directory)
    return directory


def _auto_class(config: Any) -> Any:
    """What makes the model of a configuration, with its vision tower if it has one."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


@contextmanager
def _complex_buffers() -> Iterator[None]:
    """Where torch may say that it makes the rotations of Llama 4's vision model real."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values to real")
        yield


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
    original = directory / _ORIGINAL
    directory = original if original.is_dir() else directory
    # Its eager Falcon adds the slopes of ALiBi twice: to the mask, and to the scores.
    kernels = "sdpa" if read_config(directory).get("alibi") else "eager"
    kind = _auto_class(AutoConfig.from_pretrained(directory))
    with _complex_buffers():
        model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation=kernels)
    if model.config.model_type == "llama4":  # whose whole fails on the answer of its part
        model = model.language_model
    bias = _alibi_bias(model.config.num_attention_heads, len(token_ids)) if (directory / _ALIBI).exists() else None
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), attention_mask=bias).logits[0].numpy()


def _alibi_bias(heads: int, tokens: int) -> torch.Tensor:
    """The mask [1, heads, tokens, tokens] of causal attention under ALiBi, of a power of two heads."""
    assert heads & (heads - 1) == 0
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    return (-slopes[:, None, None] * distance).masked_fill(distance < 0, torch.finfo(torch.float32).min)[None]


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
