"""The architectures of GGUF files in the words of Hugging Face: a few lines for each family.

An entry of ARCHITECTURES gives the class a model is run as, the names of its tensors, how rows were reordered by
llama.cpp's converter (and are to be put back), and what its configuration has besides what all have.
Facts: llama.cpp, gguf-py/gguf/constants.py, conversion/ and src/models/.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from octavo.weights.gguf_architectures import (
    Architecture,
    Config,
    Part,
    Piece,
    grouped_heads,
    key_pairs,
    key_rows,
    query_pairs,
    query_rows,
    value_rows,
)
from octavo.weights.gguf_keys import ArchitectureKeys

__all__ = ["ARCHITECTURES"]

Names = Collection[str]

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
PARTS: dict[str, Part] = {
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
    # Rope frequencies that old files carry; derived, like the buffer of that name.
    "attn_rot_embd": "self_attn.rotary_emb.inv_freq",
}
PAIRED: dict[str, Part] = {
    "attn_q": Piece("self_attn.q_proj", query_pairs),
    "attn_k": Piece("self_attn.k_proj", key_pairs),
}
# One tensor in some files of a family whose checkpoints have three.
SPLIT_QKV: dict[str, Part] = {
    "attn_qkv": (
        Piece("self_attn.q_proj", query_rows),
        Piece("self_attn.k_proj", key_rows),
        Piece("self_attn.v_proj", value_rows),
    )
}
# Norms behind the blocks: besides those before them, or instead.
SANDWICHED: dict[str, Part] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS: dict[str, Part] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": Piece("mlp.experts.{expert}.gate_proj"),
    "ffn_up_exps": Piece("mlp.experts.{expert}.up_proj"),
    "ffn_down_exps": Piece("mlp.experts.{expert}.down_proj"),
}
SLIDING_PATTERN = "attention.sliding_window_pattern"
GEMMA = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def transformer_top(embedding: str, norm: str, head: str = "lm_head", **others: str) -> dict[str, str]:
    """Names outside of layers, where they are not Llama's."""
    modules = {"token_embd": embedding, "output_norm": norm, "output": head, **others}
    return {f"{part}.{kind}": f"{name}.{kind}" for part, name in modules.items() for kind in ("weight", "bias")}


def stacked(part: str, stack: str) -> dict[str, Part]:
    """The experts' tensors of a family whose checkpoints have other stacks: the views that its graph takes of those."""
    return {
        f"ffn_{part}_exps.weight": Piece(f"{stack}:{{expert}} {part}", bare=True),
        f"ffn_{part}_exps.bias": Piece(f"{stack}_bias:{{expert}} {part}", bare=True),
    }


def slide(keys: ArchitectureKeys, config: Config, period: int | None) -> None:
    """Windows in all layers but every ``period``-th, unless the file says in which."""
    layers = config["num_hidden_layers"]
    sliding = keys.pattern(SLIDING_PATTERN, layers, period)
    if config["sliding_window"] is None:
        sliding = [False] * layers
    if sliding is not None:
        config["layer_types"] = ["sliding_attention" if item else "full_attention" for item in sliding]
    config.pop("use_sliding_window")


def scale_gemma(config: Config, largest: int) -> None:
    """The scale of scores, which files do not tell: by the head size, but in the largest model by the width."""
    by_width = config["num_hidden_layers"] == largest
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if by_width else config["head_dim"]
    )


