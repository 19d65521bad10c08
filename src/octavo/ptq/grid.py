"""Integer grids: scale and zero point of groups of weights, their codes, and the search for clipped ranges.

w = scale * (code - zero), with whole zero points, as the layouts of AWQ, GPTQ and compressed-tensors have them. Scales
are rounded to the type they are stored in before codes are found, so nothing is lost in writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.weights.tensors import bf16_to_f32, f32_to_bf16

__all__ = ["Grid", "GridSpec", "QuantizedMatrix", "clip_search", "fit_grid", "round_to_grid"]

Float32Array: TypeAlias = NDArray[np.float32]
ScaleDtype = Literal["f16", "bf16"]

# Shares of a group's range that are tried: AWQ's own search goes down to a half of it.
RATIOS = tuple(1 - step / 20 for step in range(11))
# Rows that a search holds at once, in elements.
_PIECE = 1 << 21
_SMALLEST_SCALE = {"f16": 2.0**-24, "bf16": 2.0**-126}


@dataclass(frozen=True)
class GridSpec:
    """The kind of grid. ``group`` is the weights along k with one scale (k itself for whole rows)."""

    bits: int
    group: int
    symmetric: bool = False
    least_zero: int = 0
    scale_dtype: ScaleDtype = "f16"

    @property
    def largest(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1


@dataclass(frozen=True)
class Grid:
    """Scales float32 [rows, groups] and zero points int32 [rows, groups]."""

    spec: GridSpec
    scales: Float32Array
    zeros: NDArray[np.int32]


@dataclass(frozen=True)
class QuantizedMatrix:
    """Codes uint8 [rows, k] on a grid."""

    codes: NDArray[np.uint8]
    grid: Grid

    def dequantized(self) -> Float32Array:
        """The weights the codes stand for, float32 [rows, k]."""
        group = self.grid.spec.group
        rows, k = self.codes.shape
        values = self.codes.reshape(rows, k // group, group).astype(np.float32)
        values -= self.grid.zeros[:, :, None]
        values *= self.grid.scales[:, :, None]
        return values.reshape(rows, k)

    def rows(self, start: int, stop: int) -> QuantizedMatrix:
        """Some of the rows."""
        grid = Grid(self.grid.spec, self.grid.scales[start:stop], self.grid.zeros[start:stop])
        return QuantizedMatrix(self.codes[start:stop], grid)


def stored_scale(scales: Float32Array, dtype: ScaleDtype) -> Float32Array:
    """Scales as they come back from being stored; never zero."""
    if dtype == "f16":
        rounded = np.asarray(scales, np.float32).astype(np.float16).astype(np.float32)
    else:
        rounded = bf16_to_f32(f32_to_bf16(scales))
    return np.maximum(rounded, np.float32(_SMALLEST_SCALE[dtype]))


def grid_of_range(low: Float32Array, high: Float32Array, spec: GridSpec) -> Grid:
    """The grid over [low, high] [rows, groups]; zero is always on it."""
    if spec.symmetric:
        reach = np.maximum(np.abs(low), np.abs(high))
        scales = stored_scale(reach * np.float32(2 / spec.largest), spec.scale_dtype)
        zeros = np.full(scales.shape, (spec.largest + 1) // 2, np.int32)
        return Grid(spec, scales, zeros)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scales = stored_scale((high - low) / np.float32(spec.largest), spec.scale_dtype)
    zeros = np.clip(np.rint(-low / scales), spec.least_zero, spec.largest).astype(np.int32)
    return Grid(spec, scales, zeros)


def fit_grid(weights: Float32Array, spec: GridSpec, name: str = "weights") -> Grid:
    """The grid that reaches over all weights of each group. Refuses weights no scale can hold, by ``name``."""
    rows, k = weights.shape
    grouped = weights.reshape(rows, k // spec.group, spec.group)
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    if not (np.isfinite(low).all() and np.isfinite(high).all()) or max(-low.min(), high.max()) > 60000:
        raise ModelError(f"tensor {name}: has weights from {low.min()} to {high.max()}; they must be within 60000")
    return grid_of_range(low, high, spec)


def round_to_grid(weights: Float32Array, grid: Grid) -> QuantizedMatrix:
    """The nearest code of every weight [rows, k]."""
    rows, k = weights.shape
    group = grid.spec.group
    values = weights.reshape(rows, k // group, group) / grid.scales[:, :, None]
    np.rint(values, out=values)
    values += grid.zeros[:, :, None]
    np.clip(values, 0, grid.spec.largest, out=values)
    return QuantizedMatrix(values.astype(np.uint8).reshape(rows, k), grid)


def clip_search(
    weights: Float32Array,
    spec: GridSpec,
    moments: Float32Array | None = None,
    ratios: Sequence[float] = RATIOS,
    name: str = "weights",
) -> Grid:
    """The grid of the share of each group's range that loses least: a few large weights clipped, all others finer.

    The loss of a group is that of its part of the output, e M e' with ``moments`` M = mean of x x' over the calibration
    inputs [k, k], of which the blocks along the diagonal are used; without it, e e'. From AWQ (arXiv 2306.00978).
    """
    rows, k = weights.shape
    groups = k // spec.group
    whole = fit_grid(weights, spec, name)
    blocks = None
    if moments is not None:
        blocks = np.stack([moments[at : at + spec.group, at : at + spec.group] for at in range(0, k, spec.group)])
    scales, zeros = whole.scales.copy(), whole.zeros.copy()
    step = max(1, _PIECE // k)
    for start in range(0, rows, step):
        piece = weights[start : start + step]
        grouped = piece.reshape(len(piece), groups, spec.group)
        low, high = grouped.min(axis=2), grouped.max(axis=2)
        best = np.full((len(piece), groups), np.inf, np.float32)
        for ratio in ratios:
            grid = grid_of_range(low * np.float32(ratio), high * np.float32(ratio), spec)
            error = (round_to_grid(piece, grid).dequantized() - piece).reshape(grouped.shape).transpose(1, 0, 2)
            loss = np.square(error).sum(axis=2) if blocks is None else ((error @ blocks) * error).sum(axis=2)
            losses = loss.T
            better = losses < best
            best = np.where(better, losses, best)
            chosen = slice(start, start + len(piece))
            scales[chosen] = np.where(better, grid.scales, scales[chosen])
            zeros[chosen] = np.where(better, grid.zeros, zeros[chosen])
    return Grid(spec, scales, zeros)
