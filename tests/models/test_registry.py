"""Configurations are honoured or refused by name and value; checkpoints fit their graph or the misfits are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.models import families
from octavo.models.graph import Graph
from octavo.models.registry import build_graph, check_weights, fit_names, supported_families
from octavo.weights.checkpoint import open_checkpoint
from tests.models.tiny import TINY_MODELS, read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}


def family_config(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    return {**LLAMA, "model_type": model_type, "architectures": [architecture], **values}


class MemoryCheckpoint:
    """A checkpoint of arrays."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> Any:
        return MemoryTensor(self.tensors[name])


class MemoryTensor:
    """A tensor of an array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape = array.shape

    def read_f32(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.array[start:stop].astype(np.float32)


def zeros_for(graph: Graph) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.float32) for name, shape in graph.sources().items()}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_checkpoint_saved_by_transformers_fits_its_graph(name: str, tiny_models: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(tiny_models[name])
    try:
        check_weights(fit_names(build_graph(checkpoint.config), checkpoint.names()), checkpoint)
    finally:
        checkpoint.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported by llama: it must be 'silu'"),
        ({"hidden_size": None}, "hidden_size is missing, llama needs it"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"hidden_size": 64.0}, "hidden_size = 64.0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 .* from 1 to 4096"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 .* divisor of num_attention_heads = 4"),
        (
            {"num_attention_heads": 5, "num_key_value_heads": 5},
            "num_attention_heads = 5 .* divisor of hidden_size = 64",
        ),
        ({"head_dim": 15}, "head_dim = 15 .* even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0 .* positive"),
        ({"attention_bias": 1}, "attention_bias = 1 .* true or false"),
        ({"sliding_window": 16}, "sliding_window = 16"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types = "),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"quantization_config": {"quant_method": "exl2"}}, "quantization_config.quant_method = 'exl2'"),
        ({"embedding_multiplier": True}, "embedding_multiplier = True .* must be 1.0"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 1e9}},
            "max_position_embeddings = 128 .* once scaled, not 128000000000",
        ),
        ({"model_type": "mistral"}, "model_type = 'mistral' does not go with architecture LlamaForCausalLM"),
    ],
)
def test_llama_refuses_what_it_cannot_honour_by_name_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_graph({**LLAMA, **change})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (family_config("mistral", "MistralForCausalLM", sliding_window=0), "sliding_window = 0"),
        (family_config("mistral", "MistralForCausalLM", attention_bias=True), "attention_bias = True"),
        (
            family_config("mistral", "MistralForCausalLM", sliding_window=8, use_sliding_window=False),
            "use_sliding_window = False",
        ),
        (family_config("gemma", "GemmaForCausalLM", hidden_act="relu"), "hidden_act = 'relu'"),
        (family_config("gemma2", "Gemma2ForCausalLM", hidden_activation="gelu"), "hidden_activation = 'gelu'"),
        (family_config("gemma2", "Gemma2ForCausalLM", dtype="float64"), "dtype = 'float64'"),
        (family_config("gemma3_text", "Gemma3ForCausalLM", attn_logit_softcapping=50.0), "attn_logit_softcapping = 50"),
        (
            family_config("gemma3_text", "Gemma3ForCausalLM", use_bidirectional_attention=True),
            "use_bidirectional_attention = True",
        ),
        (family_config("granite", "GraniteForCausalLM", logits_scaling=0), "logits_scaling = 0 .* positive"),
        (family_config("minicpm", "MiniCPMForCausalLM", sparse_config={"topk": 64}), "sparse_config = "),
        (
            family_config(
                "ministral", "MinistralForCausalLM", sliding_window=None, layer_types=["sliding_attention"] * 2
            ),
            "sliding_window = None .* given, as layer_types",
        ),
        (
            family_config("exaone4", "Exaone4ForCausalLM", sliding_window_pattern="LGL"),
            "sliding_window_pattern = 'LGL'",
        ),
        (family_config("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", use_qk_norm=False), "use_qk_norm = False"),
        (family_config("ministral3", "Ministral3ForCausalLM"), "llama_4_scaling_beta is missing"),
        (
            family_config("mistral3", "Mistral3ForConditionalGeneration", text_config={"model_type": "mamba"}),
            r"text_config\.model_type = 'mamba' .* 'ministral3' or 'mistral'",
        ),
        (family_config("gemma3", "Gemma3ForConditionalGeneration"), r"text_config\.hidden_size is missing"),
        (family_config("phi3", "Phi3ForCausalLM", hidden_act="gelu"), "hidden_act = 'gelu'"),
        (family_config("smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1]), r"no_rope_layers = \[1\] .* 2 of 0 and 1"),
        (family_config("qwen3", "Qwen3ForCausalLM", mlp_bias=True), "mlp_bias = True"),
        (family_config("qwen2", "Qwen2ForCausalLM", attention_bias=False), "attention_bias = False"),
        (family_config("qwen2", "Qwen2ForCausalLM", use_sliding_window=True), "sliding_window is missing"),
        (
            family_config("qwen2", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=4),
            "max_window_layers is missing",
        ),
        (
            family_config("qwen2", "Qwen2ForCausalLM", layer_types=["sliding_attention"] * 2),
            "layer_types = .* 2 of full_attention",
        ),
        (
            family_config("qwen3", "Qwen3ForCausalLM", layer_types=["full_attention"]),
            "layer_types = .* 2 of full_attention",
        ),
    ],
)
def test_family_refuses_what_it_cannot_honour_by_name_and_value(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_graph(config)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["MambaForCausalLM"]},
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        {"model_type": "mamba"},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [["LlamaForCausalLM"]]},
        {},
    ],
)
def test_unknown_architecture_is_refused_with_the_supported_ones(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"supported architectures: .*LlamaForCausalLM, .*Qwen3ForCausalLM"):
        build_graph(config)


def test_model_type_suffices_without_architectures() -> None:
    assert build_graph({**LLAMA, "architectures": None}) == build_graph(LLAMA)


def test_yarn_extends_the_positions_of_a_model() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert build_graph({**LLAMA, "rope_scaling": scaling}).max_position == 512


@pytest.fixture
def extra_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One more file in the package of families."""
    (tmp_path / "toy.py").write_text(
        '"""A toy family."""\n'
        "from octavo.models.decoder import build_decoder\n"
        'ARCHITECTURES = ("ToyForCausalLM",)\n'
        "def build(config):\n"
        "    return build_decoder(config, qkv_bias=True)\n"
    )
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    supported_families.cache_clear()
    yield
    supported_families.cache_clear()


