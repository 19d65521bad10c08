"""Turns a small safetensors checkpoint into GGUF the way llama.cpp's converter does, for tests of the way back.

Names come from the `gguf` package's own map. What else the converter does (llama.cpp, conversion/) is here as facts:
the keys it writes, the rows of q and k it interleaves, the tensors it splits, joins, stacks or adds one to.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.models.tiny import read_config, read_weights

Array = NDArray[np.float32]
Weights = dict[str, Array]
Config = dict[str, Any]
# Families whose keys and values have as many heads as queries, whatever a configuration says, or say it otherwise.
MULTI_HEAD = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt")
Change = Callable[[Weights, Config], Weights]


def as_is(weights: Weights, config: Config) -> Weights:
    """Most families."""
    return weights


def interleaved(values: Array, heads: int) -> Array:
    """The two halves of every head, row by row in turn."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    )


def paired(weights: Weights, config: Config) -> Weights:
    """Llama and its relations: q and k in the order of llama.cpp's rotation of neighbours."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    parts = {name: name.split(".")[-2] for name in weights if "." in name}
    return {
        name: interleaved(values, config[heads[parts[name]]]) if parts.get(name) in heads else values
        for name, values in weights.items()
    }


def shifted(weights: Weights, config: Config) -> Weights:
    """Gemma: the one that its norms add to their weights is added already."""
    return {
        name: values + np.float32(1) if name.endswith("norm.weight") else values for name, values in weights.items()
    }


def transposed(weights: Weights, config: Config) -> Weights:
    """GPT-2: weights [in, out] become [out, in]."""
    return {
        name: values.T if re.search(r"\.c_(attn|proj|fc)\.weight$", name) else values
        for name, values in weights.items()
    }


def ungrouped(weights: Weights, config: Config) -> Weights:
    """Falcon, BLOOM, GPT-NeoX: of heads that lie in groups of queries, key and value, first all queries, and so on."""
    queries = config.get("num_attention_heads") or config["n_head"]
    keys = queries
    if config["model_type"] == "falcon":
        keys = config["num_kv_heads"] if config["new_decoder_architecture"] else 1 if config["multi_query"] else queries
    changed = {}
    for name, values in weights.items():
        if ".query_key_value." in name:
            groups = values.reshape(keys, queries // keys + 2, -1, *values.shape[1:])
            split = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in split])
        changed[name] = values
    return changed


def stacked_norms(weights: Weights, config: Config) -> Weights:
    """StableLM: the norms of a layer's heads in one tensor."""
    changed: Weights = {}
    for name, values in weights.items():
        match = re.fullmatch(r"(.*_layernorm)\.norms\.(\d+)\.weight", name)
        if match is None:
            changed[name] = values
        elif match[2] == "0":
            count = sum(other.startswith(f"{match[1]}.norms.") for other in weights)
            changed[f"{match[1]}.weight"] = np.stack(
                [weights[f"{match[1]}.norms.{head}.weight"] for head in range(count)]
            )
    return changed


def stacked_experts(weights: Weights, config: Config) -> Weights:
    """Mixtures: the experts of a layer in one tensor."""
    changed: Weights = {}
    for name, values in weights.items():
        match = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            changed[name] = values
        elif match[2] == "0":
            count = sum(
                re.fullmatch(rf"{match[1]}\.experts\.\d+\.{match[3]}\.weight", key) is not None for key in weights
            )
            merged = f"{match[1]}.experts.{match[3]}.weight"
            if match[1].endswith("block_sparse_moe"):
                layer = name.split(".")[2]
                merged = f"layers.{layer}.feed_forward.experts.{match[3]}.weight"
            changed[merged] = np.stack(
                [weights[f"{match[1]}.experts.{each}.{match[3]}.weight"] for each in range(count)]
            )
    return changed


def latent(weights: Weights, config: Config) -> Weights:
    """DeepSeek: of the expansion of latent vectors the keys of each head, transposed, and the values."""
    changed: Weights = {}
    for name, values in weights.items():
        if not name.endswith("kv_b_proj.weight"):
            changed[name] = values
            continue
        keys = config["qk_nope_head_dim"]
        heads = values.reshape(config["num_attention_heads"], keys + config["v_head_dim"], -1)
        changed[name.replace("kv_b_proj", "k_b_proj")] = heads[:, :keys].swapaxes(1, 2)
        changed[name.replace("kv_b_proj", "v_b_proj")] = heads[:, keys:]
    return changed


