"""8-bit floats (OCP FP8: e4m3 without infinities, e5m2 with): their 256 values, and tensors of them with scales."""

from __future__ import annotations

from functools import cache
from typing import Literal

import numpy as np

from octavo.weights.quantized import TableParts
from octavo.weights.stored import StoredArray, StoredTensors
from octavo.weights.tensors import Float32Array, TableRows, TableTensor

__all__ = ["FLOAT8_DTYPES", "float8_table", "float8_tensor"]

Kind = Literal["e4m3", "e5m2"]
FLOAT8_DTYPES: dict[str, Kind] = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
_FLOATS = ("F32", "F16", "BF16")


@cache
def float8_table(kind: Kind) -> tuple[float, ...]:
    """What each byte stands for."""
    codes = np.arange(256)
    mantissa_bits, bias = (3, 7) if kind == "e4m3" else (2, 15)
    magnitude = codes & 0x7F
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    values = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    if kind == "e4m3":
        values = np.where(magnitude == 0x7F, np.nan, values)
    else:
        values = np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), values)
    return tuple(float(value) for value in np.where(codes & 0x80, -values, values))


def float8_tensor(
    stored: StoredTensors, name: str, weight: StoredArray, scale: StoredArray, block: tuple[int, int] | None
) -> TableTensor:
    """The matrix `weight` [n, k] times its scales, by the shape of `scale`.

    One number: for all of it. [n] or [n, 1]: for each row. [n, groups]: for each group of a row. With a `block` of rows
    and columns, [n / rows, k / columns]: for each block.
    """
    rows, k = weight.shape
    kind = FLOAT8_DTYPES[weight.dtype]
    if scale.dtype not in _FLOATS:
        raise stored.error(scale.name, f"has dtype {scale.dtype}, expected {' or '.join(_FLOATS)}")
    high, wide = (rows, k) if block is None else (min(block[0], rows), min(block[1], k))
    shape = scale.shape
    if block is None and shape in ((), (1,), (1, 1)):
        groups = 1
    elif block is None and shape in ((rows,), (rows, 1)):
        groups, high = 1, 1
    elif block is None and len(shape) == 2 and shape[0] == rows and shape[1] > 0 and k % shape[1] == 0:
        groups, high, wide = shape[1], 1, k // shape[1]
    elif block is not None and shape == (-(-rows // high), -(-k // wide)):
        groups = shape[1]
    else:
        blocks = "" if block is None else f" in blocks of {block[0]} x {block[1]}"
        raise stored.error(scale.name, f"has shape {list(shape)}, which fits no scale of {rows} x {k}{blocks}")
    table = np.asarray(float8_table(kind), np.float32)
    finite = np.isfinite(table)

    def scales(start: int, stop: int) -> Float32Array:
        values = scale.finite_f32().reshape(-1, groups)
        return np.ascontiguousarray(values[np.arange(start, stop) // high])

    def read(start: int, stop: int) -> TableRows:
        codes = weight.array[start:stop]
        if not finite[codes].all():
            raise stored.error(weight.name, f"holds {kind} codes that are no numbers")
        return TableRows(codes, scales(start, stop))

    shown = "tensor" if shape in ((), (1,), (1, 1)) else "channel" if groups == 1 and high == 1 else ""
    shown = shown or (f"group {wide}" if high == 1 else f"block {block[0]}x{block[1]}" if block else "")
    return TableTensor(
        name,
        (rows, k),
        kind,
        float8_table(kind),
        wide,
        "f16" if scale.dtype == "F16" else "f32",
        f"FP8 {kind} per {shown}",
        TableParts((weight, scale), read),
    )
