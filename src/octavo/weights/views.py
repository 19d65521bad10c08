"""Readers shared by the formats: dense rows of a mapped file, and the dense values of a quantised tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.weights.mapped_file import MappedFile
from octavo.weights.tensors import (
    AffineTensor,
    DenseDtype,
    DenseTensor,
    Float32Array,
    StoredRows,
    TableTensor,
    Tensor,
    Uint16Array,
    bf16_to_f32,
)

__all__ = ["DequantizedRows", "MappedRows", "dequantized_view"]


@dataclass(frozen=True)
class MappedRows:
    """The rows of a dense tensor inside a mapped file."""

    file: MappedFile
    start: int
    row_elements: int
    dtype: DenseDtype
    rows: int

    def _stored(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[Any]]:
        element = np.dtype("<f4" if self.dtype == "f32" else "<u2")
        size = self.row_elements * element.itemsize
        raw = self.file.bytes[self.start + start * size : self.start + stop * size]
        values = raw.view(element).reshape(stop - start, self.row_elements)
        # A header may leave the data at an odd address, which native code must not be given.
        return values if values.flags.aligned else values.copy()

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        stored = self._stored(start, stop)
        if self.dtype == "f32":
            return stored
        if self.dtype == "f16":
            with np.errstate(invalid="ignore"):  # signalling NaN patterns are data like any other
                widened: Float32Array = stored.view(np.float16).astype(np.float32)
            return widened
        return bf16_to_f32(stored)

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        return None if self.dtype == "f32" else self._stored(start, stop)

    def stored_rows(self) -> StoredRows:
        size = self.rows * self.row_elements * (4 if self.dtype == "f32" else 2)
        return StoredRows(self.dtype.upper(), self.file.bytes[self.start : self.start + size], None)

    def split(self, parts: int) -> MappedRows:
        """The same numbers as rows that many times shorter."""
        return MappedRows(self.file, self.start, self.row_elements // parts, self.dtype, self.rows * parts)

    def release(self) -> None:
        size = self.row_elements * (4 if self.dtype == "f32" else 2)
        self.file.release(self.start, self.start + self.rows * size)


@dataclass(frozen=True)
class DequantizedRows:
    """The values of a quantised tensor; ``vector`` when its single row is the whole of a 1-dimensional tensor."""

    affine: AffineTensor | TableTensor
    vector: bool = False

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        if self.vector:
            return self.affine.read_f32().reshape(-1)[start:stop]
        return self.affine.read_f32(start, stop)

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        return None

    def release(self) -> None:
        self.affine.release()


def dequantized_view(tensor: Tensor) -> DenseTensor:
    """The tensor as dense float32 rows, dequantised as they are read; a dense tensor is returned as it is."""
    if isinstance(tensor, DenseTensor):
        return tensor
    return DenseTensor(tensor.name, tensor.shape, "f32", DequantizedRows(tensor))
