"""Tensors seen in another form: rounded while they are read, or dense though they are stored as codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.quantization import dequantized_view, quantize_rows, quantized_view
from octavo.weights import AffineTensor, DenseTensor, Tensor
from octavo.weights.gguf import GgufCheckpoint
from tests.weights.gguf_files import tiny_model


def matrix(tmp_path: Path, kind: str, k: int = 256) -> Tensor:
    path = tiny_model("qwen2", kind, hidden=k, intermediate=512).write(tmp_path / f"{kind}-{k}.gguf")
    return GgufCheckpoint(path).tensor("model.layers.0.mlp.gate_proj.weight")


@pytest.mark.parametrize("bits", [4, 8])
def test_dense_rows_are_rounded_as_they_are_read(tmp_path: Path, bits: int) -> None:
    dense = matrix(tmp_path, "BF16")
    view = quantized_view(dense, bits)  # type: ignore[arg-type]
    assert (view.name, view.shape, view.bits, view.group) == (dense.name, (512, 256), bits, 32)
    assert (view.zero, view.has_minimum) == ((128, False) if bits == 8 else (0, True))
    assert (view.scale_dtype, view.exact, view.source) == ("f16", False, f"w{bits}")
    assert not view.has_raw_blocks
    with pytest.raises(ModelError, match="has no stored blocks"):
        view.raw_blocks()
    expected = quantize_rows(dense.read_f32(), bits, 32)  # type: ignore[arg-type]
    for mine, theirs in zip(view.read(100, 140), expected, strict=True):
        if theirs is not None:
            np.testing.assert_array_equal(mine, theirs[100:140])
    error = np.abs(view.read_f32() - dense.read_f32()).mean() / np.abs(dense.read_f32()).mean()
    assert error < (0.15 if bits == 4 else 0.01)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q4_K", 4), ("Q8_0", 8), ("Q6_K", 8)])
def test_what_has_the_bits_already_is_left_alone(tmp_path: Path, kind: str, bits: int) -> None:
    tensor = matrix(tmp_path, kind)
    assert quantized_view(tensor, bits) is tensor  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_fewer_bits_are_widened_without_loss(tmp_path: Path, kind: str) -> None:
    tensor = matrix(tmp_path, kind)
    assert isinstance(tensor, AffineTensor)
    wide = quantized_view(tensor, 8)
    assert (wide.bits, wide.group, wide.zero, wide.has_minimum) == (8, tensor.group, tensor.zero, tensor.has_minimum)
    assert wide.exact
    np.testing.assert_array_equal(wide.read_f32(), tensor.read_f32())


def test_more_bits_are_rounded(tmp_path: Path) -> None:
    path = tiny_model("qwen2", "F32", hidden=256).write(tmp_path / "f32.gguf")
    dense = GgufCheckpoint(path).tensor("model.layers.0.mlp.up_proj.weight")
    eight = quantized_view(dense, 8)
    four = quantized_view(eight, 4)
    assert (four.bits, four.exact) == (4, False)
    np.testing.assert_array_equal(four.read_f32(), quantized_view(dequantized_view(eight), 4).read_f32())


@pytest.mark.parametrize(("k", "group"), [(96, 32), (48, 16), (40, 40)])
def test_the_group_is_one_that_divides_k(tmp_path: Path, k: int, group: int) -> None:
    path = tiny_model("qwen2", "F32", hidden=k, heads=2, kv_heads=1).write(tmp_path / "a.gguf")
    view = quantized_view(GgufCheckpoint(path).tensor("model.layers.0.mlp.up_proj.weight"), 4)
    assert view.group == group
    assert view.read(0, 3).scales.shape == (3, k // group)


def test_vectors_are_refused_by_name(tmp_path: Path) -> None:
    norm = GgufCheckpoint(tiny_model().write(tmp_path / "a.gguf")).tensor("model.norm.weight")
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight: has shape \[64\]"):
        quantized_view(norm, 8)


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "BF16"])
def test_the_dense_view_has_the_same_values(tmp_path: Path, kind: str) -> None:
    tensor = matrix(tmp_path, kind)
    view = dequantized_view(tensor)
    assert isinstance(view, DenseTensor)
    assert view.shape == tensor.shape
    assert (view is tensor) == (kind == "BF16")
    np.testing.assert_array_equal(view.read_f32(7, 11), tensor.read_f32()[7:11])
    view.release()


def test_the_default_model_is_found_again_in_its_own_grid(smollm2_path: Path) -> None:
    tensor = GgufCheckpoint(smollm2_path).tensor("model.layers.3.self_attn.o_proj.weight")
    assert isinstance(tensor, AffineTensor)
    again = quantized_view(dequantized_view(tensor), 4)
    stored, found = tensor.read(), again.read()
    np.testing.assert_array_equal(found.codes, stored.codes)
    np.testing.assert_array_equal(found.scales, stored.scales)