def alternating(weights: Weights, config: Config) -> Weights:
    """gpt-oss: stacks [in, out] become [out, in], and their rows that take turns, gate and up, are parted."""
    changed: Weights = {}
    for name, values in weights.items():
        if "gate_up_proj" in name:
            kind = "bias" if name.endswith("_bias") else "weight"
            rows = values if kind == "bias" else values.swapaxes(1, 2)
            for start, part in ((0, "gate"), (1, "up")):
                base = name.removesuffix("_bias").replace("gate_up_proj", f"{part}_proj")
                changed[f"{base}.{kind}"] = rows[:, start::2]
        elif name.endswith("experts.down_proj"):
            changed[f"{name}.weight"] = values.swapaxes(1, 2)
        elif name.endswith("experts.down_proj_bias"):
            changed[f"{name.removesuffix('_bias')}.bias"] = values
        else:
            changed[f"{name}.weight" if name.endswith("sinks") else name] = values
    return changed


def halved(weights: Weights, config: Config) -> Weights:
    """Llama 4: stacks [in, out] become [out, in], gate and up are parted."""
    changed: Weights = {}
    for name, values in weights.items():
        if "experts.gate_up_proj" in name:
            gate, up = np.split(values.swapaxes(1, 2), 2, axis=1)
            for part, half in (("gate", gate), ("up", up)):
                changed[f"{name.replace('gate_up_proj', f'{part}_proj')}.weight"] = half
        elif name.endswith("experts.down_proj"):
            changed[f"{name}.weight"] = values.swapaxes(1, 2)
        else:
            changed[name] = values
    return changed


def corrected(weights: Weights, config: Config) -> Weights:
    """DeepSeek-V3: the correction of experts' scores is a bias."""
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): each for name, each in weights.items()}


