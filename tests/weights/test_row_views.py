"""Views of a file's tensors: natively read where rows are picked, bounded reads, refused where a view would lose."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from octavo.weights.gguf import GgufCheckpoint
from octavo.weights.row_views import matrix_of_stack, picked_view, transposed_view, unit_rows_view
from octavo.weights.safetensors_files import SafetensorsFile
from octavo.weights.tensors import AffineTensor, DenseTensor


@pytest.fixture
def stack(tmp_path: Path) -> tuple[np.ndarray, DenseTensor]:
    """A stack of 3 matrices 6 x 8 in bf16, and its values."""
    values = np.random.default_rng(0).standard_normal((3, 6, 8)).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [3, 6, 8], "data_offsets": [0, bits.nbytes]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bits.tobytes())
    return (bits.astype(np.uint32) << 16).view(np.float32), SafetensorsFile(path).tensor("w")


def test_rows_in_a_run_are_their_own_bytes(stack: tuple[np.ndarray, DenseTensor]) -> None:
    values, tensor = stack
    matrix = matrix_of_stack(tensor, (3, 6, 8), 1)
    stored = picked_view(matrix, np.arange(2, 5)).stored_rows()
    assert stored is not None
    assert (stored.kind, stored.order) == ("BF16", None)
    assert stored.bytes.tobytes() == (values[1, 2:5].view(np.uint32) >> 16).astype(np.uint16).tobytes()


def test_rows_in_another_order_are_named_by_their_place(stack: tuple[np.ndarray, DenseTensor]) -> None:
    values, tensor = stack
    stored = picked_view(matrix_of_stack(tensor, (3, 6, 8), 2), np.array([5, 0, 3])).stored_rows()
    assert stored is not None
    assert stored.order is not None
    assert stored.bytes.size == 6 * 8 * 2
    assert stored.order.tolist() == [5, 0, 3]
    again = picked_view(picked_view(matrix_of_stack(tensor, (3, 6, 8), 2), np.array([5, 0, 3])), np.array([2, 0]))
    np.testing.assert_array_equal(again.read_f32(), values[2][[3, 5]])


def test_the_transpose_of_16_bit_numbers_keeps_their_bits(stack: tuple[np.ndarray, DenseTensor]) -> None:
    values, tensor = stack
    turned = transposed_view(matrix_of_stack(tensor, (3, 6, 8), 0))
    assert (turned.shape, turned.dtype, turned.stored_rows()) == ((8, 6), "bf16", None)
    np.testing.assert_array_equal(turned.read_f32(3, 8), values[0].T[3:8])
    np.testing.assert_array_equal(turned.read_bf16(), (values[0].T.view(np.uint32) >> 16).astype(np.uint16))


def test_rows_of_length_one_are_those_of_the_stored_ones(
    stack: tuple[np.ndarray, DenseTensor], smollm2_path: Path
) -> None:
    _, tensor = stack
    quantised = GgufCheckpoint(smollm2_path).tensor("model.layers.0.self_attn.v_proj.weight")
    for each in (matrix_of_stack(tensor, (3, 6, 8), 1), quantised):
        unit, rows = unit_rows_view(each), each.read_f32(2, 6)
        assert unit.shape == each.shape
        expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        np.testing.assert_allclose(unit.read_f32(2, 6), expected, rtol=1e-5, atol=1e-7)
    assert isinstance(unit, AffineTensor)
    assert isinstance(quantised, AffineTensor)
    np.testing.assert_array_equal(unit.read(2, 6).codes, quantised.read(2, 6).codes)


def test_rows_of_a_reordered_gguf_tensor_are_picked_of_the_right_ones(smollm2_path: Path) -> None:
    checkpoint = GgufCheckpoint(smollm2_path)
    tensor = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    order = np.array([3, 64, 65, 7])
    picked = picked_view(tensor, order)
    np.testing.assert_array_equal(picked.read_f32(), tensor.read_f32()[order])
    whole, part = tensor.stored_rows(), picked.stored_rows()
    assert whole is not None
    assert part is not None
    assert whole.order is not None
    assert part.order is not None
    np.testing.assert_array_equal(part.order, whole.order[order])
    assert part.bytes.size == whole.bytes.size
