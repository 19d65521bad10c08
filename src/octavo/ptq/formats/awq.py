"""The AWQ layout (gemm): codes and zero points packed along the outputs, eight to a word in an interleaved order.

qweight int32 [k, out / 8], qzeros int32 [groups, out / 8], scales f16 [groups, out], as AutoAWQ writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.ptq.formats.bits import pack_words
from octavo.ptq.formats.layout import Stored, WrittenTensor, module_of
from octavo.ptq.grid import QuantizedMatrix, ScaleDtype
from octavo.ptq.settings import QuantizeSettings

__all__ = ["AwqLayout"]

# Which of eight neighbouring outputs is in each nibble of a word, from the lowest.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AwqLayout:
    """See `octavo.ptq.formats.layout.Layout`."""

    scale_dtype: ScaleDtype = "f16"
    torch_dtype: str | None = "float16"

    def check(self, name: str, shape: tuple[int, int], group: int) -> None:
        if shape[0] % 8:
            raise ConfigError(f"tensor {name}: has {shape[0]} outputs; the awq layout needs a multiple of 8")

    def pack(self, name: str, matrix: QuantizedMatrix, input_scale: float | None) -> Stored:
        module, grid = module_of(name), matrix.grid
        return {
            f"{module}.qweight": WrittenTensor("I32", _interleaved(matrix.codes.T)),
            f"{module}.qzeros": WrittenTensor("I32", _interleaved(grid.zeros.T)),
            f"{module}.scales": WrittenTensor("F16", np.ascontiguousarray(grid.scales.T.astype(np.float16))),
        }

    def config(self, settings: QuantizeSettings, ignored: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "bits": settings.bits,
            "group_size": settings.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(ignored) or None,
        }


def _interleaved(codes: NDArray[Any]) -> NDArray[np.int32]:
    """Codes [rows, outputs] in words [rows, outputs / 8]."""
    rows, outputs = codes.shape
    eights = codes.reshape(rows, outputs // 8, 8)[:, :, list(_ORDER)]
    return pack_words(eights.reshape(rows, outputs), 4)