def test_a_family_is_named_in_its_own_file_and_its_test_row_only() -> None:
    root = Path(__file__).parents[2]
    texts = {path: path.read_text() for path in (root / "src/octavo").rglob("*.py")}
    for family in supported_families():
        for name in family.architectures:
            named = [path for path, text in texts.items() if f'"{name}"' in text and "gguf" not in path.name]
            assert [path.name for path in named] == [f"{family.model_type.replace('-', '_')}.py"]
    tested = {recipe.model_type for recipe in TINY_MODELS.values()} | set(TINY_MODELS)
    # Encoders have rows of their own: see test_encoders.py.
    assert {family.model_type for family in supported_families() if not family.encoder} <= tested


@pytest.mark.usefixtures("extra_family")
def test_adding_a_family_takes_one_file() -> None:
    graph = build_graph({**LLAMA, "architectures": ["ToyForCausalLM"], "model_type": "toy"})
    assert graph.architecture == "toy"
    assert "model.layers.1.self_attn.q_proj.bias" in graph.weights()


GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 32,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 64,
    "vocab_size": 300,
}


def test_tensors_are_found_under_the_names_older_checkpoints_have_for_them() -> None:
    graph = build_graph(GPT2)
    stored = {name.removeprefix("transformer."): array for name, array in zeros_for(graph).items()}
    stored |= {f"h.{i}.attn.bias": np.zeros((1, 1, 64, 64), np.float32) for i in range(2)}
    stored["lm_head.weight"] = stored["wte.weight"]
    fitted = fit_names(graph, list(stored))
    check_weights(fitted, MemoryCheckpoint(stored))
    assert fitted.derived["transformer.h.0.mlp.c_fc.weight:transposed"].source == "h.0.mlp.c_fc.weight"
    assert fit_names(graph, list(zeros_for(graph))) == graph
    with pytest.raises(ModelError, match=r"missing .*transformer.h.0"):
        check_weights(graph, MemoryCheckpoint(stored))


