"""Packing puts every weight where the kernels look for it, and refuses what it cannot hold."""

from __future__ import annotations

import re

import numpy as np
import pytest

from octavo._native import Form, PackedWeight, Region
from tests.native.harness import FORMS, Shape, bf16_bits, make_weight, pad, to_bf16


def new(form: Form, columns: int = 5, k: int = 40, **options: object) -> PackedWeight:
    return PackedWeight(Region(1 << 20), form, columns, k, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", FORMS, ids=str)
@pytest.mark.parametrize(("columns", "k"), [(1, 32), (17, 32), (70, 160), (130, 64)])
def test_columns_read_back_are_what_was_packed(shape: Shape, columns: int, k: int) -> None:
    weight = make_weight(shape, columns, k)
    read = np.stack([weight.packed.column(i) for i in range(columns)])
    np.testing.assert_array_equal(read, weight.values.astype(np.float32) if not shape.affine else read)
    np.testing.assert_allclose(read, weight.values, rtol=1e-6, atol=1e-6)
    assert weight.packed.columns == columns
    assert weight.packed.padded_columns % 64 == 0
    assert weight.packed.k_padded == pad(shape.fitting(k))


@pytest.mark.parametrize("k", [1, 7, 31, 33, 100])
@pytest.mark.parametrize("form", [Form.F32, Form.BF16, Form.W8, Form.W4])
def test_any_k_is_packed(form: Form, k: int) -> None:
    shape = Shape(form, 32 if form in (Form.W8, Form.W4) else 0)
    weight = make_weight(shape, 19, k)
    for i in (0, 15, 16, 18):
        np.testing.assert_allclose(weight.packed.column(i), weight.values[i], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", FORMS, ids=str)
def test_rows_may_go_to_any_column_in_any_order_and_others_stay_zero(shape: Shape) -> None:
    targets = np.array([63, 0, 17, 90, 40])
    weight = make_weight(shape, 5, 64, targets=targets)
    for row, target in enumerate(targets):
        np.testing.assert_allclose(weight.packed.column(int(target)), weight.values[row], rtol=1e-6, atol=1e-6)
    for empty in set(range(weight.packed.padded_columns)) - set(targets.tolist()):
        assert not weight.packed.column(empty).any()


def test_bf16_bits_are_kept_and_floats_are_rounded_to_even() -> None:
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.00390625, 1.01171875, 3.3961776e38, 1e-45, -1e-40, 3.14159]
    x = np.array([special + [0.5] * 29], np.float32)
    by_value, by_bits = new(Form.BF16), new(Form.BF16)
    by_value.pack_f32(np.array([3], np.int32), x)
    by_bits.pack_bf16(np.array([3], np.int32), bf16_bits(x))
    np.testing.assert_array_equal(by_value.column(3), to_bf16(x)[0])
    np.testing.assert_array_equal(by_bits.column(3).view(np.uint32), by_value.column(3).view(np.uint32))
    with pytest.raises(ValueError, match="pack_bf16 fills bf16 weights"):
        new(Form.F32).pack_bf16(np.array([3], np.int32), bf16_bits(x))


def test_f16_scales_are_rounded_to_even() -> None:
    every = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)  # all finite ones from 0 up
    between = (every[:-1] + every[1:]) / 2
    scales = np.concatenate([every, between, np.nextafter(between, np.float32(np.inf)), -every]).astype(np.float32)
    rows = len(scales)
    weight = PackedWeight(Region(rows * 64), Form.W8, rows, 32, 32, 0, False, True)
    weight.pack_affine(np.arange(rows, dtype=np.int32), np.ones((rows, 32), np.uint8), scales[:, None])
    read = np.array([weight.column(i)[0] for i in range(rows)])
    np.testing.assert_array_equal(read, scales.astype(np.float16).astype(np.float32))


