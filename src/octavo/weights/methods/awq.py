"""AWQ checkpoints (arXiv 2306.00978) in AutoAWQ's "gemm" layout: 4-bit codes with a zero point for each group.

qweight int32 [k, n / 8], qzeros int32 [groups, n / 8], scales f16 [groups, n]: a word holds the codes of eight
neighbouring columns, its nibbles from the lowest up those of columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.weights.quantized import AffineParts, QuantizedWeight, Settings, affine_rows
from octavo.weights.stored import StoredTensors
from octavo.weights.tensors import AffineRows, AffineTensor, Tensor, Uint8Array
from octavo.weights.unpacking import column_bytes

NAMES = ("awq",)

_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOATS = ("F16", "BF16", "F32")


def read(settings: Settings, stored: StoredTensors) -> dict[str, QuantizedWeight]:
    """Every weight that has a qweight."""
    for name in ("bits", "w_bit"):
        settings.require(name, (4,))
    for name in ("version", "format"):
        settings.require(name, ("gemm",))
    settings.require("zero_point", (True,))
    group = settings.group_size("group_size", settings.group_size("q_group_size", 128))
    return {f"{base}.weight": _weight(base, stored, group) for base in stored.ending(".qweight")}


def _weight(base: str, stored: StoredTensors, group: int) -> QuantizedWeight:
    parts = tuple(f"{base}.{part}" for part in ("qweight", "qzeros", "scales"))

    def make() -> Tensor:
        qweight = stored.need(parts[0], ("I32",), (None, None))
        k, words = qweight.shape
        size = k if group == -1 else min(group, k)
        if k == 0 or words == 0 or k % size:
            raise stored.error(parts[0], f"has {k} rows, which do not divide into groups of {size}")
        qzeros = stored.need(parts[1], ("I32",), (k // size, words))
        scales = stored.need(parts[2], _FLOATS, (k // size, 8 * words))

        def rows(start: int, stop: int) -> AffineRows:
            codes, zeros = _codes(qweight.array, start, stop), _codes(qzeros.array, start, stop)
            return affine_rows(codes, np.ascontiguousarray(scales.finite_f32(np.s_[:, start:stop]).T), zeros)

        return AffineTensor(
            f"{base}.weight",
            (8 * words, k),
            4,
            size,
            0,
            True,
            "f32",
            f"AWQ 4-bit group {size}",
            True,
            AffineParts((qweight, qzeros, scales), rows),
        )

    return QuantizedWeight(parts, make)


def _codes(words: npt.NDArray[Any], start: int, stop: int) -> Uint8Array:
    """Columns [start, stop) of a packed matrix [m, n / 8] as rows of codes [stop - start, m]."""
    first, last = start // 8, -(-stop // 8)
    packed = column_bytes(words, first, last).reshape(last - first, words.shape[0], 4)
    codes = np.empty((last - first, 8, words.shape[0]), np.uint8)
    for byte in range(4):
        codes[:, _COLUMNS[2 * byte]] = packed[:, :, byte] & 15
        codes[:, _COLUMNS[2 * byte + 1]] = packed[:, :, byte] >> 4
    return codes.reshape(8 * (last - first), words.shape[0])[start - 8 * first : stop - 8 * first]
