"""Hadamard rotation of the k of a weight in blocks: x W' = (x H)(W H)', with outliers of x and W spread out.

After QuaRot (arXiv 2404.00456), here per block: a group of the int8 forms is one block of 32 or several of 64, and the
rotation of the activations costs five or six additions per element where they are quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from octavo.weights.tensors import DenseTensor, Float32Array, Uint16Array

__all__ = ["ROTATION_BLOCK", "WIDE_ROTATION_BLOCK", "hadamard", "rotate_rows", "rotated_view"]

ROTATION_BLOCK = 32
# For groups that are wider. Larger blocks do not make them more accurate (measured up to 512).
WIDE_ROTATION_BLOCK = 64


@cache
def hadamard(size: int = ROTATION_BLOCK) -> Float32Array:
    """The orthonormal Hadamard matrix of a power of two, in natural order; it is its own inverse."""
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: Float32Array = (matrix / np.sqrt(np.float32(size))).astype(np.float32)
    return scaled


def rotate_rows(rows: Float32Array, block: int = ROTATION_BLOCK) -> Float32Array:
    """Each block of elements of each row times the Hadamard matrix."""
    blocks = np.ascontiguousarray(rows, np.float32).reshape(-1, block)
    rotated: Float32Array = (blocks @ hadamard(block)).reshape(rows.shape)
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

    def release(self) -> None:
        self.tensor.release()


def rotated_view(tensor: DenseTensor, block: int = ROTATION_BLOCK) -> DenseTensor:
    """The matrix with its k rotated, as float32."""
    return DenseTensor(tensor.name, tensor.shape, "f32", _RotatedRows(tensor, block))
