"""GPTQ (arXiv 2210.17323): weights rounded input by input, the error of each made up for by those still to come."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.ptq.grid import Float32Array, Grid, QuantizedMatrix

__all__ = ["gptq"]

_BLOCK = 128
_DAMPING_TRIES = 4


def gptq(
    weights: Float32Array,
    moments: Float32Array,
    grid: Grid,
    *,
    damping: float = 0.01,
    act_order: bool = True,
    name: str = "weights",
) -> QuantizedMatrix:
    """``weights`` [rows, k] on ``grid``, for inputs whose mean of x x' is ``moments`` [k, k].

    ``damping``, a share of the mean of its diagonal, is added to the diagonal. ``act_order`` begins with the largest
    inputs; groups stay where they are (static groups), so the layout does not change.
    """
    rows, k = weights.shape
    order = np.argsort(-np.diagonal(moments), kind="stable") if act_order else np.arange(k)
    factor = _inverse_factor(moments[np.ix_(order, order)], damping, name)
    group_of = order // grid.spec.group
    # Inputs as rows, so that what is worked on lies together.
    left = np.ascontiguousarray(weights.T[order], np.float32)
    scales, zeros = np.ascontiguousarray(grid.scales.T), np.ascontiguousarray(grid.zeros.T.astype(np.float32))
    codes = np.empty((k, rows), np.uint8)
    largest = np.float32(grid.spec.largest)
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        errors = np.empty((stop - start, rows), np.float32)
        for at in range(start, stop):
            scale, zero = scales[group_of[at]], zeros[group_of[at]]
            code = np.clip(np.rint(left[at] / scale) + zero, 0, largest)
            codes[order[at]] = code
            error = (left[at] - (code - zero) * scale) / factor[at, at]
            errors[at - start] = error
            left[at + 1 : stop] -= factor[at, at + 1 : stop, None] * error
        left[stop:] -= factor[start:stop, stop:].T @ errors
    return QuantizedMatrix(np.ascontiguousarray(codes.T), grid)


def _inverse_factor(moments: Float32Array, damping: float, name: str) -> Float32Array:
    """The upper Cholesky factor of the inverse of the damped matrix."""
    damped: NDArray[np.float64] = moments.astype(np.float64)
    diagonal = np.einsum("ii->i", damped)
    # An input that was never anything but zero has no say, and is rounded by itself.
    diagonal[diagonal == 0] = 1.0
    mean = float(diagonal.mean())
    if not np.isfinite(damped).all():
        raise ModelError(f"tensor {name}: its calibration inputs are not finite")
    for _ in range(_DAMPING_TRIES):
        diagonal += damping * mean
        try:
            np.linalg.cholesky(damped)
            inverse = np.linalg.inv(damped)
            return np.ascontiguousarray(np.linalg.cholesky((inverse + inverse.T) / 2).T, np.float32)
        except np.linalg.LinAlgError:
            damping = max(10 * damping, 1e-4)
    raise ModelError(
        f"tensor {name}: its calibration inputs are too much alike; use more samples or a larger --damping"
    )
