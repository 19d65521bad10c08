"""bitsandbytes checkpoints: LLM.int8 (arXiv 2208.07339), NF4 and FP4 (arXiv 2305.14314), with doubly quantised scales.

int8: `weight` int8 [n, k] and `SCB` f32 [n], the largest magnitude of each row. 4 bits: `weight` is bytes, the high
half first, of blocks that run through the rows one after another; `weight.absmax` their scales, f32, or bytes into
`weight.nested_quant_map` times `weight.nested_absmax` plus an offset; `weight.quant_map` the 16 values;
`weight.quant_state.bitsandbytes__nf4` (or fp4) the rest as JSON.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.weights.json_files import parse_json_object
from octavo.weights.quantized import AffineParts, QuantizedWeight, Settings, TableParts
from octavo.weights.stored import StoredArray, StoredTensors
from octavo.weights.tensors import AffineRows, AffineTensor, Float32Array, TableRows, TableTensor, Tensor
from octavo.weights.unpacking import split_nibbles

NAMES = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")

_STATE = ".quant_state.bitsandbytes__"
_INVERSE_127 = np.float32(7.874015718698502e-3)  # the constant of the library
_SMALLEST_GROUP = 16


def read(settings: Settings, stored: StoredTensors) -> dict[str, QuantizedWeight]:
    """Every weight with an SCB or a quantisation state."""
    found = {f"{base}.weight": _int8(base, stored) for base in stored.ending(".SCB")}
    for kind in ("nf4", "fp4"):
        found |= {name: _four_bits(name, kind, stored) for name in stored.ending(_STATE + kind)}
    if settings.values.get("load_in_8bit"):
        settings.note(
            "LLM.int8's split of outlier columns is not made: int8 activations have a scale for each 32 instead"
        )
    return found


def _int8(base: str, stored: StoredTensors) -> QuantizedWeight:
    name = f"{base}.weight"
    layout = f"{base}.weight_format"
    parts = (name, f"{base}.SCB", *((layout,) if layout in stored else ()))

    def make() -> Tensor:
        weight = stored.need(name, ("I8",), (None, None))
        largest = stored.need(parts[1], ("F32", "F16", "BF16"), (weight.shape[0],))
        if layout in stored and stored.need(layout, ("U8",)).array.any():
            raise stored.error(layout, "is not 0: only rows one after another can be read, no layout of a GPU")

        def rows(start: int, stop: int) -> AffineRows:
            codes = weight.array[start:stop].view(np.uint8) ^ np.uint8(0x80)
            return AffineRows(codes, (largest.finite_f32(np.s_[start:stop]) * _INVERSE_127)[:, None], None)

        n, k = weight.shape
        return AffineTensor(
            name, (n, k), 8, k, 128, False, "f32", "LLM.int8", True, AffineParts((weight, largest), rows)
        )

    return QuantizedWeight(parts, make)


def _four_bits(name: str, kind: str, stored: StoredTensors) -> QuantizedWeight:
    optional = (f"{name}.nested_absmax", f"{name}.nested_quant_map")
    parts = (name, name + _STATE + kind, f"{name}.absmax", f"{name}.quant_map", *(p for p in optional if p in stored))

    def make() -> Tensor:
        state = _State.read(stored, parts[1])
        n, k = state.shape
        weight = stored.need(name, ("U8", "I8", "F16", "BF16", "F32"))  # the bytes, whatever they are kept as
        if weight.nbytes != -(-n * k // 2):
            raise stored.error(name, f"has {weight.nbytes} bytes, {n} x {k} codes of 4 bits take {-(-n * k // 2)}")
        table = stored.need(parts[3], ("F32",), (16,)).finite_f32()
        blocks = -(-n * k // state.block)
        absmax = stored.need(parts[2], ("U8", "F32"), (blocks,))
        nested = None
        if absmax.dtype == "U8":
            if state.nested_block == 0:
                raise stored.error(parts[1], "has no nested_blocksize, though the scales are bytes")
            steps = stored.need(optional[1], ("F32",), (256,))
            nested = stored.need(optional[0], ("F32",), (-(-blocks // state.nested_block),)), steps
        # Blocks run on from row to row: of rows that are no whole number of blocks, the largest groups that lie inside
        # of one.
        group = math.gcd(k, state.block)
        if k % 2 or (group != _SMALLEST_GROUP and group % 32):
            raise stored.error(
                name, f"has rows of {k} codes in blocks of {state.block}: groups of {group} cannot be run"
            )
        packed = weight.file.bytes[weight.start : weight.start + weight.nbytes].reshape(n, k // 2)

        def rows(start: int, stop: int) -> TableRows:
            first = np.arange(start * k, stop * k, group, dtype=np.int64) // state.block
            scales = _scales(absmax, nested, state, first).reshape(stop - start, k // group)
            if not np.isfinite(scales).all():
                raise stored.error(parts[2], "holds a number that is not finite")
            return TableRows(split_nibbles(packed[start:stop], high_first=True), scales)

        double = " double" if nested else ""
        return TableTensor(
            name,
            (n, k),
            "lut4",
            tuple(table.tolist()),
            group,
            "f32",
            f"{kind.upper()}{double} block {state.block}",
            TableParts((weight, absmax), rows),
        )

    return QuantizedWeight(parts, make)


def _scales(
    absmax: StoredArray, nested: tuple[StoredArray, StoredArray] | None, state: _State, blocks: Any
) -> Float32Array:
    """The scales of some blocks: as stored, or code · nested scale + offset, each step rounded to float32."""
    values = absmax.array[blocks]
    if nested is None:
        plain: Float32Array = values.astype(np.float32)
        return plain
    largest, steps = nested
    with np.errstate(over="ignore", invalid="ignore"):
        scales: Float32Array = steps.array[values] * largest.array[blocks // state.nested_block]
        return scales + np.float32(state.offset)


@dataclass(frozen=True)
class _State:
    """What the JSON beside a weight says, checked."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float

    @classmethod
    def read(cls, stored: StoredTensors, name: str) -> _State:
        array = stored.need(name, ("U8",), (None,))
        if array.nbytes > 4096:
            raise stored.error(name, f"has {array.nbytes} bytes, expected at most 4096 of JSON")
        values = parse_json_object(array.array.tobytes(), f"{stored.where}: tensor {name[:200]!r}")

        def size(key: str, value: Any, least: int) -> int:
            if type(value) is not int or not least <= value < 1 << 31:
                raise stored.error(name, f"has {key} = {str(value)[:60]}, expected a whole number from {least}")
            return value

        shape = values.get("shape")
        if not isinstance(shape, list) or len(shape) != 2:
            raise stored.error(name, f"has shape = {str(shape)[:60]}, expected that of a matrix")
        offset = values.get("nested_offset", 0.0)
        if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) < 1e30:
            raise stored.error(name, f"has nested_offset = {str(offset)[:60]}, expected a number")
        return cls(
            (size("shape", shape[0], 1), size("shape", shape[1], 1)),
            size("blocksize", values.get("blocksize"), 1),
            size("nested_blocksize", values.get("nested_blocksize", 0), 0),
            float(offset),
        )
