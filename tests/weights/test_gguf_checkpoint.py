"""A GGUF file seen as a Hugging Face checkpoint: names, configuration, row order, and what is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import WeightsError
from octavo.weights import AffineTensor, DenseTensor, open_checkpoint
from octavo.weights.gguf import GgufCheckpoint
from tests.weights.gguf_files import TensorSpec, random_blocks, tiny_model


def opened(tmp_path: Path, *arguments: Any, **settings: Any) -> GgufCheckpoint:
    return GgufCheckpoint(tiny_model(*arguments, **settings).write(tmp_path / "model.gguf"))


def test_tensors_have_the_names_of_hugging_face(tmp_path: Path) -> None:
    names = opened(tmp_path, "qwen2", biases=True).names()
    assert names == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize(
    ("architecture", "model_class"),
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")],
)
def test_the_configuration_has_the_words_of_hugging_face(tmp_path: Path, architecture: str, model_class: str) -> None:
    checkpoint = opened(tmp_path, architecture)
    expected = {
        "architectures": [model_class],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 48,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: checkpoint.config.get(key) for key in expected} == expected
    assert checkpoint.format == "gguf"
    assert checkpoint.gguf_metadata is not None
    assert len(checkpoint.gguf_metadata["tokenizer.ggml.tokens"]) == 48


def test_the_default_model_is_understood(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    assert checkpoint.config["hidden_size"] == 576
    assert checkpoint.config["num_hidden_layers"] == 30
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.config["rope_theta"] == 100000.0
    kinds = [checkpoint.tensor(name) for name in checkpoint.names()]
    assert len(kinds) == 272
    assert {tensor.source for tensor in kinds if isinstance(tensor, AffineTensor)} == {"Q4_1", "Q8_0"}
    assert sum(isinstance(tensor, DenseTensor) for tensor in kinds) == 61


def test_a_head_that_is_not_stored_is_tied(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, tied=True)
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.names()


def llama_cpp_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order llama.cpp's converter stores the rows of q and k in: the halves of each head interleaved."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize(("part", "gguf_part", "heads"), [("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)])
def test_the_row_order_of_llama_s_q_and_k_is_undone(
    tmp_path: Path, kind: str, part: str, gguf_part: str, heads: int
) -> None:
    spec = tiny_model("llama", kind, biases=True)
    # The same file under an architecture whose rows are not reordered says what is stored.
    same = tiny_model("qwen2", kind, biases=True)
    ours = GgufCheckpoint(spec.write(tmp_path / "llama.gguf"))
    stored = GgufCheckpoint(same.write(tmp_path / "qwen2.gguf"))
    for suffix in ("weight", "bias"):
        name = f"model.layers.0.self_attn.{part}.{suffix}"
        wanted = ours.tensor(name)
        np.testing.assert_array_equal(llama_cpp_order(wanted.read_f32(), heads), stored.tensor(name).read_f32())
        np.testing.assert_array_equal(wanted.read_f32(3, 9), wanted.read_f32()[3:9])
    weight, stored_weight = (at.tensor(f"model.layers.0.self_attn.{part}.weight") for at in (ours, stored))
    if isinstance(weight, AffineTensor) and isinstance(stored_weight, AffineTensor):
        np.testing.assert_array_equal(llama_cpp_order(weight.raw_blocks(), heads), stored_weight.raw_blocks())
    elif kind == "BF16":
        assert isinstance(weight, DenseTensor)
        assert isinstance(stored_weight, DenseTensor)
        np.testing.assert_array_equal(llama_cpp_order(weight.read_bf16(), heads), stored_weight.read_bf16())


@pytest.mark.parametrize("part", ["v_proj", "o_proj"])
def test_other_rows_keep_their_order(tmp_path: Path, part: str) -> None:
    name = f"model.layers.0.self_attn.{part}.weight"
    llama = GgufCheckpoint(tiny_model("llama").write(tmp_path / "a.gguf")).tensor(name)
    qwen = GgufCheckpoint(tiny_model("qwen2").write(tmp_path / "b.gguf")).tensor(name)
    np.testing.assert_array_equal(llama.read_f32(), qwen.read_f32())


def test_a_sliding_window_makes_it_a_mistral(tmp_path: Path) -> None:
    config = opened(tmp_path, metadata={"llama.attention.sliding_window": 128}).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 128)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.5,
                "llama.rope.scaling.yarn_attn_factor": 1.1,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
            },
            {
                "rope_type": "yarn",
                "factor": 2.5,
                "original_max_position_embeddings": 256,
                "attention_factor": 1.1,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
    ],
)
def test_rope_scaling_is_translated(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert opened(tmp_path, metadata=metadata).config["rope_scaling"] == expected


def llama3_factors(theta: float, dim: int, factor: float, low: float, high: float, original: float) -> list[float]:
    factors = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (index / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def with_factors(tmp_path: Path, factors: list[float], theta: float = 500000.0, **metadata: Any) -> GgufCheckpoint:
    keys = {"llama.rope.freq_base": theta, **metadata}
    spec = tiny_model(heads=1, kv_heads=1, hidden=64, metadata=keys)
    data = np.asarray(factors, dtype="<f4").tobytes()
    spec.tensors = [*spec.tensors, TensorSpec("rope_freqs.weight", (len(factors),), "F32", data)]
    return GgufCheckpoint(spec.write(tmp_path / "factors.gguf"))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama3_become_its_parameters(tmp_path: Path, factor: float) -> None:
    checkpoint = with_factors(tmp_path, llama3_factors(500000.0, 64, factor, 1.0, 4.0, 8192))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in checkpoint.names()


def test_factors_of_another_kind_are_kept_as_they_are(tmp_path: Path) -> None:
    factors = [1.0 + index / 8 for index in range(32)]
    assert with_factors(tmp_path, factors).config["rope_scaling"] == {"rope_type": "factors", "factors": factors}


def test_factors_that_change_nothing_are_no_scaling(tmp_path: Path) -> None:
    assert with_factors(tmp_path, [1.0] * 32).config["rope_scaling"] is None


@pytest.mark.parametrize("factors", [[1.0] * 31, [1.0] * 31 + [0.0], [1.0] * 31 + [math.nan], [1.0] * 31 + [math.inf]])
def test_factors_that_cannot_be_are_refused(tmp_path: Path, factors: list[float]) -> None:
    with pytest.raises(WeightsError, match=r"rope_freqs\.weight"):
        with_factors(tmp_path, factors)


def test_every_token_that_ends_a_turn_is_in_the_generation_config(tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 2,
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
    }
    generation = opened(tmp_path, metadata=keys).generation_config
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 5], "temperature": 0.7, "top_k": 20}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; supported are baichuan, bloom"),
    ({"general.architecture": None}, "architecture None is not supported"),
    ({"general.architecture": 7}, "architecture 7 is not supported"),
    ({"split.count": 3}, "split GGUF"),
    ({"llama.expert_count": 8}, "llama.expert_used_count is missing"),
    ({"llama.attention.scale": 0.5}, "llama.attention.scale is 0.5"),
    ({"llama.logit_scale": 2.0}, "llama.logit_scale is 2.0"),
    ({"llama.new.invention": 1}, "llama.new.invention (value 1) is not supported"),
    ({"llama.block_count": None}, "llama.block_count is missing"),
    ({"llama.block_count": 0}, "llama.block_count is 0"),
    ({"llama.block_count": "many"}, "llama.block_count is 'many'"),
    ({"llama.attention.head_count": [4, 2]}, "llama.attention.head_count is [4, 2]"),
    ({"llama.attention.head_count": 7}, "does not divide embedding_length 64"),
    ({"llama.attention.head_count": 3_000_000_000}, "llama.attention.head_count is 3000000000"),
    ({"llama.attention.head_count_kv": 5}, "do not divide into 4 query and 5 key heads"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
    ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "layer_norm_rms_epsilon is -1.0"),
    ({"llama.rope.freq_base": float("inf")}, "freq_base is inf"),
    ({"llama.rope.dimension_count": 8}, "dimension_count is 8 where heads have 16 values"),
    ({"llama.attention.value_length": 8}, "differs from attention.key_length 16"),
    ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
    ({"llama.rope.scaling.yarn_beta_fast": 16.0}, "yet yarn parameters are set"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
    ({"tokenizer.ggml.eos_token_id": "two"}, "eos_token_id is 'two', not a token id"),
]


@pytest.mark.parametrize(("metadata", "reason"), REFUSED)
def test_what_would_change_the_arithmetic_unseen_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], reason: str
) -> None:
    path = tiny_model(metadata=metadata).write(tmp_path / "model.gguf")
    with pytest.raises(WeightsError) as caught:
        GgufCheckpoint(path).tensor("model.layers.0.self_attn.k_proj.weight")
    assert reason in str(caught.value)
    assert "model.gguf" in str(caught.value)


def test_keys_that_say_the_same_for_every_layer_are_one_number(tmp_path: Path) -> None:
    assert opened(tmp_path, metadata={"llama.attention.head_count_kv": [2, 2]}).config["num_key_value_heads"] == 2


def test_a_tensor_no_architecture_has_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("blk.0.ssm_a", "blk.00.attn_q.weight", "blk.0.attn_q.scale", "v.patch_embd.weight"):
        spec = tiny_model()
        spec.tensors = [*spec.tensors, TensorSpec(name, (1,), "F32", bytes(4))]
        with pytest.raises(WeightsError, match=f"tensor '{name}' is none that octavo knows of this architecture"):
            GgufCheckpoint(spec.write(tmp_path / "a.gguf"))


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    spec = tiny_model()
    spec.tensors = spec.tensors[1:]
    with pytest.raises(WeightsError, match=r"no matrix 'token_embd\.weight'"):
        GgufCheckpoint(spec.write(tmp_path / "a.gguf"))


def test_a_quantised_vector_is_dense(tmp_path: Path) -> None:
    spec = tiny_model()
    data = random_blocks(np.random.default_rng(1), "Q8_0", (64,))
    spec.tensors = [
        TensorSpec("output_norm.weight", (64,), "Q8_0", data) if item.name == "output_norm.weight" else item
        for item in spec.tensors
    ]
    tensor = GgufCheckpoint(spec.write(tmp_path / "a.gguf")).tensor("model.norm.weight")
    assert isinstance(tensor, DenseTensor)
    assert tensor.read_f32().shape == (64,)
    np.testing.assert_array_equal(tensor.read_f32(5, 9), tensor.read_f32()[5:9])


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "f32"), ("F16", "f16"), ("BF16", "bf16"), ("F64", "f32")])
def test_dense_types_are_read_as_they_are(tmp_path: Path, kind: str, dtype: str) -> None:
    spec = tiny_model(kind=kind)
    stored = next(item.data for item in spec.tensors if item.name == "blk.0.ffn_up.weight")
    tensor = GgufCheckpoint(spec.write(tmp_path / "a.gguf")).tensor("model.layers.0.mlp.up_proj.weight")
    assert isinstance(tensor, DenseTensor)
    assert (tensor.dtype, tensor.shape) == (dtype, (96, 64))
    if kind == "F32":
        expected = np.frombuffer(stored, "<f4")
    elif kind == "F64":
        expected = np.frombuffer(stored, "<f8").astype(np.float32)
    elif kind == "F16":
        expected = np.frombuffer(stored, "<f2").astype(np.float32)
    else:
        expected = (np.frombuffer(stored, "<u2").astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(tensor.read_f32(), expected.reshape(96, 64))


def test_rows_outside_of_a_tensor_are_refused(tmp_path: Path) -> None:
    tensor = opened(tmp_path).tensor("model.layers.0.mlp.up_proj.weight")
    for start, stop in ((0, 97), (-1, 4), (5, 4)):
        with pytest.raises(WeightsError, match="it has 96"):
            tensor.read_f32(start, stop)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no tensor 'model\.layers\.7\.mlp\.up_proj\.weight'"):
        opened(tmp_path).tensor("model.layers.7.mlp.up_proj.weight")


def test_released_pages_come_back_unchanged(tmp_path: Path) -> None:
    tensor = opened(tmp_path, hidden=256, intermediate=512).tensor("model.layers.0.mlp.up_proj.weight")
    before = tensor.read_f32().copy()
    tensor.release()
    np.testing.assert_array_equal(tensor.read_f32(), before)


def test_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path)
    tensor = checkpoint.tensor("model.norm.weight")
    checkpoint.close()
    assert tensor.read_f32().shape == (64,)