def test_weights_may_be_stored_the_other_way_round() -> None:
    stored = build_graph({**GPT2, "conv1d": False}).sources()
    assert stored["transformer.h.0.mlp.c_fc.weight"] == (128, 32)
    assert build_graph(GPT2).sources()["transformer.h.0.mlp.c_fc.weight"] == (32, 128)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt2", {"activation_function": "mish"}, "activation_function = 'mish' is not supported by gpt2: .* gelu_new"),
        ("gpt2", {"n_embd": 64, "hidden_size": 96}, "n_embd = 64 .* equal to hidden_size = 96"),
        ("gpt2", {"n_head": 5}, "n_head = 5 .* divisor of the hidden size 96"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = False"),
        ("gpt_neo", {"attention_types": [[["global", "sparse"], 1]]}, "attention_types = .* repeated to 3 layers"),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]]}, "attention_types = "),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "partial_rotary_factor = 0.2"),
        ("gptj", {"rotary_dim": 7}, "rotary_dim = 7 .* even"),
        ("gptj", {"rotary_dim": None}, "rotary_dim is missing"),
        ("codegen", {"n_head": 2}, "n_head = 2 .* a multiple of 4"),
        ("falcon 40b", {"parallel_attn": False}, "parallel_attn = False"),
        ("falcon 40b", {"num_kv_heads": 3}, "num_kv_heads = 3 .* divisor"),
        ("falcon 40b", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn = 3"),
        ("falcon rw", {"num_kv_heads": 2}, "num_kv_heads = 2"),
        ("mpt", {"no_bias": False}, "no_bias = False"),
        ("mpt", {"attn_config": {"qk_ln": True}}, r"attn_config\.qk_ln = True"),
        ("mpt", {"attn_config": {"alibi": False}}, r"attn_config\.alibi = False"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale = 'inv_sqrt_d_model'"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm = True"),
        ("cohere", {"layer_types": ["full_attention"] * 3}, "layer_types = "),
        ("cohere2", {"layer_types": ["full_attention"]}, "layer_types = .* 3 of sliding_attention or full_attention"),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type = 'gated'"),
        ("stablelm", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("bloom", {"num_attention_heads": 7, "n_head": None}, "num_attention_heads = 7 .* divisor"),
    ],
)
def test_classic_families_refuse_what_they_cannot_honour(
    name: str, change: dict[str, Any], message: str, tiny_models: dict[str, Path]
) -> None:
    with pytest.raises(ModelError, match=message):
        build_graph({**read_config(tiny_models[name]), **change})


def test_missing_unknown_and_misshapen_tensors_are_all_named() -> None:
    graph = build_graph(LLAMA)
    tensors = zeros_for(graph)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.1.self_attn.q_proj.bias"] = np.ones(64, np.float32)
    tensors["model.layers.1.self_attn.k_proj.bias"] = np.zeros(32, np.float32)  # adds nothing, as AutoGPTQ stores it
    tensors["model.norm.weight"] = np.zeros(65, np.float32)
    with pytest.raises(ModelError) as error:
        check_weights(graph, MemoryCheckpoint(tensors))
    assert str(error.value) == (
        "weights do not fit architecture llama: missing 1: model.layers.0.mlp.up_proj.weight; "
        "unknown 1: model.layers.1.self_attn.q_proj.bias; wrong shape 1: model.norm.weight ((65,), must be (64,))"
    )


def test_long_lists_of_tensors_are_cut_short() -> None:
    with pytest.raises(ModelError, match=r"missing 21: .* and 17 more$"):
        check_weights(build_graph(LLAMA), MemoryCheckpoint({}))


def test_stored_rotary_frequencies_are_ignored() -> None:
    graph = build_graph(LLAMA)
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32) for i in range(2)}
    check_weights(graph, MemoryCheckpoint(zeros_for(graph) | extra))


def test_scales_of_an_fp8_kv_cache_are_known() -> None:
    graph = build_graph(LLAMA)
    extra = {f"model.layers.{i}.self_attn.{which}_scale": np.ones((), np.float32) for i in range(2) for which in "kv"}
    check_weights(graph, MemoryCheckpoint(zeros_for(graph) | extra))


def test_second_copy_of_a_tied_head_must_hold_the_same_numbers() -> None:
    graph = build_graph({**LLAMA, "tie_word_embeddings": True})
    tensors = zeros_for(graph)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    check_weights(graph, MemoryCheckpoint(tensors))
    tensors["lm_head.weight"][-1, -1] = 1
    with pytest.raises(ModelError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        check_weights(graph, MemoryCheckpoint(tensors))
