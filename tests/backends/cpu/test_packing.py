"""Rows of checkpoint tensors arrive at their packed columns, streamed in pieces, whatever the form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo._native import Form
from octavo.backends.cpu.forms import WeightForm, choose_form
from octavo.backends.cpu.packing import Packing, interleaved_columns, pack_all, region_bytes, stacked_columns
from octavo.errors import ModelError, WeightsError
from octavo.quantization.rotation import rotate_rows
from octavo.weights.mapped_file import MappedFile
from octavo.weights.tensors import DenseTensor, Tensor, bf16_to_f32, f32_to_bf16
from octavo.weights.views import MappedRows
from tests.backends.cpu.tensors import Q4_0, Q4_1, Q6_K, Q8_0, Array, DenseArray, Kind, dense


def packing(tensors: list[Tensor], quantization: str | None = None, interleaved: bool = False) -> Packing:
    form, read = choose_form(tensors, quantization)
    if interleaved:
        columns, count = interleaved_columns(tensors[0].shape[0])
    else:
        columns, count = stacked_columns([tensor.shape[0] for tensor in tensors])
    return Packing(tuple(read), form, tuple(columns), count)


def mapped(folder: Path, weights: Array) -> Tensor:
    """A matrix of float32 in a file."""
    path = folder / "weights"
    path.write_bytes(weights.astype("<f4").tobytes())
    rows, k = weights.shape
    return DenseTensor("mapped", (rows, k), "f32", MappedRows(MappedFile(path), 0, k, "f32", rows))


def columns_of(packing: Packing) -> list[Array]:
    """The rows of every tensor as the packed weight holds them."""
    (weight,) = pack_all([packing], 2)
    return [np.stack([weight.column(int(i)) for i in places]) for places in packing.columns]


def test_stacked_columns_follow_each_other() -> None:
    columns, count = stacked_columns([3, 1, 2])
    assert [part.tolist() for part in columns] == [[0, 1, 2], [3], [4, 5]]
    assert count == 6


@pytest.mark.parametrize("size", [1, 15, 16, 17, 40, 64])
def test_gate_and_up_alternate_panel_by_panel(size: int) -> None:
    (gate, up), count = interleaved_columns(size)
    assert len({*gate.tolist(), *up.tolist()}) == 2 * size
    assert max(up) < count <= 2 * (size + 15)
    assert count % 32 == 0
    for i in range(size):
        assert gate[i] // 16 % 2 == 0
        assert up[i] == gate[i] + 16
        # The output column that the halves of a tile make of the pair.
        assert gate[i] // 32 * 16 + gate[i] % 16 == i


def test_bf16_tensors_are_packed_bit_for_bit() -> None:
    weights = np.random.default_rng(0).standard_normal((20, 40)).astype(np.float32)
    (rows,) = columns_of(packing([dense(weights, "bf16")]))
    np.testing.assert_array_equal(rows, bf16_to_f32(f32_to_bf16(weights)))


def test_q_k_and_v_of_different_types_are_packed_side_by_side() -> None:
    tensors: list[Tensor] = [Q4_0.tensor(40, 96, 0), Q8_0.tensor(8, 96, 1), Q6_K.tensor(24, 96, 2)]
    for tensor, rows in zip(tensors, columns_of(packing(tensors)), strict=True):
        np.testing.assert_allclose(rows, tensor.read_f32(), rtol=0, atol=1e-6 * np.abs(tensor.read_f32()).max())


def test_gate_and_up_are_packed_interleaved() -> None:
    tensors: list[Tensor] = [Q4_1.tensor(45, 64, seed) for seed in range(2)]
    for tensor, rows in zip(tensors, columns_of(packing(tensors, interleaved=True)), strict=True):
        np.testing.assert_allclose(rows, tensor.read_f32(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("quantization", "k"),
    [
        ("w8", 64),
        ("w8-wide", 192),
        ("w8", 40),
        ("w8", 33),
        ("w4", 64),
        ("w4", 50),
        ("f32", 33),
        ("w8-channel", 96),
        ("w8-channel", 40),
        ("w4-g32", 64),
        ("w4-g64", 192),
        ("w4-g128", 256),
        ("w4-g128", 192),
    ],
)
def test_dense_tensors_are_rounded_while_packing(quantization: str, k: int) -> None:
    weights = np.random.default_rng(0).standard_normal((20, k)).astype(np.float32)
    made = packing([dense(weights)], quantization)
    (rows,) = columns_of(made)
    expected = rotate_rows(weights, made.form.rotation) if made.form.rotation else weights
    step = 0 if quantization == "f32" else 0.03 if quantization.startswith("w8") else 0.5
    assert np.abs(rows - expected).max() <= step


@pytest.mark.parametrize(("quantization", "k"), [("w8", 96), ("w8-wide", 384), ("w4", 96), ("w8", 48), ("w4", 40)])
def test_rows_of_a_file_are_rounded_natively_as_in_python(tmp_path: Path, quantization: str, k: int) -> None:
    weights = np.random.default_rng(0).standard_normal((20, k)).astype(np.float32)
    in_file, in_python = packing([mapped(tmp_path, weights)], quantization), packing([dense(weights)], quantization)
    (weight,) = pack_all([in_file], 2)
    assert bool(in_file.jobs(weight)) == (k != 40)  # which has one group for a whole row
    for mine, theirs in zip(columns_of(in_file), columns_of(in_python), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("quantization", ["w8", "w8-wide", "w4"])
def test_a_tensor_that_cannot_be_rounded_is_named(tmp_path: Path, quantization: str) -> None:
    weights = np.ones((20, 64), np.float32)
    weights[11, 7] = np.nan
    with pytest.raises(ModelError, match=r"tensor mapped: has weights from nan to nan"):
        pack_all([packing([mapped(tmp_path, weights)], quantization)], 2)


def test_one_scale_for_a_column_is_packed_whatever_its_k() -> None:
    for k in (32, 40, 96, 100):
        tensor = Kind(8, 0, 128, False, "f32").tensor(10, k)
        (rows,) = columns_of(packing([tensor]))
        np.testing.assert_allclose(rows, tensor.read_f32(), rtol=1e-6)
        mixed: list[Tensor] = [tensor, Kind(4, k // 2, 8).tensor(3, k)] if k == 96 else [tensor, tensor]
        if k != 96:
            for rows in columns_of(packing(mixed)):
                np.testing.assert_allclose(rows, tensor.read_f32(), rtol=1e-6)


def test_large_tensors_are_read_a_few_rows_at_a_time_and_released() -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((2500, 1000)).astype(np.float32)
    tensor = dense(weights)
    (rows,) = columns_of(packing([tensor], "f32"))
    np.testing.assert_array_equal(rows, weights)
    reader = tensor.reader
    assert isinstance(reader, DenseArray)
    assert reader.released == 1
    ends = [stop for _, stop in reader.reads]
    assert [start for start, _ in reader.reads] == [0, *ends[:-1]]
    assert ends[-1] == 2500
    assert max(stop - start for start, stop in reader.reads) * 1000 <= 1 << 20


def test_weights_share_a_region_of_the_size_foretold() -> None:
    packings = [packing([Q4_1.tensor(100, 64)]), packing([dense(np.ones((33, 32)))]), packing([Q6_K.tensor(7, 48)])]
    weights = pack_all(packings, 3)
    assert sum(weight.nbytes for weight in weights) <= region_bytes(packings)
    assert [weight.nbytes for weight in weights] == [each.nbytes for each in packings]


def test_an_error_while_reading_is_passed_on() -> None:
    tensor = dense(np.ones((40, 32)))

    def fail(start: int, stop: int) -> Array:
        raise WeightsError(f"rows {start} to {stop} are damaged")

    tensor.reader.dense_rows = fail  # type: ignore[method-assign]
    with pytest.raises(WeightsError, match="are damaged"):
        pack_all([packing([tensor], "f32")], 2)


def test_a_form_says_what_it_takes() -> None:
    assert WeightForm(Form.BF16).nbytes(64, 32) == 64 * 32 * 2
    assert WeightForm(Form.W8, 32, 128, scale_f16=True).nbytes(64, 32) == 64 * 32 + 64 * 2
    assert WeightForm(Form.W4, 32, 0, minimum=True).nbytes(64, 64) == 64 * 32 + 2 * 64 * 2 * 4
    assert WeightForm(Form.BF16).nbytes(65, 33) == 128 * 64 * 2
