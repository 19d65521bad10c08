"""Tensors made of parts of others: rows picked, a matrix of a stack, a transpose, a multiple; read when asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from octavo.errors import WeightsError
from octavo.weights.tensors import (
    AffineReader,
    AffineRows,
    AffineTensor,
    DenseDtype,
    DenseReader,
    DenseTensor,
    Float32Array,
    StoredReader,
    StoredRows,
    TableReader,
    TableRows,
    TableTensor,
    Tensor,
    Uint8Array,
    Uint16Array,
    bf16_to_f32,
)
from octavo.weights.views import MappedRows

__all__ = [
    "RowOrder",
    "matrix_of_stack",
    "picked_view",
    "row_lengths",
    "scaled_view",
    "shifted_view",
    "transposed_view",
    "unit_rows_view",
]

RowOrder = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _PickedDense:
    """The rows `order` of a dense tensor of `rows` rows."""

    reader: DenseReader
    rows: int
    order: RowOrder

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        first, last, places = _span(self.order[start:stop])
        rows = self.reader.dense_rows(first, last)
        return rows if places is None else rows[places]

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        first, last, places = _span(self.order[start:stop])
        rows = self.reader.bit_rows(first, last)
        return rows if places is None or rows is None else rows[places]

    def stored_rows(self) -> StoredRows | None:
        return _picked_stored(self.reader, self.rows, self.order)

    def release(self) -> None:
        self.reader.release()


@dataclass(frozen=True)
class _PickedAffine:
    """The rows `order` of a quantised tensor of `rows` rows."""

    reader: AffineReader
    rows: int
    order: RowOrder

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        first, last, places = _span(self.order[start:stop])
        read = self.reader.affine_rows(first, last)
        if places is None:
            return read
        minimums = None if read.minimums is None else read.minimums[places]
        return AffineRows(read.codes[places], read.scales[places], minimums)

    def block_rows(self, start: int, stop: int) -> Uint8Array | None:
        first, last, places = _span(self.order[start:stop])
        blocks = self.reader.block_rows(first, last)
        return blocks if places is None or blocks is None else blocks[places]

    def stored_rows(self) -> StoredRows | None:
        return _picked_stored(self.reader, self.rows, self.order)

    def release(self) -> None:
        self.reader.release()


@dataclass(frozen=True)
class _PickedTable:
    """The rows `order` of a tensor of table codes."""

    reader: TableReader
    order: RowOrder

    def table_rows(self, start: int, stop: int) -> TableRows:
        first, last, places = _span(self.order[start:stop])
        read = self.reader.table_rows(first, last)
        return read if places is None else TableRows(read.codes[places], read.scales[places])

    def release(self) -> None:
        self.reader.release()


def _span(order: RowOrder) -> tuple[int, int, RowOrder | None]:
    """The run of stored rows that holds these, and the place of each in it (None: they are that run)."""
    if not order.size:
        return 0, 0, None
    first, last = int(order.min()), int(order.max()) + 1
    places = order - first
    same = last - first == order.size and bool((places == np.arange(order.size)).all())
    return first, last, None if same else places


def _picked_stored(reader: object, rows: int, order: RowOrder) -> StoredRows | None:
    """The bytes that hold the rows of a pick, for native code to read; None where the reader has no such."""
    stored = reader.stored_rows() if isinstance(reader, StoredReader) else None
    if stored is None:
        return None
    first, last, places = _span(order)
    if stored.order is None and places is None:
        # Of a run of rows, only their own bytes.
        size = stored.bytes.size // rows
        return StoredRows(stored.kind, stored.bytes[first * size : last * size], None)
    return stored._replace(order=order if stored.order is None else stored.order[order])


def picked_view(tensor: Tensor, order: RowOrder) -> Tensor:
    """The rows `order` of a tensor, in that order: exactly the stored ones, also of a quantised tensor."""
    if isinstance(tensor, AffineTensor):
        picked = _PickedAffine(tensor.reader, tensor.rows, order)
        return replace(tensor, shape=(order.size, tensor.shape[1]), reader=picked)
    if isinstance(tensor, TableTensor):
        return replace(tensor, shape=(order.size, tensor.shape[1]), reader=_PickedTable(tensor.reader, order))
    rows = _PickedDense(tensor.reader, tensor.rows, order)
    return replace(tensor, shape=(order.size, *tensor.shape[1:]), reader=rows)


@dataclass(frozen=True)
class _SplitRows:
    """The rows of a dense tensor, each cut into `parts` rows."""

    reader: DenseReader
    parts: int

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        first, last = start // self.parts, -(-stop // self.parts)
        rows = self.reader.dense_rows(first, last).reshape((last - first) * self.parts, -1)
        return rows[start - first * self.parts : stop - first * self.parts]

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        first, last = start // self.parts, -(-stop // self.parts)
        rows = self.reader.bit_rows(first, last)
        if rows is None:
            return None
        return rows.reshape((last - first) * self.parts, -1)[start - first * self.parts : stop - first * self.parts]

    def release(self) -> None:
        self.reader.release()


def matrix_of_stack(tensor: Tensor, shape: tuple[int, ...], index: int) -> Tensor:
    """Entry `index` of a stack of `shape`, as a tensor of its own; a quantised stack is one matrix of all its rows."""
    rows = shape[1]
    order = np.arange(index * rows, (index + 1) * rows, dtype=np.int64)
    if isinstance(tensor, AffineTensor | TableTensor):
        return picked_view(tensor, order)
    reader = tensor.reader
    split = reader.split(rows) if isinstance(reader, MappedRows) else _SplitRows(reader, rows)
    return picked_view(replace(tensor, shape=(shape[0] * rows, *shape[2:]), reader=split), order)


@dataclass(frozen=True)
class _TransposedRows:
    """The columns of a dense matrix of `rows` rows. Patterns of 16 bits are turned as such: none is widened in vain."""

    reader: DenseReader
    rows: int
    dtype: DenseDtype

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        bits = self.bit_rows(start, stop)
        if bits is None:
            return np.ascontiguousarray(self.reader.dense_rows(0, self.rows)[:, start:stop].T)
        if self.dtype == "bf16":
            return bf16_to_f32(bits)
        with np.errstate(invalid="ignore"):  # signalling NaN patterns are data like any other
            widened: Float32Array = bits.view(np.float16).astype(np.float32)
        return widened

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        bits = None if self.dtype == "f32" else self.reader.bit_rows(0, self.rows)
        return None if bits is None else np.ascontiguousarray(bits[:, start:stop].T)

    def release(self) -> None:
        self.reader.release()


def transposed_view(tensor: Tensor) -> DenseTensor:
    """The transpose of a dense matrix. Groups of a quantised one would lie across its rows: refused by name."""
    if isinstance(tensor, AffineTensor | TableTensor):
        raise WeightsError(
            f"tensor {tensor.name}: is quantised ({tensor.source}) along what its model multiplies by as columns; "
            "only unquantised tensors can be transposed"
        )
    rows, columns = tensor.shape
    return replace(tensor, shape=(columns, rows), reader=_TransposedRows(tensor.reader, rows, tensor.dtype))


@dataclass(frozen=True)
class _ScaledDense:
    """The rows of a dense tensor, times a number."""

    tensor: DenseTensor
    factor: np.float32

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        return self.tensor.reader.dense_rows(start, stop) * self.factor

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        return None

    def release(self) -> None:
        self.tensor.release()


@dataclass(frozen=True)
class _ScaledAffine:
    """The rows of a quantised tensor, times a number: the same codes, other scales and minima."""

    tensor: AffineTensor
    factor: np.float32

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        codes, scales, minimums = self.tensor.read(start, stop)
        return AffineRows(codes, scales * self.factor, None if minimums is None else minimums * self.factor)

    def block_rows(self, start: int, stop: int) -> Uint8Array | None:
        return None

    def release(self) -> None:
        self.tensor.release()


@dataclass(frozen=True)
class _ScaledTable:
    """The rows of a tensor of table codes, times a number: other scales."""

    reader: TableReader
    factor: np.float32

    def table_rows(self, start: int, stop: int) -> TableRows:
        codes, scales = self.reader.table_rows(start, stop)
        return TableRows(codes, scales * self.factor)

    def release(self) -> None:
        self.reader.release()


def scaled_view(tensor: Tensor, factor: float) -> Tensor:
    """The tensor times a number, as float32; of a quantised one the scales are what is multiplied, exactly by 2^n."""
    number = np.float32(factor)
    if isinstance(tensor, AffineTensor):
        exact = tensor.exact and float(np.frexp(number)[0]) in (0.5, -0.5)
        return replace(tensor, scale_dtype="f32", exact=exact, reader=_ScaledAffine(tensor, number))
    if isinstance(tensor, TableTensor):
        return replace(tensor, scale_dtype="f32", reader=_ScaledTable(tensor.reader, number))
    return DenseTensor(tensor.name, tensor.shape, "f32", _ScaledDense(tensor, number))


@dataclass(frozen=True)
class _ShiftedDense:
    """The rows of a dense tensor with one row added to each."""

    reader: DenseReader
    added: Float32Array

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        shifted: Float32Array = self.reader.dense_rows(start, stop) + self.added
        return shifted

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        return None

    def release(self) -> None:
        self.reader.release()


def shifted_view(tensor: DenseTensor, added: Float32Array) -> DenseTensor:
    """The matrix with a row added to each of its rows, in float32."""
    return replace(tensor, dtype="f32", reader=_ShiftedDense(tensor.reader, added))


def row_lengths(rows: Float32Array) -> Float32Array:
    """The Euclidean length of each row, 1e-12 at least (as torch's normalize has it), as float32."""
    squares = np.square(rows, dtype=np.float32).sum(axis=1, dtype=np.float32)
    lengths: Float32Array = np.maximum(np.sqrt(squares), np.float32(1e-12))
    return lengths


@dataclass(frozen=True)
class _UnitDense:
    """The rows of a matrix, each divided by its length."""

    tensor: DenseTensor | TableTensor

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        rows = self.tensor.read_f32(start, stop)
        divided: Float32Array = rows / row_lengths(rows)[:, None]
        return divided

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        return None

    def release(self) -> None:
        self.tensor.release()


@dataclass(frozen=True)
class _UnitAffine:
    """The rows of a quantised matrix, each divided by its length: the same codes, other scales and minima."""

    tensor: AffineTensor

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        codes, scales, minimums = self.tensor.read(start, stop)
        lengths = row_lengths(self.tensor.read_f32(start, stop))[:, None]
        return AffineRows(codes, scales / lengths, None if minimums is None else minimums / lengths)

    def block_rows(self, start: int, stop: int) -> Uint8Array | None:
        return None

    def release(self) -> None:
        self.tensor.release()


def unit_rows_view(tensor: Tensor) -> Tensor:
    """The matrix with every row divided by its length."""
    if isinstance(tensor, AffineTensor):
        return replace(tensor, scale_dtype="f32", reader=_UnitAffine(tensor))
    return DenseTensor(tensor.name, tensor.shape, "f32", _UnitDense(tensor))
