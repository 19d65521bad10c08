"""Rounding of dense weights to 8-bit floats (OCP FP8 e4m3) with one scale a row, as a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelError
from octavo.weights.float8 import float8_table
from octavo.weights.tensors import Float32Array, TableRows, TableTensor, Tensor, Uint8Array

__all__ = ["float8_view", "round_to_e4m3"]

LARGEST = np.float32(448)  # of e4m3
_SMALLEST_NORMAL = np.float32(2.0**-6)
_SUBNORMAL_STEPS = np.float32(2.0**9)


def round_to_e4m3(values: Float32Array) -> Uint8Array:
    """The nearest code of each number, ties to even; numbers past 448 get the code of 448."""
    magnitudes = np.minimum(np.abs(np.ascontiguousarray(values, np.float32)), LARGEST)
    bits = magnitudes.view(np.uint32)
    # Exponent and the top three bits of the mantissa, rounded; the exponent's bias goes from 127 to 7.
    normal = ((bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)) - np.uint32(
        120 << 3
    )
    small = np.rint(magnitudes * _SUBNORMAL_STEPS).astype(np.uint32)
    codes: npt.NDArray[np.uint32] = np.where(magnitudes < _SMALLEST_NORMAL, small, normal)
    return (codes | (np.signbit(values).astype(np.uint32) << np.uint32(7))).astype(np.uint8)


@dataclass(frozen=True)
class _RoundedRows:
    """The rows of a tensor, rounded when they are read."""

    tensor: Tensor

    def table_rows(self, start: int, stop: int) -> TableRows:
        rows = self.tensor.read_f32(start, stop)
        reach = np.abs(rows).max(axis=1, keepdims=True, initial=0)
        if not np.isfinite(reach).all():
            raise ModelError(f"tensor {self.tensor.name}: has weights that are not finite and cannot be rounded to fp8")
        scales = np.where(reach > 0, reach / LARGEST, np.float32(1)).astype(np.float32)
        return TableRows(round_to_e4m3(rows / scales), scales)

    def release(self) -> None:
        self.tensor.release()


def float8_view(tensor: Tensor) -> TableTensor:
    """The matrix as e4m3 codes with a float32 scale for each row: the largest weight of a row gets the largest code."""
    if len(tensor.shape) != 2:
        raise ModelError(f"tensor {tensor.name}: has shape {list(tensor.shape)}, only matrices can be quantised")
    rows, k = tensor.shape
    table = float8_table("e4m3")
    return TableTensor(tensor.name, (rows, k), "e4m3", table, k, "f32", "fp8", _RoundedRows(tensor))
