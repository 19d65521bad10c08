"""Models of families that transformers lacks: those of others that compute the same, stored by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

# A configuration and its tensors as another family would have stored them.
Disguise = Callable[[dict[str, Any], dict[str, torch.Tensor]], tuple[dict[str, Any], dict[str, torch.Tensor]]]


def as_family(model_type: str, architecture: str, **fields: Any) -> Disguise:
    """Other names for the model and for fields of its configuration; a field of None is left out."""

    def disguise(
        config: dict[str, Any], tensors: dict[str, torch.Tensor]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        changed = {**config, "model_type": model_type, "architectures": [architecture], **fields}
        return {name: value for name, value in changed.items() if name not in fields or value is not None}, tensors

    return disguise


def as_internlm2(
    config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Llama as InternLM 2 stores it: other names, and for each kv head its query heads, key and value together."""
    config, tensors = as_family("internlm2", "InternLM2ForCausalLM", bias=config["attention_bias"])(config, tensors)
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    return config, _fused(_renamed(tensors, names), "attention.wqkv", config["num_key_value_heads"])


def as_chatglm(
    config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """GLM as ChatGLM stores it: other names everywhere, q, k and v one after the other in one tensor."""
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.layers": "transformer.encoder.layers",
        "model.norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    fields = {
        "num_hidden_layers": "num_layers",
        "vocab_size": "padded_vocab_size",
        "intermediate_size": "ffn_hidden_size",
        "head_dim": "kv_channels",
        "rms_norm_eps": "layernorm_epsilon",
        "max_position_embeddings": "seq_length",
        "attention_bias": "add_qkv_bias",
        "num_key_value_heads": "multi_query_group_num",
    }
    stored = {new: config[old] for old, new in fields.items()}
    kept = {name: config[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "dtype")}
    ratio = config["rope_parameters"]["rope_theta"] / 10000.0
    told = {"multi_query_attention": True, "rope_ratio": ratio, "original_rope": True, "add_bias_linear": False}
    family = {"model_type": "chatglm", "architectures": ["ChatGLMModel"], "tie_word_embeddings": False}
    return {**family, **kept, **stored, **told}, _fused(_renamed(tensors, names), "self_attention.query_key_value", 1)


def as_baichuan(
    config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Llama, or SmolLM3 without rope, as Baichuan stores it: q, k and v one after the other in one tensor."""
    rotated = config["model_type"] == "llama"
    family = {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "dtype"]
    kept = {name: config[name] for name in [*names, "rms_norm_eps", "hidden_act", "tie_word_embeddings"]}
    length = {"max_position_embeddings" if rotated else "model_max_length": config["max_position_embeddings"]}
    return {**family, **kept, **length}, _fused(tensors, "self_attn.W_pack", 1)


def as_baichuan2(
    config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """As Baichuan 2 stores it, with rows of the head stretched, which it makes as long as 1."""
    config, stored = as_baichuan(config, tensors)
    head = tensors["lm_head.weight"]
    lengths = torch.linspace(0.5, 3, len(head))[:, None]
    return config, {**stored, "lm_head.weight": head * lengths}


def _renamed(tensors: dict[str, torch.Tensor], names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def _fused(tensors: dict[str, torch.Tensor], fused: str, groups: int) -> dict[str, torch.Tensor]:
    """q, k and v of each layer as one tensor, the heads of each of `groups` together."""
    stored = {name: tensor for name, tensor in tensors.items() if not re.search(r"self_attn\.[qkv]_proj", name)}
    for name in tensors:
        if "self_attn.q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
            stored[name.replace("self_attn.q_proj", fused)] = torch.cat(grouped, 1).flatten(0, 1)
    return stored


def as_stored_at_first(
    config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A model with a vision tower by the names transformers gave its tensors before version 4.52."""
    names = {"model.language_model": "language_model.model", "lm_head": "language_model.lm_head"}
    parts = {"model.vision_tower": "vision_tower", "model.multi_modal_projector": "multi_modal_projector"}
    return config, _renamed(tensors, {**names, **parts})