def unpacked(weights: Weights, config: Config) -> Weights:
    """Baichuan, InternLM 2: q, k and v apart, from one tensor or from groups of heads."""
    queries = config["num_attention_heads"]
    keys = config.get("num_key_value_heads", queries)
    changed: Weights = {}
    for name, values in weights.items():
        match = re.fullmatch(r"(model\.layers\.\d+)\.(self_attn\.W_pack|attention\.wqkv)\.(weight|bias)", name)
        if match is None:
            changed[name] = values
            continue
        if match[2].endswith("wqkv"):
            groups = values.reshape(keys, queries // keys + 2, -1, *values.shape[1:])
            parts = [groups[:, :-2], groups[:, -2], groups[:, -1]]
        else:
            parts = np.split(values, 3)
        for part, rows in zip("qkv", parts, strict=True):
            changed[f"{match[1]}.self_attn.{part}_proj.{match[3]}"] = rows.reshape(-1, *values.shape[1:])
    return paired(changed, {**config, "num_key_value_heads": keys})


def both(first: Change, second: Change) -> Change:
    """One change after another."""
    return lambda weights, config: second(first(weights, config), config)


def rope_of(config: Config) -> Config:
    """The parameters of the (global) rope, in newer configurations or older ones."""
    parameters = config.get("rope_parameters") or {}
    return parameters.get("full_attention", parameters)


def feed_forward(config: Config) -> int:
    """The width of the feed-forward, four times the model's where it is not given."""
    hidden = config.get("hidden_size") or config.get("n_embd") or config["d_model"]
    if config["model_type"] in ("bloom", "falcon", "mpt"):
        return 4 * hidden
    if config["model_type"] == "llama4_text":
        return config["intermediate_size_mlp"]
    return config.get("n_inner") or config.get("intermediate_size") or 4 * hidden


def context(config: Config) -> int:
    """The longest sequence."""
    if config["model_type"] == "bloom":
        return config.get("seq_length", 2048)
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    return next((config[name] for name in names if config.get(name) is not None), 2048)


def rotary(writer: gguf.GGUFWriter, config: Config) -> None:
    """The part of a head that is rotated."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    part = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    writer.add_rope_dimension_count(int(part * head))


def common_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    """The keys the converter writes for every architecture, of fields that are there."""

    def first(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    rope = rope_of(config)
    for add, value in (
        (writer.add_block_count, first("num_hidden_layers", "n_layer", "n_layers")),
        (
            writer.add_context_length,
            context(config),
        ),
        (writer.add_embedding_length, first("hidden_size", "n_embd", "d_model")),
        (writer.add_feed_forward_length, feed_forward(config)),
        (writer.add_head_count, first("num_attention_heads", "n_head", "n_heads")),
        (writer.add_head_count_kv, None if config["model_type"] in MULTI_HEAD else first("num_key_value_heads")),
        (writer.add_rope_freq_base, rope.get("rope_theta", config.get("rope_theta"))),
        (writer.add_layer_norm_rms_eps, first("rms_norm_eps")),
        (writer.add_layer_norm_eps, first("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")),
        (writer.add_key_length, first("head_dim")),
        (writer.add_value_length, first("head_dim")),
        (writer.add_expert_count, first("num_local_experts", "num_experts", "n_routed_experts")),
        (writer.add_expert_used_count, first("num_experts_per_tok")),
    ):
        if value is not None:
            add(value)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def no_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    """Families without keys of their own."""


def windowed(writer: gguf.GGUFWriter, config: Config) -> None:
    """A sliding window."""
    writer.add_sliding_window(config["sliding_window"])


def gemma2_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    windowed(writer, config)
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def gemma3_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    windowed(writer, config)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])


def granite_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def olmo_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_layer_norm_eps(1e-5)
    if config["clip_qkv"] is not None:
        writer.add_clamp_kqv(config["clip_qkv"])


def patterned(writer: gguf.GGUFWriter, config: Config) -> None:
    windowed(writer, config)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def gpt_neox_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    rotary(writer, config)
    writer.add_parallel_residual(config["use_parallel_residual"])


def stablelm_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    rotary(writer, config)
    writer.add_parallel_residual(config["use_parallel_residual"])


def falcon_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_tensor_data_layout("jploski")
    writer.add_head_count_kv(config["num_kv_heads"] if config["new_decoder_architecture"] else 1)


def single_head(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_head_count_kv(1)


def bloom_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_head_count_kv(config["n_head"])


def mpt_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    attention = config["attn_config"]
    writer.add_layer_norm_eps(1e-5)
    if attention["clip_qkv"] is not None:
        writer.add_clamp_kqv(attention["clip_qkv"])
    writer.add_max_alibi_bias(attention["alibi_bias_max"])


def cohere_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def cohere2_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    cohere_keys(writer, config)
    windowed(writer, config)


def phi3_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    rope = rope_of(config)
    head = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head))
    original = rope.get("original_max_position_embeddings", config["original_max_position_embeddings"])
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope.get("long_factor"):
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors((1 + np.log(scale) / np.log(original)) ** 0.5 if scale > 1 else 1.0)


def qwen2_moe_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def qwen3_moe_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def minicpm_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_embedding_scale(config["scale_emb"])
    writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
    writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])


def gpt_oss_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    windowed(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def deepseek_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    sigmoid = config["model_type"] == "deepseek_v3"
    kind = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kind.SIGMOID if sigmoid else kind.SOFTMAX)
    if rope_of(config).get("mscale_all_dim") is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope_of(config)["mscale_all_dim"])


def chatglm_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"] // 2)


def llama4_keys(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


@dataclass(frozen=True)
class Conversion:
    """How the checkpoints of one model_type become GGUF."""

    architecture: str
    change: Change = as_is
    keys: Callable[[gguf.GGUFWriter, Config], None] = no_keys


CONVERSIONS: dict[str, Conversion] = {
    "baichuan": Conversion("baichuan", unpacked),
    "bloom": Conversion("bloom", ungrouped, bloom_keys),
    "chatglm": Conversion("chatglm", keys=chatglm_keys),
    "cohere": Conversion("command-r", keys=cohere_keys),
    "cohere2": Conversion("cohere2", keys=cohere2_keys),
    "deepseek_v2": Conversion("deepseek2", both(latent, stacked_experts), deepseek_keys),
    "deepseek_v3": Conversion("deepseek2", both(both(latent, corrected), stacked_experts), deepseek_keys),
    "falcon": Conversion("falcon", ungrouped, falcon_keys),
    "gemma": Conversion("gemma", shifted),
    "gemma2": Conversion("gemma2", shifted, gemma2_keys),
    "gemma3_text": Conversion("gemma3", shifted, gemma3_keys),
    "glm": Conversion("chatglm", keys=rotary),
    "glm4": Conversion("glm4", keys=rotary),
    "gpt2": Conversion("gpt2", transposed),
    "gpt_bigcode": Conversion("starcoder", keys=single_head),
    "gpt_neox": Conversion("gptneox", ungrouped, gpt_neox_keys),
    "gpt_oss": Conversion("gpt-oss", alternating, gpt_oss_keys),
    "granite": Conversion("granite", paired, granite_keys),
    "internlm2": Conversion("internlm2", unpacked),
    "llama": Conversion("llama", paired),
    "llama4_text": Conversion("llama4", halved, llama4_keys),
    "minicpm": Conversion("minicpm", paired, minicpm_keys),
    "mistral": Conversion("llama", paired, windowed),
    "mixtral": Conversion("llama", both(paired, stacked_experts)),
    "mpt": Conversion("mpt", keys=mpt_keys),
    "olmo": Conversion("olmo", paired, olmo_keys),
    "olmo2": Conversion("olmo2"),
    "olmo3": Conversion("olmo2", keys=patterned),
    "olmoe": Conversion("olmoe", stacked_experts),
    "phi": Conversion("phi2", keys=rotary),
    "phi3": Conversion("phi3", keys=phi3_keys),
    "qwen2": Conversion("qwen2"),
    "qwen2_moe": Conversion("qwen2moe", stacked_experts, qwen2_moe_keys),
    "qwen3": Conversion("qwen3"),
    "qwen3_moe": Conversion("qwen3moe", stacked_experts, qwen3_moe_keys),
    "smollm3": Conversion("smollm3", paired),
    "stablelm": Conversion("stablelm", stacked_norms, stablelm_keys),
    "starcoder2": Conversion("starcoder2"),
}


def llama3_factors(config: Config) -> Array | None:
    """What Llama 3's rope divides each frequency by; the converter writes it as a tensor."""
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    smooth = (rope["original_max_position_embeddings"] / waves - low) / (high - low)
    return (1 / ((1 - np.clip(smooth, 0, 1)) / rope["factor"] + np.clip(smooth, 0, 1))).astype(np.float32)


CHATGLM = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "rms_norm_eps": "layernorm_epsilon",
    "max_position_embeddings": "seq_length",
    "num_key_value_heads": "multi_query_group_num",
}


