"""What a weight looks like to whoever packs or checks it: dense rows, affine groups of integers, codes of a table.

All kinds are descriptions; bytes are touched only by the read methods, and only those of the rows asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from octavo.errors import WeightsError

__all__ = [
    "AffineReader",
    "AffineRows",
    "AffineTensor",
    "DenseDtype",
    "DenseReader",
    "DenseTensor",
    "Float32Array",
    "StoredReader",
    "StoredRows",
    "TableReader",
    "TableRows",
    "TableTensor",
    "Tensor",
    "Uint8Array",
    "Uint16Array",
    "bf16_to_f32",
    "f32_to_bf16",
]

Float32Array: TypeAlias = npt.NDArray[np.float32]
Uint8Array: TypeAlias = npt.NDArray[np.uint8]
Uint16Array: TypeAlias = npt.NDArray[np.uint16]
Int32Array: TypeAlias = npt.NDArray[np.int32]
DenseDtype: TypeAlias = Literal["f32", "f16", "bf16"]
TableKind: TypeAlias = Literal["lut4", "e4m3", "e5m2"]


class AffineRows(NamedTuple):
    """Some rows of an AffineTensor: one code per byte also when they are 4 bits wide, float32 scales and minima."""

    codes: Uint8Array
    scales: Float32Array
    minimums: Float32Array | None


class TableRows(NamedTuple):
    """Some rows of a TableTensor: one code per byte, float32 scales."""

    codes: Uint8Array
    scales: Float32Array


class StoredRows(NamedTuple):
    """The rows of a tensor as bytes of its file, for native code to read them itself.

    ``kind`` is the layout by its GGUF name (BF16, Q4_1, ...), ``order`` the stored row of each row (there may be more
    stored than there are rows), None for the same. Dense rows of an affine tensor are still to be rounded to its
    groups, ``rotation`` says in which blocks they are to be rotated before (0: they are not).
    """

    kind: str
    bytes: Uint8Array
    order: npt.NDArray[np.int64] | None
    rotation: int = 0


@runtime_checkable
class StoredReader(Protocol):
    """A reader of rows that a mapped file may hold as they are."""

    def stored_rows(self) -> StoredRows | None:
        """The rows as bytes, None where native code cannot read them; whoever has may let go of their pages."""


class DenseReader(Protocol):
    """Where the rows of a DenseTensor come from."""

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        """Rows [start, stop) as float32."""

    def bit_rows(self, start: int, stop: int) -> npt.NDArray[np.uint16] | None:
        """The stored 16-bit patterns of rows [start, stop), or None when they are not stored as such."""

    def release(self) -> None:
        """Give back the memory of the pages that were read."""


class AffineReader(Protocol):
    """Where the rows of an AffineTensor come from."""

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        """Rows [start, stop) as codes, scales and minima."""

    def block_rows(self, start: int, stop: int) -> Uint8Array | None:
        """The stored blocks of rows [start, stop) as bytes [rows, bytes per row], or None when there are none."""

    def release(self) -> None:
        """Give back the memory of the pages that were read."""


class TableReader(Protocol):
    """Where the rows of a TableTensor come from."""

    def table_rows(self, start: int, stop: int) -> TableRows:
        """Rows [start, stop) as codes and scales."""

    def release(self) -> None:
        """Give back the memory of the pages that were read."""


def row_range(name: str, rows: int, start: int, stop: int | None) -> tuple[int, int]:
    """``start`` and ``stop`` checked against the number of rows."""
    last = rows if stop is None else stop
    if not 0 <= start <= last <= rows:
        raise WeightsError(f"tensor {name}: rows [{start}, {last}) asked for, it has {rows}")
    return start, last


@dataclass(frozen=True)
class DenseTensor:
    """A tensor of floating point numbers. Rows are slices of dimension 0 (a 0-dimensional tensor has one)."""

    name: str
    shape: tuple[int, ...]
    dtype: DenseDtype
    reader: DenseReader = field(repr=False, compare=False)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def read_f32(self, start: int = 0, stop: int | None = None) -> Float32Array:
        """Rows [start, stop) as float32; may be a read-only view of the file."""
        start, stop = row_range(self.name, self.rows, start, stop)
        values = self.reader.dense_rows(start, stop)
        return values.reshape((stop - start, *self.shape[1:]) if self.shape else ())

    def read_bf16(self, start: int = 0, stop: int | None = None) -> Uint16Array:
        """Rows [start, stop) as bf16 bit patterns; only of a tensor stored as bf16 (others would be rounded)."""
        return self._bits("bf16", start, stop)

    def read_f16(self, start: int = 0, stop: int | None = None) -> Uint16Array:
        """Rows [start, stop) as f16 bit patterns; only of a tensor stored as f16."""
        return self._bits("f16", start, stop)

    def _bits(self, dtype: DenseDtype, start: int, stop: int | None) -> Uint16Array:
        start, stop = row_range(self.name, self.rows, start, stop)
        bits = self.reader.bit_rows(start, stop) if self.dtype == dtype else None
        if bits is None:
            raise WeightsError(f"tensor {self.name}: is stored as {self.dtype}, {dtype} bits were asked for")
        return bits.reshape((stop - start, *self.shape[1:]) if self.shape else ())

    def stored_rows(self) -> StoredRows | None:
        """The rows as a mapped file holds them; None when they are made as they are read, or native code cannot."""
        return self.reader.stored_rows() if isinstance(self.reader, StoredReader) else None

    def release(self) -> None:
        """Give back the memory of the file's pages read so far; a later read brings them back."""
        self.reader.release()


