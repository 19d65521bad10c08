"""How the tensors of GGUF files are read: blocks as affine rows, plain numbers, numbers rounded or shifted as read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from octavo.errors import WeightsError
from octavo.weights.gguf_blocks import BLOCK_FORMATS, DENSE_TYPES, BlockFormat
from octavo.weights.gguf_file import GgufFile, TensorInfo
from octavo.weights.mapped_file import MappedFile
from octavo.weights.tensors import (
    AffineRows,
    AffineTensor,
    DenseReader,
    DenseTensor,
    Float32Array,
    StoredRows,
    Tensor,
    Uint8Array,
    Uint16Array,
    f32_to_bf16,
)
from octavo.weights.views import DequantizedRows, MappedRows

__all__ = ["gguf_tensor", "latent_expansion", "row_view", "shifted_view"]


@dataclass(frozen=True)
class BlockRows:
    """The rows of a quantised tensor in a mapped file."""

    file: MappedFile
    start: int
    rows: int
    row_bytes: int
    format: BlockFormat

    @property
    def _stored(self) -> Uint8Array:
        return self.file.bytes[self.start : self.start + self.rows * self.row_bytes]

    def block_rows(self, start: int, stop: int) -> Uint8Array:
        return self._stored.reshape(self.rows, self.row_bytes)[start:stop]

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        return self.format.unpack_rows(self.block_rows(start, stop))

    def stored_rows(self) -> StoredRows | None:
        return StoredRows(self.format.name, self._stored, None) if self.format.native else None

    def release(self) -> None:
        self.file.release(self.start, self.start + self.rows * self.row_bytes)


@dataclass(frozen=True)
class RoundedDoubles:
    """The rows of a tensor of float64, rounded to float32 as they are read."""

    file: MappedFile
    start: int
    row_elements: int
    rows: int

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        size = 8 * self.row_elements
        raw = self.file.bytes[self.start + start * size : self.start + stop * size]
        with np.errstate(over="ignore", invalid="ignore"):  # what is too large becomes infinite, as numbers do
            rounded: Float32Array = raw.view("<f8").reshape(stop - start, self.row_elements).astype(np.float32)
        return rounded

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        return None

    def release(self) -> None:
        self.file.release(self.start, self.start + 8 * self.row_elements * self.rows)


@dataclass(frozen=True)
class ShiftedRows:
    """The rows of a dense tensor plus a number."""

    reader: DenseReader
    shift: np.float32

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        return self.reader.dense_rows(start, stop) + self.shift

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        return None

    def release(self) -> None:
        self.reader.release()


@dataclass(frozen=True)
class OneRow:
    """A vector as the single row of a matrix."""

    vector: DenseTensor

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        return self.vector.read_f32().reshape(1, -1)[start:stop]

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        bits = self.vector.reader.bit_rows(0, self.vector.rows)
        return None if bits is None else bits.reshape(1, -1)[start:stop]

    def release(self) -> None:
        self.vector.release()


def row_view(tensor: DenseTensor) -> DenseTensor:
    """A vector as a matrix of one row."""
    return DenseTensor(tensor.name, (1, tensor.shape[0]), tensor.dtype, OneRow(tensor))


@dataclass(frozen=True)
class LatentExpansion:
    """The matrix that expands latent vectors to keys and values, of the two stacks that llama.cpp makes of it.

    ``keys`` is [heads, rank, key size], transposed for what it is used for there; ``values`` is [heads, value size,
    rank]. The rows of a head are those of its keys, then those of its values.
    """

    keys: Tensor
    values: Tensor
    heads: int
    rank: int
    sizes: tuple[int, int]

    @staticmethod
    def _matrix(stack: Tensor, head: int, rows: int, columns: int) -> Float32Array:
        if isinstance(stack, DenseTensor):
            return stack.read_f32(head, head + 1).reshape(rows, columns)
        return stack.read_f32(head * rows, (head + 1) * rows)

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        period = sum(self.sizes)
        first, last = start // period, -(-stop // period)
        pieces = []
        for head in range(first, last):
            pieces.append(self._matrix(self.keys, head, self.rank, self.sizes[0]).T)
            pieces.append(self._matrix(self.values, head, self.sizes[1], self.rank))
        rows = np.concatenate(pieces) if pieces else np.empty((0, self.rank), np.float32)
        return rows[start - first * period : stop - first * period]

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        return f32_to_bf16(self.dense_rows(start, stop))

    def release(self) -> None:
        self.keys.release()
        self.values.release()


def latent_expansion(name: str, keys: TensorInfo, values: TensorInfo, stacks: tuple[Tensor, Tensor]) -> DenseTensor:
    """The two stacks as one matrix; of quantised ones the values, since their groups lie across its rows."""
    shapes = (keys.shape, values.shape)
    fits = len(keys.shape) == len(values.shape) == 3
    if not fits or (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
        raise WeightsError(f"tensors {keys.name!r} and {values.name!r} of shapes {shapes} do not belong together")
    heads, rank, key_size = keys.shape
    exact = keys.type == values.type == "BF16"
    reader = LatentExpansion(*stacks, heads, rank, (key_size, values.shape[1]))
    return DenseTensor(name, (heads * sum(reader.sizes), rank), "bf16" if exact else "f32", reader)


def shifted_view(tensor: Tensor, shift: float) -> DenseTensor:
    """A dense tensor plus a number, as float32."""
    if not isinstance(tensor, DenseTensor):
        raise WeightsError(f"tensor {tensor.name}: is a quantised matrix where the weights of a norm are expected")
    return DenseTensor(tensor.name, tensor.shape, "f32", ShiftedRows(tensor.reader, np.float32(shift)))


def gguf_tensor(file: GgufFile, info: TensorInfo, name: str) -> Tensor:
    """A tensor of a file under the name a model knows it by.

    A quantised stack of matrices is one matrix of all their rows; a quantised vector is dense.
    """
    rows = math.prod(info.shape[:-1]) if len(info.shape) > 1 else info.shape[0]
    if info.type in DENSE_TYPES:
        elements = math.prod(info.shape[1:])
        dtype = DENSE_TYPES[info.type]
        if info.type == "F64":
            return DenseTensor(name, info.shape, dtype, RoundedDoubles(file.file, info.start, elements, info.shape[0]))
        return DenseTensor(name, info.shape, dtype, MappedRows(file.file, info.start, elements, dtype, info.shape[0]))
    block = BLOCK_FORMATS[info.type]
    vector, k = len(info.shape) == 1, info.shape[-1]
    count = 1 if vector else rows
    affine = AffineTensor(
        name,
        (count, k),
        block.bits,
        block.group,
        block.zero,
        block.has_minimum,
        block.scale_dtype,
        block.name,
        True,
        BlockRows(file.file, info.start, count, k // block.block_values * block.block_bytes, block),
    )
    return DenseTensor(name, info.shape, "f32", DequantizedRows(affine, vector=True)) if vector else affine
