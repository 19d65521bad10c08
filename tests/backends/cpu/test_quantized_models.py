"""A tiny llama in every format of others gives the logits of its dequantised weights, and bits that do not vary."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.backends.cpu import CpuBackend
from octavo.backends.cpu.lowering import lower
from octavo.backends.cpu.sizes import step_shape
from octavo.kv_cache import kv_cache_type
from octavo.models.graph import Graph
from octavo.models.reference import reference_logits
from octavo.models.registry import build_graph, check_weights
from octavo.models.rewrites import optimize
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from tests.backends.cpu.emulation import relative_error
from tests.models.tiny import random_tokens
from tests.weights import layouts
from tests.weights.layouts import Array

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCAB = 128, 192, 2, 4, 2, 96
TOKENS = random_tokens(40, VOCAB)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
}
KV_ROWS = HIDDEN // HEADS * KV_HEADS
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV_ROWS, HIDDEN),
    "self_attn.v_proj": (KV_ROWS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
Quantise = Callable[[str, Array], dict[str, Any]]


def rounded(weights: Array, bits: int, index: Array) -> tuple[Array, Array, Array]:
    """Codes, f16 scales and zero points of the groups that `index` puts each k into."""
    levels = (1 << bits) - 1
    groups = [index == group for group in range(int(index.max()) + 1)]
    low = np.stack([np.minimum(weights[:, group].min(axis=1), 0) for group in groups], axis=1)
    high = np.stack([np.maximum(weights[:, group].max(axis=1), 0) for group in groups], axis=1)
    scales = ((high - low) / levels).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), 0, levels)
    codes = np.clip(np.rint(weights / scales[:, index]) + zeros[:, index], 0, levels)
    return codes.astype(np.uint8), scales, zeros.astype(np.uint8)


def awq(name: str, weights: Array) -> dict[str, Any]:
    return layouts.awq(name, *rounded(weights, 4, np.arange(weights.shape[1]) // 64))


def gptq(name: str, weights: Array, *, seed: int | None = None, bits: int = 4) -> dict[str, Any]:
    """In act-order when there is a seed; q, k, v and gate, up have one order, as those of one input do."""
    index = np.arange(weights.shape[1]) // 32
    if seed is not None:
        index = np.random.default_rng(seed).permutation(index)
    return layouts.gptq(name, *rounded(weights, bits, index), bits, index=index)


def own_orders(name: str, weights: Array) -> dict[str, Any]:
    return gptq(name, weights, seed=len(name) + len(weights))


def symmetric(name: str, weights: Array) -> dict[str, Any]:
    index = np.arange(weights.shape[1]) // 32
    scales = np.abs(weights.reshape(len(weights), -1, 32)).max(axis=2) / 7
    codes = np.clip(np.rint(weights / scales[:, index]) + 8, 0, 15).astype(np.uint8)
    return layouts.gptq(name, codes, scales, np.full(scales.shape, 8, np.uint8), 4, index=None)


def int8(name: str, weights: Array) -> dict[str, Any]:
    scales = np.abs(weights).max(axis=1, keepdims=True) / 127
    return {f"{name}.weight": np.rint(weights / scales).astype(np.int8), f"{name}.weight_scale": scales}


def llm_int8(name: str, weights: Array) -> dict[str, Any]:
    largest = np.abs(weights).max(axis=1)
    return {f"{name}.weight": np.rint(weights / largest[:, None] * 127).astype(np.int8), f"{name}.SCB": largest}


def nf4(name: str, weights: Array) -> dict[str, Any]:
    table = np.float32(np.tanh(np.linspace(-1.7, 1.8, 16)))
    blocks = weights.reshape(-1, 64)
    largest = np.abs(blocks).max(axis=1).astype(np.float32)
    codes = np.abs(blocks[:, :, None] / largest[:, None, None] - table).argmin(axis=2).astype(np.uint8).reshape(-1)
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weights.shape)})
    weight = f"{name}.weight"
    return {
        weight: codes[0::2] << 4 | codes[1::2],
        f"{weight}.absmax": largest,
        f"{weight}.quant_map": table,
        f"{weight}.quant_state.bitsandbytes__nf4": np.frombuffer(state.encode(), np.uint8),
    }


def fp8(name: str, weights: Array, dtype: torch.dtype = torch.float8_e4m3fn) -> dict[str, Any]:
    scale = np.float32(np.abs(weights).max() / 400)
    stored = torch.from_numpy(weights / scale).to(dtype)
    return {f"{name}.weight": stored, f"{name}.weight_scale": torch.tensor(scale)}


def fp8_blocks(name: str, weights: Array) -> dict[str, Any]:
    n, k = weights.shape
    scales = np.zeros((-(-n // 128), -(-k // 128)), np.float32)
    spread = np.zeros_like(weights)
    for i, j in np.ndindex(scales.shape):
        block = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        scales[i, j] = spread[block] = np.abs(weights[block]).max() / 400
    return {
        f"{name}.weight": torch.from_numpy(weights / spread).to(torch.float8_e4m3fn),
        f"{name}.weight_scale_inv": scales,
    }


def whole(name: str, weights: Array) -> dict[str, Any]:
    return {f"{name}.weight": torch.from_numpy(weights).bfloat16()}


def only(part: str, quantise: Quantise) -> Quantise:
    """Linears of this name left as they are."""
    return lambda name, weights: whole(name, weights) if part in name else quantise(name, weights)


def config_groups(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


AFFINE, FLOATS = 0.04, 0.015
MODELS: dict[str, tuple[Quantise, dict[str, Any], float]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 64}, AFFINE),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}, AFFINE),
    "gptq3": (lambda n, w: gptq(n, w, bits=3), {"quant_method": "gptq", "bits": 3, "group_size": 32}, AFFINE),
    "gptq symmetric": (symmetric, {"quant_method": "gptq", "bits": 4, "group_size": 32}, AFFINE),
    "act-order": (lambda n, w: gptq(n, w, seed=1), {"quant_method": "gptq", "bits": 4, "group_size": 32}, AFFINE),
    "act-orders": (own_orders, {"quant_method": "gptq", "bits": 4, "group_size": 32}, AFFINE),
    "mixed gptq": (only("k_proj", gptq), {"quant_method": "gptq", "bits": 4, "group_size": 32}, AFFINE),
    "int8": (
        int8,
        {"quant_method": "compressed-tensors", "config_groups": config_groups(num_bits=8, type="int")},
        AFFINE,
    ),
    "llm.int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, AFFINE),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, FLOATS),
    "mixed nf4": (only("up_proj", nf4), {"quant_method": "bitsandbytes", "load_in_4bit": True}, FLOATS),
    "fp8": (fp8, {"quant_method": "fp8"}, FLOATS),
    "e5m2": (lambda n, w: fp8(n, w, torch.float8_e5m2), {"quant_method": "fp8"}, FLOATS),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, FLOATS),
}


def make_model(folder: Path, quantise: Quantise, quantization: dict[str, Any]) -> Path:
    rng = np.random.default_rng(0)

    def normal(rows: int, columns: int) -> Array:
        return (1.5 * rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    ends = ("model.embed_tokens.weight", "lm_head.weight")
    tensors: dict[str, Any] = {name: normal(VOCAB, HIDDEN) for name in ends}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
        for name, shape in LINEARS.items():
            tensors |= quantise(f"{prefix}.{name}", normal(*shape))
    tensors |= {f"{name}.weight": (1 + 0.2 * rng.standard_normal(HIDDEN)).astype(np.float32) for name in norms}
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(HIDDEN, np.float32)  # as AutoGPTQ stores one
    return layouts.write_model(folder, tensors, {**CONFIG, "quantization_config": quantization})


@cache
def model(folder: Path, name: str) -> tuple[Checkpoint, Graph]:
    checkpoint = open_checkpoint(make_model(folder / name.replace(" ", "-"), *MODELS[name][:2]))
    graph = optimize(build_graph(checkpoint.config))
    check_weights(graph, checkpoint)
    return checkpoint, graph


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


def load(folder: Path, name: str, quantization: str | None = None, **options: int) -> CpuBackend:
    checkpoint, graph = model(folder, name)
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 64, "num_blocks": 1, "threads": 2}
    return CpuBackend.load(
        graph, checkpoint, quantization=quantization, kv_cache_dtype="f32", **{**settings, **options}
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_dequantised_weights(name: str, folder: Path) -> None:
    """Exactly but for the rounding of activations, and of all of it in float32."""
    checkpoint, graph = model(folder, name)
    expected = reference_logits(graph, lambda each: checkpoint.tensor(each).read_f32(), TOKENS)
    exact = load(folder, name, "f32").prompt_logits(TOKENS)
    np.testing.assert_allclose(exact, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert relative_error(load(folder, name).prompt_logits(TOKENS), expected) < MODELS[name][2]


@pytest.mark.parametrize("name", ["awq", "act-order", "mixed nf4", "fp8 blocks"])
def test_bits_do_not_depend_on_the_step_size_or_threads(name: str, folder: Path) -> None:
    expected = load(folder, name).prompt_logits(TOKENS).view(np.uint32)
    for step, threads in [(1, 1), (7, 2), (16, 3)]:
        found = load(folder, name, max_num_batched_tokens=step, threads=threads).prompt_logits(TOKENS)
        np.testing.assert_array_equal(found.view(np.uint32), expected)


@pytest.mark.parametrize("quantization", ["none", "w8", "w4"])
@pytest.mark.parametrize("name", ["act-order", "mixed nf4", "fp8"])
def test_other_forms_can_be_asked_for(name: str, quantization: str, folder: Path) -> None:
    checkpoint, graph = model(folder, name)
    expected = reference_logits(graph, lambda each: checkpoint.tensor(each).read_f32(), TOKENS)
    limit = 0.5 if quantization == "w4" else 0.05
    assert relative_error(load(folder, name, quantization).prompt_logits(TOKENS), expected) < limit


def forms_of(folder: Path, name: str) -> dict[str, str]:
    checkpoint, graph = model(folder, name)
    lowered = lower(graph, checkpoint, quantization=None, kv=kv_cache_type("f32"), shape=step_shape(8, 1, 64))
    return {
        "+".join(tensor.name.rsplit(".", 2)[-2] for tensor in packing.tensors): str(packing.form)
        for packing in lowered.packings
    }


def test_weights_run_in_the_form_they_are_stored_in(folder: Path) -> None:
    assert forms_of(folder, "awq")["q_proj+k_proj+v_proj"] == "w4 group 64 affine"
    assert forms_of(folder, "gptq symmetric")["gate_proj+up_proj"] == "w4 group 32"
    assert forms_of(folder, "act-order")["q_proj+k_proj+v_proj"] == "w4 group 32 affine, input reordered"
    assert forms_of(folder, "fp8 blocks")["down_proj"] == "e4m3 group 128"
    assert forms_of(folder, "nf4")["gate_proj+up_proj"] == "lut4 group 64"


def test_what_has_no_form_in_common_runs_apart(folder: Path) -> None:
    mixed = forms_of(folder, "mixed gptq")
    assert {mixed[name] for name in ("q_proj", "v_proj")} == {"w4 group 32 affine"}
    assert mixed["k_proj"] == "bf16"
    assert mixed["gate_proj+up_proj"] == "w4 group 32 affine"
    assert forms_of(folder, "mixed nf4")["up_proj"] == "bf16"
    assert "q_proj+k_proj+v_proj" not in forms_of(folder, "act-orders")