@dataclass(frozen=True)
class AffineTensor:
    """A matrix of unsigned codes in groups along k: w = scale * (code - zero), plus the group's minimum if it has one.

    ``scale_dtype`` is "f16" when every scale and minimum is exactly an f16; ``exact`` says that the values are the
    file's own. With an ``order`` [k] (GPTQ's act-order) groups are of the rows as ``read`` gives them, whose element j
    is multiplied with element order[j] of the input; ``read_f32`` gives rows in the order of the input all the same.
    """

    name: str
    shape: tuple[int, int]
    bits: Literal[4, 8]
    group: int
    zero: int
    has_minimum: bool
    scale_dtype: Literal["f16", "f32"]
    source: str
    exact: bool
    reader: AffineReader = field(repr=False, compare=False)
    order: Int32Array | None = field(default=None, repr=False, compare=False)

    @property
    def rows(self) -> int:
        return self.shape[0]

    def read(self, start: int = 0, stop: int | None = None) -> AffineRows:
        """Rows [start, stop): codes [rows, k], scales and minima [rows, k / group]."""
        start, stop = row_range(self.name, self.rows, start, stop)
        return self.reader.affine_rows(start, stop)

    def read_f32(self, start: int = 0, stop: int | None = None) -> Float32Array:
        """Rows [start, stop) as float32: one product and one sum, each rounded, as the format's definition has it."""
        codes, scales, minimums = self.read(start, stop)
        rows = codes.shape[0]
        # The format's own order of operations, so that the float32 values are equal to the last bit.
        values = codes.reshape(rows, scales.shape[1], self.group).astype(np.float32)
        if self.zero:
            values -= np.float32(self.zero)
        with np.errstate(invalid="ignore", over="ignore"):
            values *= scales[:, :, None]
            if minimums is not None:
                values += minimums[:, :, None]
        flat = values.reshape(rows, self.shape[1])
        if self.order is None:
            return flat
        placed = np.empty_like(flat)
        placed[:, self.order] = flat
        return placed

    @property
    def has_raw_blocks(self) -> bool:
        """Whether raw_blocks() is to be had; ``source`` then names the layout of the blocks."""
        return self.reader.block_rows(0, 0) is not None

    def raw_blocks(self, start: int = 0, stop: int | None = None) -> Uint8Array:
        """Rows [start, stop) as the file's blocks, bytes [rows, bytes per row]; ``source`` names their layout."""
        start, stop = row_range(self.name, self.rows, start, stop)
        blocks = self.reader.block_rows(start, stop)
        if blocks is None:
            raise WeightsError(f"tensor {self.name}: {self.source} was made by octavo and has no stored blocks")
        return blocks

    def stored_rows(self) -> StoredRows | None:
        """The rows as a mapped file holds them; None when they are made as they are read, or native code cannot."""
        return self.reader.stored_rows() if isinstance(self.reader, StoredReader) else None

    def release(self) -> None:
        """Give back the memory of the file's pages read so far; a later read brings them back."""
        self.reader.release()


@dataclass(frozen=True)
class TableTensor:
    """A matrix of codes that stand for the numbers of a table, in groups along k: w = scale * table[code].

    "lut4": 4-bit codes into 16 numbers of the format's own; "e4m3" and "e5m2": the 256 bytes of an 8-bit float, codes
    that are not finite refused as they are read.
    """

    name: str
    shape: tuple[int, int]
    kind: TableKind
    table: tuple[float, ...]
    group: int
    scale_dtype: Literal["f16", "f32"]
    source: str
    reader: TableReader = field(repr=False, compare=False)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def bits(self) -> Literal[4, 8]:
        """Bits of a code."""
        return 4 if self.kind == "lut4" else 8

    def read(self, start: int = 0, stop: int | None = None) -> TableRows:
        """Rows [start, stop): codes [rows, k], scales [rows, k / group], a last group that is not whole among them."""
        start, stop = row_range(self.name, self.rows, start, stop)
        return self.reader.table_rows(start, stop)

    def read_f32(self, start: int = 0, stop: int | None = None) -> Float32Array:
        """Rows [start, stop) as float32: one product, rounded."""
        codes, scales = self.read(start, stop)
        values = np.asarray(self.table, np.float32)[codes]
        with np.errstate(invalid="ignore", over="ignore"):
            values *= np.repeat(scales, self.group, axis=1)[:, : self.shape[1]]
        return values

    def stored_rows(self) -> StoredRows | None:
        """None: no layout of these is one that native code reads."""
        return None

    def release(self) -> None:
        """Give back the memory of the file's pages read so far; a later read brings them back."""
        self.reader.release()


Tensor: TypeAlias = DenseTensor | AffineTensor | TableTensor


def bf16_to_f32(bits: Uint16Array) -> Float32Array:
    """bf16 bit patterns widened to float32, exactly."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def f32_to_bf16(values: Float32Array) -> Uint16Array:
    """float32 rounded to the nearest bf16 bit pattern, ties to even; NaN stays NaN (quiet, sign kept)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        rounded = np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return rounded.astype(np.uint16)
