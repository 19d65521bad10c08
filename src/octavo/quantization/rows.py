"""Rounding rows of float32 weights to groups of small integers: w8 (symmetric) and w4 (affine), scales kept as f16.

Both are made as they are stored: the codes are found for the rounded scale and minimum, not for the ideal ones.
Inside, a piece is held as [group, groups]: what belongs to a group is one column, so that every operation runs along
memory, with the scales of neighbouring groups beside each other.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelError
from octavo.weights.tensors import AffineRows, Float32Array

__all__ = ["W8_ZERO", "Bits", "quantize_rows"]

Bits: TypeAlias = Literal[4, 8]
W8_ZERO = 128
W8_LARGEST = 127
W4_STEPS = 15
F16_LARGEST = 65504.0

# Each fit of scale and minimum to the codes moves some codes, which allows another. Two take a tenth off the squared
# error the extremes alone leave, further ones little more.
FITS = 2
# Shares of a group's range that fits start from, besides the whole of it: narrower ranges clip its extremes. These four
# take another 5 to 7 % off the squared error of normal and heavy-tailed groups of 32 to 128; seven took 1 % more.
REACHES = (np.float32(1.05), np.float32(0.93), np.float32(0.86), np.float32(0.78))

# Rows are rounded in pieces of about this many weights, so that every intermediate stays in the cache.
PIECE_WEIGHTS = 1 << 15
# A group is taken to lie on a grid when no weight is further from it than this part of a step; a few are tried first.
FIRST_SAMPLES = 3
ON_GRID = np.float32(0.1)


def quantize_rows(weights: Float32Array, bits: Bits, group: int, name: str = "weights") -> AffineRows:
    """``weights`` [rows, k] in groups of ``group``: 8 bits are symmetric around code 128, 4 bits have a minimum.

    ``name`` is what an error calls the tensor.
    """
    rows, k = weights.shape
    if group < 1 or k % group:
        raise ModelError(f"tensor {name}: rows of {k} weights do not divide into groups of {group}")
    grouped = np.ascontiguousarray(weights, dtype=np.float32).reshape(-1, group)
    count = len(grouped)
    codes = np.empty((count, group), dtype=np.uint8)
    scales = np.empty(count, dtype=np.float32)
    minimums = np.empty(count, dtype=np.float32) if bits == 4 else None
    step = max(PIECE_WEIGHTS // group, 1)
    for at in range(0, count, step):
        piece = slice(at, at + step)
        columns = np.ascontiguousarray(grouped[piece].T)
        if minimums is None:
            found, scales[piece] = round_symmetric(columns, name)
        else:
            found, scales[piece], minimums[piece] = round_affine(columns, name)
        codes[piece] = found.astype(np.uint8).T
    shape = (rows, k // group)
    return AffineRows(
        codes.reshape(rows, k), scales.reshape(shape), None if minimums is None else minimums.reshape(shape)
    )


def as_f16(values: Float32Array) -> Float32Array:
    """The values as they come back from being stored as f16."""
    return values.astype(np.float16).astype(np.float32)


def extremes(weights: Float32Array, limit: float, name: str) -> tuple[Float32Array, Float32Array]:
    """The lowest and highest weight of each group; refused unless finite and such that f16 can hold what is stored."""
    lowest, highest = weights.min(axis=0), weights.max(axis=0)
    low, high = float(lowest.min()), float(highest.max())
    if not (-limit <= low and high <= limit):  # a NaN makes both comparisons false
        raise ModelError(
            f"tensor {name}: has weights from {low} to {high}; to be quantised they must be within {limit:g}"
        )
    return lowest, highest


def inverse(scales: Float32Array) -> Float32Array:
    """1 / scale, and 0 for a scale of 0 (a group without spread)."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)


def round_symmetric(weights: Float32Array, name: str) -> tuple[Float32Array, Float32Array]:
    """Codes 1..255 around 128 and the scale of each group: its largest weight gets the code furthest out."""
    lowest, highest = extremes(weights, F16_LARGEST, name)
    scales = as_f16(np.divide(np.maximum(highest, -lowest), W8_LARGEST, dtype=np.float32))
    codes = weights * inverse(scales)
    np.rint(codes, out=codes)
    # The f16 scale may be a little below the ideal one, which puts the largest weight past the last code.
    np.clip(codes, -W8_LARGEST, W8_LARGEST, out=codes)
    codes += np.float32(W8_ZERO)
    return codes, scales


def column_sums(values: Float32Array) -> Float32Array:
    """The sum of every column, its terms added from the top down whatever the number of columns.

    numpy adds the terms of a single column in another order, and then what a row is rounded to would depend on whether
    other rows are read with it.
    """
    sums: Float32Array = values.sum(axis=0) if values.shape[1] > 1 else values.repeat(2, axis=1).sum(axis=0)[:1]
    return sums


def affine_codes(weights: Float32Array, scales: Float32Array, minimums: Float32Array) -> Float32Array:
    """The nearest code 0..15 of every weight."""
    codes = weights - minimums
    codes *= inverse(scales)
    np.rint(codes, out=codes)
    return np.clip(codes, 0, W4_STEPS, out=codes)


