"""GGUF metadata in the words of a Hugging Face config.json, and GGUF tensor names in those of its checkpoints.

Every key of the architecture that could change the arithmetic is translated or refused by name; none is skipped over.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from octavo.errors import WeightsError
from octavo.weights.gguf_file import GgufFile
from octavo.weights.tensors import Float32Array

__all__ = ["PERMUTED_ARCHITECTURES", "hf_name", "translate_config", "translate_generation_config"]

# GGUF architecture -> (model_type, architectures[0]) of Hugging Face.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
# llama.cpp rotates neighbouring pairs for these and stores the rows of q and k reordered to suit.
PERMUTED_ARCHITECTURES = frozenset({"llama"})

ROPE_FACTORS_NAME = "rope_freqs.weight"
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")

# Keys of an architecture that describe the file and change nothing in the arithmetic.
DESCRIPTIVE_KEYS = frozenset(
    {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.orig_ctx_len"}
)
# Keys that change nothing when they have this value and are refused with any other.
NEUTRAL_VALUES: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "pooling_type": 0,
    "residual_scale": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None for one that no supported architecture has."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    match = LAYER_PATTERN.fullmatch(name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    if part == "attn_rot_embd":  # rope frequencies old files carry; derived, like the buffer of that name
        return f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
    module = LAYER_NAMES.get(part)
    return None if module is None else f"model.layers.{layer}.{module}.{kind}"


class ArchitectureKeys:
    """The metadata keys of one architecture, each read with its type and range checked, the unread ones known."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.path = file.path
        self.prefix = architecture + "."
        self.values = {
            key.removeprefix(self.prefix): v for key, v in file.metadata.items() if key.startswith(self.prefix)
        }
        self.read: set[str] = set()

    def refuse(self, key: str, why: str) -> WeightsError:
        return WeightsError(f"{self.path}: metadata key {self.prefix}{key} {why}")

    def integer(self, key: str, default: int | None = None, limit: int = 1 << 31) -> int:
        """A positive integer; of an array (one item per layer) all items must be equal."""
        self.read.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise self.refuse(key, "is missing")
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if type(value) is not int or not 1 <= value <= limit:
            raise self.refuse(key, f"is {value!r:.80}, a single integer from 1 to {limit} is supported")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A positive finite number, rounded to the shortest decimal that is the same float32 (1e-05, not 9.99e-06)."""
        self.read.add(key)
        value = self.values.get(key, default)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value < 3e38:
            raise self.refuse(key, f"is {value!r:.80}, a positive finite number is expected")
        return float(str(np.float32(value)))

    def check_rest(self) -> None:
        """Refuse every key that was neither read nor is known to change nothing."""
        for key in sorted(self.values.keys() - self.read - DESCRIPTIVE_KEYS):
            value = self.values[key]
            if key not in NEUTRAL_VALUES:
                raise self.refuse(key, f"(value {value!r:.80}) is not supported")
            if value != NEUTRAL_VALUES[key]:
                raise self.refuse(key, f"is {value!r:.80}, only {NEUTRAL_VALUES[key]!r} is supported")


def translate_config(
    file: GgufFile, names: set[str], vocab_size: int, rope_factors: Float32Array | None
) -> dict[str, Any]:
    """The config.json of a GGUF file; ``names`` are its tensors' Hugging Face names."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise WeightsError(
            f"{file.path}: GGUF architecture {architecture!r:.80} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    keys = ArchitectureKeys(file, architecture)
    model_type, model_class = ARCHITECTURES[architecture]
    hidden_size, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if "attention.key_length" not in keys.values and hidden_size % heads:
        raise keys.refuse("attention.head_count", f"is {heads}, which does not divide embedding_length {hidden_size}")
    head_dim = keys.integer("attention.key_length", hidden_size // heads or 1)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.refuse(
            "attention.value_length", f"differs from attention.key_length {head_dim}, which is not supported"
        )
    if keys.integer("rope.dimension_count", head_dim) != head_dim:
        raise keys.refuse("rope.dimension_count", f"differs from the head size {head_dim}, which is not supported")
    context_length = keys.integer("context_length")
    sliding_window = keys.integer("attention.sliding_window") if keys.values.get("attention.sliding_window") else None
    keys.read.add("attention.sliding_window")
    if sliding_window is not None and architecture == "llama":
        model_type, model_class = ARCHITECTURES["mistral"]  # the family of that architecture that has windows
    eps = keys.number("attention.layer_norm_rms_epsilon")
    if eps is None:
        raise keys.refuse("attention.layer_norm_rms_epsilon", "is missing")
    config: dict[str, Any] = {
        "architectures": [model_class],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "num_hidden_layers": keys.integer("block_count", limit=1 << 16),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.integer("feed_forward_length"),
        "vocab_size": vocab_size,
        "max_position_embeddings": context_length,
        "rms_norm_eps": eps,
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(keys, context_length, head_dim, rope_factors),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in names,
        "sliding_window": sliding_window,
        "use_sliding_window": sliding_window is not None,
        "attention_dropout": 0.0,
    }
    config.update(token_ids(file))
    keys.check_rest()
    return config


