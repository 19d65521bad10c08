"""Hadamard rotation of the k of a weight in blocks: x W' = (x H)(W H)', with outliers of x and W spread out.

After QuaRot (arXiv 2404.00456), here per block: a group of the int8 forms is one block of 32 or several of 64, and the
rotation of the activations costs five or six additions per element where they are quantised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from octavo.weights.tensors import DenseTensor, Float32Array, StoredRows, Uint16Array

__all__ = ["ROTATION_BLOCK", "WIDE_ROTATION_BLOCK", "rotate_rows", "rotated_view"]

ROTATION_BLOCK = 32
# For groups that are wider. Larger blocks do not make them more accurate (measured up to 512).
WIDE_ROTATION_BLOCK = 64


def rotate_rows(rows: Float32Array, block: int = ROTATION_BLOCK) -> Float32Array:
    """Each block of elements of each row times the orthonormal Hadamard matrix of that size in natural order.

    As butterflies over ever larger distances, the order of the native code: a product with the matrix rounds as the
    BLAS of the machine adds, and differently for one row than for many.
    """
    values = np.ascontiguousarray(rows, np.float32).reshape(-1, block) * np.float32(1 / math.sqrt(block))
    distance = 1
    while distance < block:
        pairs = values.reshape(-1, block // (2 * distance), 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        values = np.stack((first + second, first - second), axis=2)
        distance *= 2
    rotated: Float32Array = values.reshape(rows.shape)
    return rotated


@dataclass(frozen=True)
class _RotatedRows:
    """The rows of a matrix, rotated when they are read."""

    tensor: DenseTensor
    block: int

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        return rotate_rows(self.tensor.read_f32(start, stop), self.block)

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        return None

    def stored_rows(self) -> StoredRows | None:
        rows = self.tensor.stored_rows()
        return None if rows is None else rows._replace(rotation=self.block)

    def release(self) -> None:
        self.tensor.release()


def rotated_view(tensor: DenseTensor, block: int = ROTATION_BLOCK) -> DenseTensor:
    """The matrix with its k rotated, as float32."""
    return DenseTensor(tensor.name, tensor.shape, "f32", _RotatedRows(tensor, block))
