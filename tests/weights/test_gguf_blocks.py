"""Unpacked blocks stand for exactly the numbers the reference dequantisation gives, to the last bit of the float32."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.weights import AffineTensor, open_checkpoint
from octavo.weights.gguf_blocks import BLOCK_FORMATS, TYPE_NAMES
from octavo.weights.tensors import Float32Array
from tests.weights.gguf_files import random_blocks, tiny_model


def reference(raw: np.ndarray, kind: str) -> Float32Array:
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]))


def assert_same_bits(values: Float32Array, expected: Float32Array) -> None:
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(values), ~number)
    np.testing.assert_array_equal(values.view(np.uint32)[number], expected.view(np.uint32)[number])


def test_sizes_and_numbers_of_the_types_are_the_format_s() -> None:
    for number, name in TYPE_NAMES.items():
        if name not in ("Q4_2", "Q4_3", "Q2_0"):  # removed long ago, and newer than the package
            assert gguf.GGMLQuantizationType[name] == number
    for name, block in BLOCK_FORMATS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (block.block_values, block.block_bytes)


def dequantized(kind: str, raw: np.ndarray) -> Float32Array:
    """What the codes, scales and minima of the blocks stand for."""
    block = BLOCK_FORMATS[kind]
    codes, scales, minimums = block.unpack_rows(raw)
    with np.errstate(invalid="ignore", over="ignore"):
        values = (codes.astype(np.float32) - np.float32(block.zero)) * np.repeat(scales, block.group, axis=1)
        if minimums is not None:
            values += np.repeat(minimums, block.group, axis=1)
    return values


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (700, 3)])
def test_random_blocks_equal_the_reference_bit_for_bit(kind: str, shape: tuple[int, int]) -> None:
    block = BLOCK_FORMATS[kind]
    rows, blocks = shape
    k = blocks * block.block_values
    content = random_blocks(np.random.default_rng(7), kind, (rows, k), finite=True)
    raw = np.frombuffer(content, dtype=np.uint8).reshape(rows, -1)
    codes, scales, minimums = block.unpack_rows(raw)
    assert codes.shape == (rows, k)
    assert codes.max() < (16 if block.bits == 4 else 256)
    assert scales.shape == (rows, k // block.group)
    assert (minimums is not None) == block.has_minimum
    assert_same_bits(dequantized(kind, raw), reference(raw, kind))


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_blocks_with_infinite_factors_give_the_finite_values_of_the_reference_and_no_others(kind: str) -> None:
    k = 4 * BLOCK_FORMATS[kind].block_values
    raw = np.frombuffer(random_blocks(np.random.default_rng(11), kind, (300, k)), dtype=np.uint8).reshape(300, -1)
    values, expected = dequantized(kind, raw), reference(raw, kind)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(values), finite)
    np.testing.assert_array_equal(values[finite], expected[finite])


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_scales_said_to_be_f16_are(kind: str) -> None:
    block = BLOCK_FORMATS[kind]
    raw = np.frombuffer(random_blocks(np.random.default_rng(3), kind, (64, 256)), dtype=np.uint8).reshape(64, -1)
    _, scales, _ = block.unpack_rows(raw)
    finite = scales[np.isfinite(scales)]
    with np.errstate(over="ignore"):
        survives = np.array_equal(finite.astype(np.float16).astype(np.float32), finite)
    assert survives == (block.scale_dtype == "f16")


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_a_tensor_of_a_file_equals_the_reference_in_any_range_of_rows(tmp_path: Path, kind: str) -> None:
    spec = tiny_model(kind=kind, hidden=256, intermediate=256, finite=True)
    path = spec.write(tmp_path / "a.gguf")
    tensor = open_checkpoint(path).tensor("model.layers.0.mlp.down_proj.weight")
    assert isinstance(tensor, AffineTensor)
    assert tensor.source == kind
    assert tensor.exact
    stored = next(item.data for item in spec.tensors if item.name == "blk.0.ffn_down.weight")
    raw = np.frombuffer(stored, dtype=np.uint8).reshape(256, -1)
    expected = reference(raw, kind)
    assert_same_bits(tensor.read_f32(), expected)
    assert_same_bits(tensor.read_f32(5, 5 + 17), expected[5:22])
    assert tensor.read_f32(9, 9).shape == (0, 256)
    assert tensor.has_raw_blocks
    np.testing.assert_array_equal(tensor.raw_blocks(3, 7), raw[3:7])


def test_the_default_model_equals_the_reference_bit_for_bit(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_path).tensors}
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.17.self_attn.v_proj.weight": "blk.17.attn_v.weight",
        "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
    }
    for name, gguf_name in pairs.items():
        item = stored[gguf_name]
        assert_same_bits(checkpoint.tensor(name).read_f32(), reference(item.data, item.tensor_type.name))
    for name, gguf_name, heads in (("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)):
        item = stored[f"blk.4.{gguf_name}.weight"]
        pairs_of_rows = reference(item.data, item.tensor_type.name).reshape(heads, 32, 2, 576)
        halves = np.concatenate([pairs_of_rows[:, :, 0], pairs_of_rows[:, :, 1]], axis=1).reshape(heads * 64, 576)
        assert_same_bits(checkpoint.tensor(f"model.layers.4.self_attn.{name}.weight").read_f32(), halves)
