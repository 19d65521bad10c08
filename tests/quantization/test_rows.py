"""Rounding to w8 and w4: error bounds, recovery of what lies on a grid, and independence of what is read together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ModelError
from octavo.quantization import quantize_rows
from octavo.quantization.rows import Bits
from octavo.weights.tensors import AffineRows, Float32Array, bf16_to_f32, f32_to_bf16

BITS: tuple[Bits, ...] = (4, 8)


def values_of(rows: AffineRows, zero: int) -> np.ndarray:
    """What the codes stand for, in float64."""
    group = rows.codes.shape[1] // rows.scales.shape[1]
    values = (rows.codes.astype(np.float64) - zero) * np.repeat(rows.scales.astype(np.float64), group, axis=1)
    return values if rows.minimums is None else values + np.repeat(rows.minimums.astype(np.float64), group, axis=1)


def normal(rows: int, k: int, scale: float = 0.02, seed: int = 0) -> Float32Array:
    return (np.random.default_rng(seed).standard_normal((rows, k)) * scale).astype(np.float32)


def f16(values: np.ndarray) -> Float32Array:
    return values.astype(np.float16).astype(np.float32)


def extremes_only(weights: Float32Array, group: int) -> np.ndarray:
    """The plain way: 15 even steps from the lowest to the highest weight of each group, in float64."""
    grouped = weights.reshape(-1, group).astype(np.float64)
    lowest, highest = grouped.min(axis=1, keepdims=True), grouped.max(axis=1, keepdims=True)
    scales, minimums = f16((highest - lowest) / 15).astype(np.float64), f16(lowest).astype(np.float64)
    codes = np.clip(np.rint((grouped - minimums) / np.where(scales == 0, 1, scales)), 0, 15)
    return (codes * scales + minimums).reshape(weights.shape)


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_shapes_and_types_are_those_of_affine_rows(bits: int, group: int) -> None:
    codes, scales, minimums = quantize_rows(normal(5, 256), bits, group)  # type: ignore[arg-type]
    assert codes.shape == (5, 256)
    assert codes.dtype == np.uint8
    assert scales.shape == (5, 256 // group)
    assert scales.dtype == np.float32
    np.testing.assert_array_equal(f16(scales), scales)
    if bits == 8:
        assert minimums is None
        assert codes.min() >= 1
    else:
        assert minimums is not None
        assert minimums.shape == scales.shape
        np.testing.assert_array_equal(f16(minimums), minimums)
        assert codes.max() <= 15


def test_w8_is_within_half_a_step() -> None:
    weights = normal(64, 256)
    rows = quantize_rows(weights, 8, 32)
    steps = np.repeat(rows.scales, 32, axis=1)
    # The f16 rounding of the scale may leave the largest weight a little past the last code.
    assert np.all(np.abs(values_of(rows, 128) - weights) <= steps * (0.5 + 127 * 2**-11))


def test_w8_gives_back_what_was_q8() -> None:
    rng = np.random.default_rng(1)
    scales = f16(rng.uniform(1e-4, 1e-2, (40, 8)))
    codes = rng.integers(-127, 128, (40, 8, 32))
    codes[:, :, 5] = 127 * rng.choice([-1, 1], (40, 8))  # the format's own quantiser gives the largest weight code 127
    weights = (codes * scales[:, :, None]).astype(np.float32).reshape(40, 256)
    rows = quantize_rows(weights, 8, 32)
    np.testing.assert_array_equal(rows.codes.reshape(40, 8, 32).astype(int) - 128, codes)
    np.testing.assert_array_equal(rows.scales, scales)


@pytest.mark.parametrize("as_bf16", [False, True])
@pytest.mark.parametrize("highest", [15, 14, 11, 8, 7, 3, 1])
def test_w4_gives_back_what_lies_on_a_grid(highest: int, as_bf16: bool) -> None:
    rng = np.random.default_rng(highest)
    scales = f16(rng.uniform(1e-3, 1e-2, (64, 8, 1)))
    minimums = f16(-scales * rng.uniform(0.3, 0.7, scales.shape) * highest)
    codes = rng.integers(0, highest + 1, (64, 8, 32))
    codes[:, :, 3], codes[:, :, 20] = 0, highest
    exact = (codes * scales + minimums).astype(np.float32).reshape(64, 256)
    weights = bf16_to_f32(f32_to_bf16(exact)) if as_bf16 else exact
    errors = np.abs(values_of(quantize_rows(weights, 4, 32), 0) - exact).reshape(64, 8, 32) / scales
    # In steps of the grid: what is left is the rounding of scale and minimum to f16, and that of the weights to bf16.
    assert errors.max() < (0.05 if as_bf16 else 0.005)


@pytest.mark.parametrize(("group", "gain"), [(16, 0.15), (32, 0.14), (128, 0.11)])
def test_w4_is_nowhere_worse_than_the_extremes_alone_and_better_overall(group: int, gain: float) -> None:
    weights = normal(128, 512, seed=3)
    plain = (extremes_only(weights, group) - weights).reshape(-1, group)
    ours = (values_of(quantize_rows(weights, 4, group), 0) - weights).reshape(-1, group)
    plain_errors, errors = (plain**2).sum(axis=1), (ours**2).sum(axis=1)
    assert np.all(errors <= plain_errors * (1 + 1e-3))
    assert errors.sum() < (1 - gain) * plain_errors.sum()


def test_rows_do_not_depend_on_what_is_rounded_with_them() -> None:
    for shape in ((70, 32), (9, 4096), (2049, 32)):
        weights = normal(*shape, seed=5)
        for bits in BITS:
            together = quantize_rows(weights, bits, 32)
            for start, stop in ((0, 1), (3, 5), (shape[0] - 1, shape[0])):
                alone = quantize_rows(weights[start:stop], bits, 32)
                for mine, theirs in zip(alone, together, strict=True):
                    if mine is not None and theirs is not None:
                        np.testing.assert_array_equal(mine, theirs[start:stop])


def test_groups_without_spread_are_kept() -> None:
    weights = np.zeros((4, 64), dtype=np.float32)
    weights[1] = 0.25
    weights[2] = -3.0
    weights[3] = 1e-9
    for bits, zero in ((4, 0), (8, 128)):
        rows = quantize_rows(weights, bits, 32)  # type: ignore[arg-type]
        np.testing.assert_allclose(values_of(rows, zero), weights, rtol=1e-3, atol=1e-7)


def test_no_rows_are_no_rows() -> None:
    assert quantize_rows(np.zeros((0, 64), np.float32), 4, 32).codes.shape == (0, 64)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 7e4, -7e4])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_no_scale_can_hold_are_refused_by_name(bits: int, bad: float) -> None:
    weights = normal(8, 64)
    weights[6, 40] = bad
    with pytest.raises(ModelError, match=r"tensor w\.x: has weights from"):
        quantize_rows(weights, bits, 32, "w.x")  # type: ignore[arg-type]


def test_groups_that_do_not_divide_the_rows_are_refused() -> None:
    with pytest.raises(ModelError, match="rows of 40 weights do not divide into groups of 32"):
        quantize_rows(normal(2, 40), 4, 32)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-30000, 30000, width=32), min_size=32, max_size=32),
    bits=st.sampled_from([4, 8]),
)
def test_any_group_is_rounded_within_its_spread(values: list[float], bits: int) -> None:
    weights = np.asarray([values], dtype=np.float32)
    rows = quantize_rows(weights, bits, 32)  # type: ignore[arg-type]
    found = values_of(rows, 128 if bits == 8 else 0)
    assert np.isfinite(found).all()
    largest = float(np.abs(weights).max())
    spread = largest if bits == 8 else float(weights.max()) - float(weights.min())
    # One step, and what f16 cannot hold: 2**-11 of the largest number, or its smallest steps near zero.
    allowed = spread / (127 if bits == 8 else 15) + largest * 2**-9 + 255 * 2**-24
    assert np.abs(found - weights).max() <= allowed