def adapt_gemma2(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """Gemma 2: a window in every other layer."""
    config["sliding_window"] = config["sliding_window"] or 4096
    slide(keys, config, 2)
    scale_gemma(config, 46)
    config.setdefault("attn_logit_softcapping", None)
    config.setdefault("final_logit_softcapping", None)


def adapt_gemma3(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """Gemma 3: windows in five layers of six, with a rope of their own."""
    slide(keys, config, 6)
    scale_gemma(config, 62)
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10000.0)


def adapt_minicpm(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """MiniCPM: scales in the words of its configuration, with those of old files that lack them."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    config["scale_emb"] = keys.number("embedding_scale", 12.0)
    config["scale_depth"] = (keys.number("residual_scale") or 1.4 / layers**0.5) * layers**0.5
    config["dim_model_base"] = hidden / (keys.number("logit_scale") or hidden / 256)


def adapt_olmo(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """OLMo: a limit of queries, keys and values; its norms have no weights."""
    if config.pop("layer_norm_eps") != 1e-5:
        raise keys.refuse("attention.layer_norm_epsilon", "is not the 1e-05 of this architecture")
    config["clip_qkv"] = keys.optional("attention.clamp_kqv")


def adapt_olmo2(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """OLMo 2, or with windows OLMo 3."""
    if config["sliding_window"] is None:
        keys.read.add(SLIDING_PATTERN)
        return
    slide(keys, config, 4)
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", config["rope_theta"])
    config.update(model_type="olmo3", architectures=["Olmo3ForCausalLM"])


def adapt_smollm3(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """SmolLM3: no rope in every fourth layer."""
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]


def adapt_llama(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """Llama, or with windows the family of that architecture that has them."""
    if config["sliding_window"] is not None:
        config.update(model_type="mistral", architectures=["MistralForCausalLM"])


def adapt_baichuan(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """Baichuan 7B is Llama; no key tells the others, which have slopes in place of rope or a head made of unit rows."""
    if config["num_hidden_layers"] == 40:
        raise keys.refuse("block_count", "is 40: Baichuan 13B has slopes (ALiBi), take its safetensors")
    if config["vocab_size"] >= 125696:
        raise keys.refuse(
            "vocab_size", f"is {config['vocab_size']}: Baichuan 2 normalises its head, take its safetensors"
        )


def adapt_stablelm(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """StableLM: what its tensors tell of biases and of norms of heads."""
    config["use_parallel_residual"] = keys.flag("use_parallel_residual", True)
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in names
    config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in names


def adapt_gpt_neox(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """GPT-NeoX."""
    config["use_parallel_residual"] = keys.flag("use_parallel_residual", True)
    config["attention_bias"] = "blk.0.attn_qkv.bias" in names


def adapt_falcon(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """Falcon: the generation by the number of kv heads and of norms."""
    heads = config["num_key_value_heads"]
    config.update(num_kv_heads=heads, multi_query=heads == 1, new_decoder_architecture=heads > 1)
    config["num_ln_in_parallel_attn"] = 2 if "blk.0.attn_norm_2.weight" in names else 1
    config["bias"] = "blk.0.attn_qkv.bias" in names
    config["ffn_hidden_size"] = config.pop("intermediate_size")


def adapt_bloom(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """BLOOM: the length it was trained on."""
    config["seq_length"] = config["max_position_embeddings"]
    if keys.number("attention.max_alibi_bias", 8.0) != 8.0:
        raise keys.refuse("attention.max_alibi_bias", "is not the 8.0 of this architecture")


def adapt_mpt(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """MPT: slopes and limit in an object of their own."""
    largest = keys.optional("attention.max_alibi_bias")
    if largest is None or largest != int(largest):
        raise keys.refuse("attention.max_alibi_bias", f"is {largest}; only whole slopes are supported")
    config["attn_config"] = {
        "alibi": True,
        "alibi_bias_max": int(largest),
        "clip_qkv": keys.optional("attention.clamp_kqv"),
    }


def adapt_gpt2(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """GPT-2: the width of the feed-forward by its own name."""
    config["n_inner"] = config.pop("intermediate_size")


def adapt_starcoder(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """StarCoder: GPT-2 with one kv head; of others the rows lie otherwise, which files do not tell."""
    adapt_gpt2(keys, config, names)
    if config["num_key_value_heads"] != 1:
        raise keys.refuse("attention.head_count_kv", f"is {config['num_key_value_heads']}, only 1 is supported")
    config["multi_query"] = True


def adapt_starcoder2(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """StarCoder 2."""
    config["use_bias"] = "blk.0.attn_q.bias" in names


def adapt_cohere(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """Command-R and, with norms of heads, Command-R+."""
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in names


def adapt_cohere2(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """Command-R7B: windows in three layers of four."""
    slide(keys, config, 4)


def read_experts(keys: ArchitectureKeys, config: Config, count: str, size: str | None = None) -> None:
    """How many experts there are, how many work on a token, and how wide they are where that is a number of its own."""
    config[count] = keys.integer("expert_count", limit=1 << 16)
    config["num_experts_per_tok"] = keys.integer("expert_used_count", limit=config[count])
    if size is not None:
        config[size] = keys.integer("expert_feed_forward_length")
    elif keys.has("expert_feed_forward_length"):
        config["intermediate_size"] = keys.integer("expert_feed_forward_length")


def adapt_mixtral(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """Mixtral."""
    read_experts(keys, config, "num_local_experts")


def adapt_olmoe(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """OLMoE."""
    read_experts(keys, config, "num_experts")
    config["norm_topk_prob"] = False


def adapt_qwen2_moe(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """Qwen2-MoE: a shared expert too."""
    read_experts(keys, config, "num_experts", "moe_intermediate_size")
    config["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length")
    config["norm_topk_prob"] = False
    config["qkv_bias"] = config["attention_bias"]


def adapt_qwen3_moe(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """Qwen3-MoE."""
    read_experts(keys, config, "num_experts", "moe_intermediate_size")
    config["norm_topk_prob"] = True


def adapt_gpt_oss(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """gpt-oss: windows in every other layer, and YaRN's ramp between fractions of dimensions."""
    read_experts(keys, config, "num_local_experts")
    slide(keys, config, 2)
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["truncate"] = False


def adapt_llama4(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """Llama 4: chunks in three layers of four, the fourth without rope; norms of heads but for the largest model."""
    layers = config["num_hidden_layers"]
    config["intermediate_size_mlp"] = config["intermediate_size"]
    read_experts(keys, config, "num_local_experts")
    config["interleave_moe_layer_step"] = keys.integer("interleave_moe_layer_step", 1)
    whole = keys.values.get("attention.sliding_window") == 0
    config.pop("use_sliding_window")
    if config.pop("sliding_window") is not None:
        raise keys.refuse("attention.sliding_window", "is not the 0 that stands for attention without chunks")
    config.update(
        no_rope_layers=[int(whole or (layer + 1) % 4 != 0) for layer in range(layers)],
        attention_chunk_size=8192,
        attn_temperature_tuning=not whole,
        attn_scale=0.1,
        floor_scale=8192,
        use_qk_norm=config["num_local_experts"] != 128,
    )
    if whole:
        config["layer_types"] = ["full_attention"] * layers


def adapt_deepseek(keys: ArchitectureKeys, config: Config, names: Names) -> None:
    """DeepSeek-V2 and, with sigmoid scores, V3: sizes of latent attention, groups of experts beside shared ones."""
    rank = keys.integer("attention.kv_lora_rank")
    whole = "attention.key_length_mla" if keys.has("attention.key_length_mla") else "attention.key_length"
    value = "attention.value_length_mla" if keys.has("attention.value_length_mla") else "attention.value_length"
    rotated = config["head_dim"]
    config.update(
        kv_lora_rank=rank,
        q_lora_rank=keys.integer("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
        qk_rope_head_dim=rotated,
        qk_nope_head_dim=keys.integer(whole, least=rotated + 1) - rotated,
        v_head_dim=keys.integer(value),
    )
    # With latent keys and values these say what is cached.
    keys.read |= {"attention.key_length", "attention.value_length", "attention.head_count_kv"}
    config["n_routed_experts"] = keys.integer("expert_count", limit=1 << 16)
    config["num_experts_per_tok"] = keys.integer("expert_used_count", limit=config["n_routed_experts"])
    config["moe_intermediate_size"] = keys.integer("expert_feed_forward_length")
    config["n_shared_experts"] = keys.integer("expert_shared_count")
    config["first_k_dense_replace"] = keys.integer("leading_dense_block_count", 0, least=0)
    config["routed_scaling_factor"] = keys.number("expert_weights_scale", 1.0)
    config["norm_topk_prob"] = keys.flag("expert_weights_norm", False)
    groups, top = keys.integer("expert_group_count", 1), keys.integer("expert_group_used_count", 1)
    config.update(n_group=groups, topk_group=top)
    corrected = any(name.endswith(".exp_probs_b.bias") for name in names)
    scoring = keys.integer("expert_gating_func", 2 if corrected else 1, limit=2)
    if scoring == 2:
        config.update(model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"])
        config.update(scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True)
    else:
        method = "group_limited_greedy" if groups > 1 else "greedy"
        config.update(scoring_func="softmax", topk_method=method)
    factor = keys.optional("rope.scaling.yarn_log_multiplier")
    if factor is not None and config["rope_scaling"] is not None:
        # Written times 0.1; the checkpoints of these families have both alike.
        config["rope_scaling"].update(mscale=factor * 10, mscale_all_dim=factor * 10)


def mixtral_of_llama(metadata: Mapping[str, Any], names: Names) -> Architecture | None:
    """Mixtral comes as a Llama with experts."""
    return MIXTRAL if metadata.get("llama.expert_count") else None


def falcon_of_norms(metadata: Mapping[str, Any], names: Names) -> Architecture | None:
    """The larger Falcons have a norm before attention and another before the feed-forward, under swapped names."""
    return FALCON_40B if "blk.0.attn_norm_2.weight" in names else None


MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    {
        **PARTS,
        **PAIRED,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": Piece("block_sparse_moe.experts.{expert}.w1"),
        "ffn_up_exps": Piece("block_sparse_moe.experts.{expert}.w3"),
        "ffn_down_exps": Piece("block_sparse_moe.experts.{expert}.w2"),
    },
    TOP,
    adapt=adapt_mixtral,
)
GPT2_PARTS: dict[str, Part] = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
FALCON_PARTS: dict[str, Part] = {
    "attn_norm": "input_layernorm",
    "attn_qkv": Piece("self_attention.query_key_value", grouped_heads),
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
FALCON_TOP = transformer_top("transformer.word_embeddings", "transformer.ln_f")
FALCON_40B = Architecture(
    "falcon",
    "FalconForCausalLM",
    {**FALCON_PARTS, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
    FALCON_TOP,
    layer="transformer.h.{}.",
    norm="layer",
    epsilon="layer_norm_epsilon",
    constants={"alibi": False, "parallel_attn": True},
    adapt=adapt_falcon,
)

ARCHITECTURES: dict[str, Architecture] = {
    "baichuan": Architecture("llama", "LlamaForCausalLM", PARTS | PAIRED, TOP, adapt=adapt_baichuan),
    "bloom": Architecture(
        "bloom",
        "BloomForCausalLM",
        {**FALCON_PARTS, "ffn_norm": "post_attention_layernorm"},
        transformer_top(
            "transformer.word_embeddings",
            "transformer.ln_f",
            token_embd_norm="transformer.word_embeddings_layernorm",
        ),
        layer="transformer.h.{}.",
        norm="layer",
        epsilon="layer_norm_epsilon",
        adapt=adapt_bloom,
    ),
    "chatglm": Architecture(
        "glm",
        "GlmForCausalLM",
        {**PARTS, **SPLIT_QKV, "ffn_up": "mlp.gate_up_proj"},
        TOP,
        partial_rotary="partial_rotary_factor",
    ),
    "cohere2": Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        PARTS,
        TOP,
        norm="layer",
        numbers={"logit_scale": "logit_scale"},
        adapt=adapt_cohere2,
    ),
    "command-r": Architecture(
        "cohere",
        "CohereForCausalLM",
        PARTS,
        TOP,
        norm="layer",
        numbers={"logit_scale": "logit_scale"},
        adapt=adapt_cohere,
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {
            **PARTS,
            **EXPERTS,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": Piece("self_attn.kv_b_proj", half="keys"),
            "attn_v_b": Piece("self_attn.kv_b_proj", half="values"),
            "exp_probs_b": Piece("mlp.gate.e_score_correction_bias", bare=True),
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        TOP,
        latent=True,
        adapt=adapt_deepseek,
    ),
    "falcon": Architecture(
        "falcon",
        "FalconForCausalLM",
        FALCON_PARTS,
        FALCON_TOP,
        layer="transformer.h.{}.",
        norm="layer",
        epsilon="layer_norm_epsilon",
        constants={"alibi": False, "parallel_attn": True},
        adapt=adapt_falcon,
        variant=falcon_of_norms,
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", PARTS, TOP, norm_shift=-1.0, constants=GEMMA),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        PARTS | SANDWICHED,
        TOP,
        norm_shift=-1.0,
        constants=GEMMA,
        numbers={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        adapt=adapt_gemma2,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        PARTS | SANDWICHED,
        TOP,
        norm_shift=-1.0,
        constants=GEMMA,
        numbers={"final_logit_softcapping": "final_logit_softcapping"},
        adapt=adapt_gemma3,
    ),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        {
            **PARTS,
            **SPLIT_QKV,
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        TOP,
        partial_rotary="partial_rotary_factor",
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **PARTS,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": Piece("self_attn.sinks", bare=True),
            "ffn_gate_inp": "mlp.router",
            **stacked("gate", "mlp.experts.gate_up_proj"),
            **stacked("up", "mlp.experts.gate_up_proj"),
            **stacked("down", "mlp.experts.down_proj"),
        },
        TOP,
        adapt=adapt_gpt_oss,
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        GPT2_PARTS,
        transformer_top("transformer.wte", "transformer.ln_f", position_embd="transformer.wpe"),
        layer="transformer.h.{}.",
        norm="layer",
        epsilon="layer_norm_epsilon",
        constants={"activation_function": "gelu_new", "conv1d": False},
        adapt=adapt_gpt2,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": Piece("attention.query_key_value", grouped_heads),
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        transformer_top("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
        layer="gpt_neox.layers.{}.",
        norm="layer",
        partial_rotary="rotary_pct",
        constants={"hidden_act": "gelu"},
        adapt=adapt_gpt_neox,
    ),
    "granite": Architecture(
        "granite",
        "GraniteForCausalLM",
        PARTS | PAIRED,
        TOP,
        numbers={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    # InternLM 2 is Llama by other names; its fused tensor has been taken apart. InternLM 3 comes as a Llama.
    "internlm2": Architecture("llama", "LlamaForCausalLM", PARTS | PAIRED, TOP),
    "llama": Architecture(
        "llama", "LlamaForCausalLM", PARTS | PAIRED, TOP, adapt=adapt_llama, variant=mixtral_of_llama
    ),
    "llama4": Architecture(
        "llama4_text",
        "Llama4ForCausalLM",
        {
            **PARTS,
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            **stacked("gate", "feed_forward.experts.gate_up_proj"),
            **stacked("up", "feed_forward.experts.gate_up_proj"),
            **stacked("down", "feed_forward.experts.down_proj"),
            "ffn_gate_shexp": "feed_forward.shared_expert.gate_proj",
            "ffn_up_shexp": "feed_forward.shared_expert.up_proj",
            "ffn_down_shexp": "feed_forward.shared_expert.down_proj",
        },
        TOP,
        adapt=adapt_llama4,
    ),
    "minicpm": Architecture("minicpm", "MiniCPMForCausalLM", PARTS | PAIRED, TOP, adapt=adapt_minicpm),
    "mistral": Architecture("mistral", "MistralForCausalLM", PARTS, TOP),
    "mpt": Architecture(
        "mpt",
        "MPTForCausalLM",
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        transformer_top("transformer.wte", "transformer.norm_f"),
        layer="transformer.blocks.{}.",
        norm="layer",
        epsilon="layer_norm_epsilon",
        adapt=adapt_mpt,
    ),
    "olmo": Architecture("olmo", "OlmoForCausalLM", PARTS | PAIRED, TOP, norm="layer", adapt=adapt_olmo),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", PARTS | SANDWICHED, TOP, adapt=adapt_olmo2),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", PARTS | EXPERTS, TOP, adapt=adapt_olmoe),
    "phi2": Architecture(
        "phi",
        "PhiForCausalLM",
        {
            **PARTS,
            **SPLIT_QKV,
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        transformer_top("model.embed_tokens", "model.final_layernorm"),
        norm="layer",
        partial_rotary="partial_rotary_factor",
        constants={"hidden_act": "gelu_new"},
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {**PARTS, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        TOP,
        partial_rotary="partial_rotary_factor",
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", PARTS, TOP),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {
            **PARTS,
            **EXPERTS,
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
            "ffn_gate_inp_shexp": Piece("mlp.shared_expert_gate", row=True),
        },
        TOP,
        adapt=adapt_qwen2_moe,
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", PARTS, TOP),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", PARTS | EXPERTS, TOP, adapt=adapt_qwen3_moe),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", PARTS | PAIRED, TOP, adapt=adapt_smollm3),
    "stablelm": Architecture(
        "stablelm",
        "StableLmForCausalLM",
        {
            **PARTS,
            "attn_q_norm": Piece("self_attn.q_layernorm.norms.{expert}"),
            "attn_k_norm": Piece("self_attn.k_layernorm.norms.{expert}"),
        },
        TOP,
        norm="layer",
        partial_rotary="partial_rotary_factor",
        adapt=adapt_stablelm,
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        GPT2_PARTS,
        transformer_top("transformer.wte", "transformer.ln_f", position_embd="transformer.wpe"),
        layer="transformer.h.{}.",
        norm="layer",
        epsilon="layer_norm_epsilon",
        constants={"activation_function": "gelu_pytorch_tanh"},
        adapt=adapt_starcoder,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {**PARTS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        TOP,
        norm="layer",
        epsilon="norm_epsilon",
        constants={"hidden_act": "gelu_pytorch_tanh"},
        adapt=adapt_starcoder2,
    ),
}
