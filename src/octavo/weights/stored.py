"""Stored tensors as arrays, before anybody says what they mean: the parts that quantised weights are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import WeightsError
from octavo.weights.mapped_file import MappedFile
from octavo.weights.tensors import Float32Array, bf16_to_f32

__all__ = ["StoredArray", "StoredTensors"]

_DTYPES = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8", "I64": "<i8", "U64": "<u8", "I32": "<i4", "U32": "<u4",
    "I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "u1", "F8_E4M3": "u1", "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}  # fmt: skip


@dataclass(frozen=True)
class StoredArray:
    """One tensor of a safetensors file; ``dtype`` is the format's name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: MappedFile
    start: int

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * np.dtype(_DTYPES[self.dtype]).itemsize

    @property
    def array(self) -> npt.NDArray[Any]:
        """The whole of it as a view of the file, perhaps at an odd address; bf16 and 8-bit floats are their bits."""
        raw = self.file.bytes[self.start : self.start + self.nbytes]
        return raw.view(_DTYPES[self.dtype]).reshape(self.shape)

    def read_f32(self, where: Any = ...) -> Float32Array:
        """A floating point tensor, or what `where` picks of it, as float32, exactly; E8M0 are powers of two."""
        values = self.array[where]
        if self.dtype == "BF16":
            return bf16_to_f32(np.ascontiguousarray(values))
        if self.dtype == "F8_E8M0":
            powers: Float32Array = np.ldexp(np.float32(1), values.astype(np.int32) - 127)
            powers[values == 255] = np.nan
            return powers
        if self.dtype not in ("F32", "F16"):
            raise WeightsError(f"tensor {self.name}: has dtype {self.dtype}, expected F32, F16 or BF16")
        found: Float32Array = values.astype(np.float32)
        return found

    def finite_f32(self, where: Any = ...) -> Float32Array:
        """As read_f32; a NaN or an infinity among scales is refused."""
        values = self.read_f32(where)
        if not np.isfinite(values).all():
            raise WeightsError(f"tensor {self.name}: holds a number that is not finite")
        return values

    def release(self) -> None:
        """Let go of its pages."""
        self.file.release(self.start, self.start + self.nbytes)


class StoredTensors(Mapping[str, StoredArray]):
    """All tensors of a checkpoint by name; `find` makes one of them."""

    def __init__(self, where: str, names: Collection[str], find: Callable[[str], StoredArray]) -> None:
        self.where = where
        self._names = dict.fromkeys(names)
        self._find = find

    def __getitem__(self, name: str) -> StoredArray:
        if name not in self._names:
            raise KeyError(name)
        return self._find(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def error(self, name: str, reason: str) -> WeightsError:
        """The error for a tensor."""
        return WeightsError(f"{self.where}: tensor {name[:200]!r} {reason}")

    def need(self, name: str, dtypes: Collection[str], shape: tuple[int | None, ...] | None = None) -> StoredArray:
        """The tensor, which must exist in one of these dtypes and this shape (None: any size)."""
        if name not in self._names:
            raise self.error(name, "is missing; the quantised weight cannot be read without it")
        found = self._find(name)
        if found.dtype not in dtypes:
            raise self.error(name, f"has dtype {found.dtype}, expected {' or '.join(sorted(dtypes))}")
        if shape is not None:
            fits = len(found.shape) == len(shape) and all(
                want in (None, have) for want, have in zip(shape, found.shape, strict=True)
            )
            if not fits:
                wanted = ["any" if size is None else size for size in shape]
                raise self.error(name, f"has shape {list(found.shape)}, expected {wanted}")
        return found

    def ending(self, suffix: str) -> list[str]:
        """What comes before `suffix` in every name that ends with it."""
        return [name.removesuffix(suffix) for name in self._names if name.endswith(suffix)]
