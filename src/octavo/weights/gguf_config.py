"""GGUF metadata in the words of a Hugging Face config.json.

Every key of the architecture that could change the arithmetic is translated or refused by name; none is skipped over.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from octavo.errors import WeightsError
from octavo.weights.gguf_architectures import Architecture, Heads
from octavo.weights.gguf_families import ARCHITECTURES
from octavo.weights.gguf_file import GgufFile
from octavo.weights.gguf_keys import ArchitectureKeys
from octavo.weights.tensors import Float32Array

__all__ = ["RopeFactors", "find_architecture", "translate_config", "translate_generation_config"]

ROPE_FACTORS_NAME = "rope_freqs.weight"
LONG_FACTORS_NAME, SHORT_FACTORS_NAME = "rope_factors_long.weight", "rope_factors_short.weight"


class RopeFactors(NamedTuple):
    """The tensors of numbers that rope frequencies are divided by: always, or in a long or a short context."""

    always: Float32Array | None = None
    long: Float32Array | None = None
    short: Float32Array | None = None


def find_architecture(file: GgufFile, names: Collection[str]) -> Architecture:
    """The architecture of a file with tensors of these names; what is not in the table is refused with what is."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise WeightsError(
            f"{file.path}: GGUF architecture {name!r:.80} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    found = ARCHITECTURES[name]
    return found if found.variant is None else found.variant(file.metadata, names) or found


def translate_config(
    file: GgufFile, architecture: Architecture, names: Collection[str], vocab_size: int, factors: RopeFactors
) -> tuple[dict[str, Any], Heads]:
    """The config.json of a GGUF file with tensors of these names, and its heads."""
    keys = ArchitectureKeys(file, file.metadata["general.architecture"])
    hidden_size, (heads, kv_heads, head_dim) = keys.integer("embedding_length"), read_heads(keys, architecture)
    context_length = keys.integer("context_length")
    sliding_window = keys.integer("attention.sliding_window") if keys.values.get("attention.sliding_window") else None
    keys.read.add("attention.sliding_window")
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "num_hidden_layers": keys.integer("block_count", limit=1 << 16),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": keys.integer("feed_forward_length"),
        "vocab_size": vocab_size,
        "max_position_embeddings": context_length,
        architecture.epsilon or f"{architecture.norm}_norm_eps": epsilon(keys, architecture),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "sliding_window": sliding_window,
        "use_sliding_window": sliding_window is not None,
        "attention_dropout": 0.0,
        **architecture.constants,
    }
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        if architecture.partial_rotary is None or rotated > head_dim:
            raise keys.refuse(
                "rope.dimension_count", f"is {rotated} where heads have {head_dim} values, which is not supported"
            )
        config[architecture.partial_rotary] = rotated / head_dim
    config["rope_scaling"] = rope_scaling(keys, context_length, rotated, factors)
    for key, name in architecture.numbers.items():
        value = keys.optional(key)
        if value is not None:
            config[name] = value
    if architecture.adapt is not None:
        architecture.adapt(keys, config, names)
    config.update(token_ids(file))
    keys.check_rest()
    return config, Heads(heads, kv_heads, head_dim)


def read_heads(keys: ArchitectureKeys, architecture: Architecture) -> Heads:
    """The numbers of heads and their size."""
    hidden_size, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if architecture.latent:
        return Heads(heads, heads, keys.integer("rope.dimension_count"))
    if not keys.has("attention.key_length") and hidden_size % heads:
        raise keys.refuse("attention.head_count", f"is {heads}, which does not divide embedding_length {hidden_size}")
    head_dim = keys.integer("attention.key_length", hidden_size // heads or 1)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.refuse(
            "attention.value_length", f"differs from attention.key_length {head_dim}, which is not supported"
        )
    return Heads(heads, keys.integer("attention.head_count_kv", heads), head_dim)


def epsilon(keys: ArchitectureKeys, architecture: Architecture) -> float:
    """What norms add to the variance. All norms of an architecture are of one kind, so the other key means nothing."""
    keys.read |= {"attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"}
    key = f"attention.layer_norm_{'rms_' if architecture.norm == 'rms' else ''}epsilon"
    value = keys.number(key)
    if value is None:
        raise keys.refuse(key, "is missing")
    return value


def rope_scaling(
    keys: ArchitectureKeys, context_length: int, head_dim: int, factors: RopeFactors
) -> dict[str, Any] | None:
    """The rope_scaling of a config.json, from the metadata or from the tensors of frequency divisors."""
    kind = keys.values.get("rope.scaling.type", "linear")
    keys.read.add("rope.scaling.type")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    original = keys.integer("rope.scaling.original_context_length", context_length)
    yarn = {
        "attention_factor": keys.number("rope.scaling.yarn_attn_factor"),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow"),
    }
    if factors.long is not None or factors.short is not None:
        return longrope(keys, kind, original, context_length, head_dim, factors)
    if kind not in ("none", "linear", "yarn"):
        raise keys.refuse("rope.scaling.type", f"is {kind!r:.60}; none, linear and yarn are supported")
    if kind != "yarn" and any(value is not None for value in yarn.values()):
        raise keys.refuse("rope.scaling.type", f"is {kind!r}, yet yarn parameters are set")
    scaled = kind == "yarn" or (kind == "linear" and factor != 1.0)
    if factors.always is not None:
        if scaled:
            raise keys.refuse(
                "rope.scaling.type", f"is {kind!r} and the file has {ROPE_FACTORS_NAME} too, which is not supported"
            )
        return scaling_of_factors(keys, factors.always, head_dim)
    if not scaled:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    given = {name: value for name, value in yarn.items() if value is not None}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **given}


def longrope(
    keys: ArchitectureKeys, kind: Any, original: int, context_length: int, head_dim: int, factors: RopeFactors
) -> dict[str, Any]:
    """The LongRoPE scaling of a file with factors for long and for short contexts."""
    if factors.always is not None or kind not in ("none", "linear", "longrope", "yarn"):
        raise keys.refuse("rope.scaling.type", f"is {kind!r:.60} beside {LONG_FACTORS_NAME}, which is not supported")
    scaling: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": original}
    for name, field, values in (
        (LONG_FACTORS_NAME, "long_factor", factors.long),
        (SHORT_FACTORS_NAME, "short_factor", factors.short),
    ):
        if values is None:
            raise WeightsError(f"{keys.path}: has no tensor {name!r}, yet the other of the pair")
        check_factors(keys, name, values, head_dim)
        scaling[field] = [float(value) for value in values]
    attention = keys.number("rope.scaling.attn_factor")
    if attention is not None:
        scaling["attention_factor"] = attention
    keys.number("rope.scaling.factor")  # of the context: already in its length
    scaling["factor"] = context_length / original
    return scaling


def check_factors(keys: ArchitectureKeys, name: str, factors: Float32Array, head_dim: int) -> None:
    """Refuse factors that are not as many as there are frequencies, or not positive numbers."""
    if factors.shape != (head_dim // 2,):
        raise WeightsError(f"{keys.path}: tensor {name!r} has shape {list(factors.shape)}, expected [{head_dim // 2}]")
    if not np.isfinite(factors).all() or factors.min() <= 0:
        raise WeightsError(f"{keys.path}: tensor {name!r} has a factor that is not a positive number")


def scaling_of_factors(keys: ArchitectureKeys, factors: Float32Array, head_dim: int) -> dict[str, Any] | None:
    """The rope_scaling that divides frequencies by ``factors``: Llama 3's parameters where they give the same."""
    check_factors(keys, ROPE_FACTORS_NAME, factors, head_dim)
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