def test_size_asked_for_is_what_a_weight_takes() -> None:
    for shape in FORMS:
        needed = PackedWeight.bytes_needed(shape.form, 100, 192, shape.group, shape.minimum, shape.scale_f16)
        region = Region(needed)
        weight = shape.packed(region, 100, 192)
        assert weight.nbytes <= region.used <= needed
        with pytest.raises(ValueError, match="is full"):
            shape.packed(region, 1000, 192)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: new(Form.F32, columns=0), "at least one column"),
        (lambda: new(Form.F32, k=0), "at least one column"),
        (lambda: new(Form.W8, group=24), "weight group 24"),
        (lambda: new(Form.W8, group=48), "weight group 48"),
        (lambda: new(Form.W4, group=-32), "weight group -32"),
        (lambda: new(Form.W8, group=32, zero=256), "zero point 256"),
        (lambda: new(Form.W8, group=32, zero=-1), "zero point -1"),
        (lambda: new(Form.W8, k=40, group=32, rotation=32), "whole blocks of 32"),
        (lambda: new(Form.Lut4, group=32), "a table goes with 4-bit codes"),
        (lambda: new(Form.W4, group=32, table=np.zeros(16, np.float32)), "a table goes with 4-bit codes"),
        (lambda: new(Form.Lut4, group=32, table=np.zeros(15, np.float32)), "a table has 16 numbers, not 15"),
        (lambda: new(Form.Lut4, group=32, table=np.full(16, 0.5, np.float32)), "no integer from -127 to 127"),
        (lambda: new(Form.Lut4, group=32, table=np.full(16, 128, np.float32)), "no integer from -127 to 127"),
        (lambda: new(Form.Lut4F, group=32, table=np.full(16, np.nan, np.float32)), "numbers that are finite"),
        (lambda: new(Form.E4M3, group=32, minimum=True), "have no minimums"),
        (lambda: new(Form.E5M2, k=64, group=32, rotation=32), "are not rotated"),
        (lambda: new(Form.W8, k=96, group=64, rotation=64), "whole blocks of 64"),
        (lambda: new(Form.W8, k=96, group=96, rotation=96), "rotation 96 is not 0, 32 or 64"),
        (lambda: new(Form.F32, columns=1 << 62), "too large"),
        (lambda: new(Form.F32, columns=1 << 40, k=1 << 40), "too large"),
    ],
)
def test_weights_that_cannot_be_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()  # type: ignore[operator]


def test_wrong_targets_and_shapes_are_refused() -> None:
    one = np.array([0], np.int32)
    codes, scales = np.zeros((1, 40), np.uint8), np.zeros((1, 2), np.float32)
    with pytest.raises(IndexError, match=r"packed column 64 is outside 0\.\.63"):
        new(Form.F32).pack_f32(np.array([64], np.int32), np.zeros((1, 40), np.float32))
    with pytest.raises(IndexError, match="packed column -1"):
        new(Form.W8, group=32).pack_affine(np.array([-1], np.int32), codes, scales)
    with pytest.raises(IndexError, match="no packed column 64"):
        new(Form.F32).column(64)
    with pytest.raises(ValueError, match="values has shape"):
        new(Form.F32).pack_f32(one, np.zeros((1, 39), np.float32))
    with pytest.raises(ValueError, match="codes has shape"):
        new(Form.W8, group=32).pack_affine(one, codes[:, :39], scales)
    with pytest.raises(ValueError, match="scales has shape"):
        new(Form.W8, group=32).pack_affine(one, codes, scales[:, :1])
    with pytest.raises(ValueError, match="minimums must be given exactly when"):
        new(Form.W8, group=32).pack_affine(one, codes, scales, scales)
    with pytest.raises(ValueError, match="minimums must be given exactly when"):
        new(Form.W8, group=32, minimum=True).pack_affine(one, codes, scales)
    with pytest.raises(ValueError, match="pack_affine fills"):
        new(Form.BF16).pack_affine(one, codes, scales)
    with pytest.raises(ValueError, match="pack_codes fills"):
        new(Form.W8, group=32).pack_codes(one, codes, scales)
    with pytest.raises(ValueError, match="pack_codes fills"):
        new(Form.BF16).pack_codes(one, codes, scales)
    with pytest.raises(ValueError, match="scales has shape"):
        new(Form.E4M3, group=32).pack_codes(one, codes, scales[:, :1])
    with pytest.raises(IndexError, match="packed column 64"):
        new(Form.E4M3, group=32).pack_codes(np.array([64], np.int32), codes, scales)
    with pytest.raises(ValueError, match="pack_f32 fills"):
        new(Form.W8, group=32).pack_f32(one, np.zeros((1, 40), np.float32))