def convert(directory: Path, target: Path) -> Path:
    """The checkpoint of a directory as a GGUF file in float32, without its tokenizer."""
    config, weights = read_config(directory), read_weights(directory)
    if config["model_type"] == "chatglm":
        config |= {name: config[old] for name, old in CHATGLM.items()} | {"rope_theta": 10000 * config["rope_ratio"]}
    conversion = CONVERSIONS[config["model_type"]]
    writer = gguf.GGUFWriter(target, conversion.architecture)
    common_keys(writer, config)
    conversion.keys(writer, config)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == conversion.architecture)
    layers = next(config[name] for name in ("num_hidden_layers", "n_layer", "n_layers") if name in config)
    names = gguf.get_tensor_name_map(architecture, layers)
    tied = config.get("tie_word_embeddings", False)
    for old, values in conversion.change(weights, config).items():
        if tied and old == "lm_head.weight":
            continue
        suffixes = (".weight", ".bias")
        new = names.get_name(old, suffixes) or names.get_name(old.removeprefix("transformer."), suffixes)
        assert new is not None, old
        writer.add_tensor(new, np.ascontiguousarray(values, np.float32))
    rope = rope_of(config)
    for key, name in (("long_factor", "rope_factors_long"), ("short_factor", "rope_factors_short")):
        if rope.get(key):
            writer.add_tensor(f"{name}.weight", np.array(rope[key], np.float32))
    factors = llama3_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