def squared_errors(
    weights: Float32Array, codes: Float32Array, scales: Float32Array, minimums: Float32Array
) -> Float32Array:
    """The sum over each group of the squared distance between weights and what their codes stand for."""
    distance = codes * scales
    distance += minimums
    distance -= weights
    distance *= distance
    return column_sums(distance)


def round_affine(weights: Float32Array, name: str) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Codes 0..15, scale and minimum of each group: from the extremes, or fitted, whichever is nearest to the weights.

    Fits start from the codes of the grid the weights lie on, if they are found to lie on one (as those of a model that
    was quantised before do), else from the codes the extremes give, and from those of clipped ranges.
    """
    lowest, highest = extremes(weights, F16_LARGEST / 2, name)
    spread = highest - lowest
    minimums = as_f16(lowest)
    scales = as_f16(spread / np.float32(W4_STEPS))
    codes = affine_codes(weights, scales, minimums)
    errors = squared_errors(weights, codes, scales, minimums)

    start = codes
    coarse, steps = coarser_grids(weights, lowest, spread)
    if len(coarse):
        start = codes.copy()
        start[:, coarse] = affine_codes(weights[:, coarse], spread[coarse] / steps, lowest[coarse])
    plain = scales.copy(), minimums.copy()
    improve(weights, start, plain, codes, scales, minimums, errors)
    for reach in REACHES:
        lowered = lowest + spread * ((np.float32(1) - reach) * np.float32(0.5))
        clipped = affine_codes(weights, spread * (reach / np.float32(W4_STEPS)), lowered)
        improve(weights, clipped, plain, codes, scales, minimums, errors)
    return codes, scales, minimums


def improve(
    weights: Float32Array,
    start: Float32Array,
    plain: tuple[Float32Array, Float32Array],
    codes: Float32Array,
    scales: Float32Array,
    minimums: Float32Array,
    errors: Float32Array,
) -> None:
    """Replace the codes, scales and minima of those groups that fits from the codes ``start`` bring nearer.

    ``plain`` is what groups that cannot be fitted keep; ``errors`` are the squared errors so far.
    """
    found = start
    scale, minimum = plain
    for _ in range(FITS):
        scale, minimum = fitted(weights, found, scale, minimum)
        found = affine_codes(weights, scale, minimum)
    error = squared_errors(weights, found, scale, minimum)
    better = np.flatnonzero(error < errors)
    codes[:, better] = found[:, better]
    scales[better], minimums[better], errors[better] = scale[better], minimum[better], error[better]


def coarser_grids(
    weights: Float32Array, lowest: Float32Array, spread: Float32Array
) -> tuple[npt.NDArray[np.intp], Float32Array]:
    """The groups whose weights lie on a grid of fewer than 15 steps between their extremes, and how many it has."""
    inverses = inverse(spread)
    stride = max(len(weights) // FIRST_SAMPLES, 1)
    sample = (weights[::stride] - lowest) * inverses
    steps = np.zeros(len(lowest), dtype=np.float32)
    # A grid of 7 steps or fewer is also one of some multiple of them, 8 to 15.
    for count in range(W4_STEPS // 2 + 1, W4_STEPS):
        likely = np.flatnonzero(on_grid(sample, count))
        if len(likely):
            positions = (weights[:, likely] - lowest[likely]) * inverses[likely]
            steps[likely[on_grid(positions, count)]] = count
    coarse = np.flatnonzero(steps)
    return coarse, steps[coarse]


def on_grid(positions: Float32Array, steps: int) -> npt.NDArray[np.bool_]:
    """Whether all positions (0 to 1) of a group are near multiples of 1 / steps."""
    scaled = positions * np.float32(steps)
    scaled -= np.rint(scaled)
    near: npt.NDArray[np.bool_] = np.abs(scaled, out=scaled).max(axis=0) < ON_GRID
    return near


def fitted(
    weights: Float32Array, codes: Float32Array, scales: Float32Array, minimums: Float32Array
) -> tuple[Float32Array, Float32Array]:
    """The scale and minimum that bring ``codes`` nearest to the weights (least squares), rounded to f16.

    Groups for which there is no such scale (all codes the same) keep the one they have.
    """
    # Around the means, for precision: minima may be far larger than the steps between codes.
    size = np.float32(len(weights))
    mean_code, mean_weight = column_sums(codes) / size, column_sums(weights) / size
    around = codes - mean_code
    covariance = column_sums(around * (weights - mean_weight))
    around *= around
    variance = column_sums(around)
    usable = (variance > 0.01) & (covariance > 0)  # a single code that differs gives nearly 1
    scale = as_f16(np.divide(covariance, variance, out=scales.copy(), where=usable))
    # The minimum is fitted to the scale as rounded.
    minimum = as_f16(mean_weight - scale * mean_code)
    return np.where(usable, scale, scales), np.where(usable, minimum, minimums)