def rope_scaling(
    keys: ArchitectureKeys, context_length: int, head_dim: int, factors: Float32Array | None
) -> dict[str, Any] | None:
    """The rope_scaling of a config.json, from the metadata or from the tensor of frequency divisors."""
    kind = keys.values.get("rope.scaling.type", "linear")
    keys.read.add("rope.scaling.type")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    original = keys.integer("rope.scaling.original_context_length", context_length)
    yarn = {
        "attention_factor": keys.number("rope.scaling.yarn_attn_factor"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow"),
    }
    if kind not in ("none", "linear", "yarn"):
        raise keys.refuse("rope.scaling.type", f"is {kind!r:.60}; none, linear and yarn are supported")
    if kind != "yarn" and any(value is not None for value in yarn.values()):
        raise keys.refuse("rope.scaling.type", f"is {kind!r}, yet yarn parameters are set")
    scaled = kind == "yarn" or (kind == "linear" and factor != 1.0)
    if factors is not None:
        if scaled:
            raise keys.refuse(
                "rope.scaling.type", f"is {kind!r} and the file has {ROPE_FACTORS_NAME} too, which is not supported"
            )
        return scaling_of_factors(keys, factors, head_dim)
    if not scaled:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    given = {name: value for name, value in yarn.items() if value is not None}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **given}


def scaling_of_factors(keys: ArchitectureKeys, factors: Float32Array, head_dim: int) -> dict[str, Any] | None:
    """The rope_scaling that divides frequencies by ``factors``: Llama 3's parameters where they give the same."""
    if factors.shape != (head_dim // 2,):
        raise WeightsError(
            f"{keys.path}: tensor {ROPE_FACTORS_NAME!r} has shape {list(factors.shape)}, expected [{head_dim // 2}]"
        )
    if not np.isfinite(factors).all() or factors.min() <= 0:
        raise WeightsError(f"{keys.path}: tensor {ROPE_FACTORS_NAME!r} has a factor that is not a positive number")
    if (factors == 1.0).all():
        return None
    theta = keys.number("rope.freq_base", 10000.0) or 10000.0
    parameters = {
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length", 8192),
    }
    if np.allclose(llama3_factors(theta, head_dim, **parameters), factors, rtol=1e-5, atol=0.0):
        return {"rope_type": "llama3", **parameters}
    return {"rope_type": "factors", "factors": [float(factor) for factor in factors]}


def llama3_factors(
    theta: float,
    head_dim: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """By what Llama 3's scaling divides each frequency: 1 for short waves, ``factor`` for long, a blend between."""
    turns = original_max_position_embeddings / (2 * math.pi) * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    divisors: np.ndarray[Any, np.dtype[np.float64]] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return divisors


def token_ids(file: GgufFile) -> dict[str, int]:
    """The special token ids a config.json names."""
    ids: dict[str, int] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if type(value) is not int or value < 0:
            raise WeightsError(
                f"{file.path}: metadata key tokenizer.ggml.{key}_token_id is {value!r:.60}, not a token id"
            )
        ids[f"{name}_token_id"] = value
    return ids


def translate_generation_config(file: GgufFile) -> dict[str, Any]:
    """The generation_config.json of a GGUF file: every token that ends a turn, and the sampling it recommends."""
    config: dict[str, Any] = dict(token_ids(file))
    ends = [config["eos_token_id"]] if "eos_token_id" in config else []
    for key in ("eot", "eom"):
        value = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(value) is int and value >= 0 and value not in ends:
            ends.append(value)
    if ends:
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    for name, key in (
        ("temperature", "temp"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "penalty_repeat"),
    ):
        value = file.metadata.get(f"general.sampling.{key}")
        if type(value) in (int, float):
            config[name] = float(str(np.float32(value))) if isinstance(value, float) else value
    return config
