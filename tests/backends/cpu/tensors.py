"""Tensors made from arrays, as a checkpoint would describe them, and a checkpoint of such tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.weights.tensors import AffineRows, AffineTensor, DenseTensor, Tensor, f32_to_bf16

Array = NDArray[Any]


@dataclass
class DenseArray:
    """Rows of an array; counts what was read, and whether it was released."""

    values: Array
    dtype: str
    reads: list[tuple[int, int]] = field(default_factory=list)
    released: int = 0

    def dense_rows(self, start: int, stop: int) -> Array:
        self.reads.append((start, stop))
        return self.values[start:stop]

    def bit_rows(self, start: int, stop: int) -> Array | None:
        self.reads.append((start, stop))
        rows = self.values[start:stop]
        return {"bf16": f32_to_bf16, "f16": lambda x: x.astype(np.float16).view(np.uint16)}[self.dtype](rows)

    def release(self) -> None:
        self.released += 1


@dataclass
class AffineArray:
    """Rows of codes with their scales and minima."""

    codes: Array
    scales: Array
    minimums: Array | None

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        minimums = None if self.minimums is None else self.minimums[start:stop]
        return AffineRows(self.codes[start:stop], self.scales[start:stop], minimums)

    def block_rows(self, start: int, stop: int) -> None:
        return None

    def release(self) -> None:
        pass


def dense(values: Array, dtype: Any = "f32", name: str = "dense") -> DenseTensor:
    return DenseTensor(name, values.shape, dtype, DenseArray(np.asarray(values, np.float32), dtype))


@dataclass(frozen=True)
class Kind:
    """A type of affine tensor, as GGUF has them."""

    bits: Any
    group: int
    zero: int
    has_minimum: bool = False
    scale_dtype: Any = "f16"

    def tensor(self, rows: int, k: int, seed: int = 0, name: str = "affine") -> AffineTensor:
        """Random codes and scales; group 0 is one group for all of k."""
        rng = np.random.default_rng(seed)
        group = self.group or k
        codes = rng.integers(0, 1 << self.bits, (rows, k), dtype=np.uint8)
        scales = (rng.uniform(0.5, 2, (rows, k // group)) / (1 << self.bits)).astype(np.float32)
        minimums = rng.standard_normal((rows, k // group)).astype(np.float32) if self.has_minimum else None
        if self.scale_dtype == "f16":
            scales = scales.astype(np.float16).astype(np.float32)
            minimums = None if minimums is None else minimums.astype(np.float16).astype(np.float32)
        reader = AffineArray(codes, scales, minimums)
        return AffineTensor(
            name, (rows, k), self.bits, group, self.zero, self.has_minimum, self.scale_dtype, str(self), True, reader
        )


Q4_0, Q4_1 = Kind(4, 32, 8), Kind(4, 32, 0, True)
Q8_0, Q6_K = Kind(8, 32, 128), Kind(8, 16, 128, False, "f32")
Q4_K, Q5_K = Kind(4, 32, 0, True, "f32"), Kind(8, 32, 0, True, "f32")


@dataclass(frozen=True)
class Source:
    """A checkpoint of given tensors."""

    tensors: Mapping[str, Tensor]

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]
