"""MXFP4 checkpoints (OCP MX formats; gpt-oss): 4-bit floats e2m1 in blocks of 32 with a power of two as scale.

`X_blocks` uint8 [..., n, k / 32, 16], the low half of a byte first, beside `X_scales` uint8 [..., n, k / 32] with the
exponent plus 127. Leading dimensions (experts) are stacked as rows: the tensor `X` has [... * n, k].
"""

from __future__ import annotations

import math

import numpy as np

from octavo.weights.quantized import QuantizedWeight, Settings, TableParts
from octavo.weights.stored import StoredTensors
from octavo.weights.tensors import TableRows, TableTensor, Tensor
from octavo.weights.unpacking import split_nibbles

NAMES = ("mxfp4",)

# Twice the values of e2m1, which makes them integers; scales are halved.
E2M1_DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
_GROUP = 32


def read(settings: Settings, stored: StoredTensors) -> dict[str, QuantizedWeight]:
    """Every weight that has blocks."""
    return {base: _weight(base, stored) for base in stored.ending("_blocks")}


def _weight(base: str, stored: StoredTensors) -> QuantizedWeight:
    names = (f"{base}_blocks", f"{base}_scales")

    def make() -> Tensor:
        blocks = stored.need(names[0], ("U8",))
        shape = blocks.shape
        if len(shape) < 3 or shape[-1] != _GROUP // 2 or math.prod(shape) == 0:
            raise stored.error(names[0], f"has shape {list(shape)}, expected [..., rows, groups, {_GROUP // 2}]")
        scales = stored.need(names[1], ("U8", "F8_E8M0"), shape[:-1])
        rows, groups = math.prod(shape[:-2]), shape[-2]

        def read_rows(start: int, stop: int) -> TableRows:
            packed = blocks.array.reshape(rows, groups * _GROUP // 2)[start:stop]
            exponents = scales.array.reshape(rows, groups)[start:stop].astype(np.int32)
            if (exponents == 255).any():
                raise stored.error(names[1], "holds an exponent of 255, which stands for no number")
            return TableRows(split_nibbles(packed), np.ldexp(np.float32(1), exponents - 128))

        return TableTensor(
            base,
            (rows, groups * _GROUP),
            "lut4",
            E2M1_DOUBLED,
            _GROUP,
            "f32",
            "MXFP4",
            TableParts((blocks, scales), read_rows),
        )

    return QuantizedWeight(names, make)
