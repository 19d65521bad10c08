"""GPTQ checkpoints (arXiv 2210.17323) as AutoGPTQ and GPTQModel write them: 2, 3, 4 or 8 bits, also in act-order.

qweight int32 [k * bits / 32, n]: the codes of a column are a stream of bits down its words. qzeros int32
[groups, n * bits / 32] the same along n, less one in the first version of the format (`checkpoint_format` "gptq") and
as they are in the second ("gptq_v2"). scales f16 [groups, n]; g_idx int32 [k] the group of each input.

In act-order the groups of g_idx are scattered over k. Rows are then given with k sorted by group, and the tensor says
in which order its input has to be read: the same products, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.weights.quantized import QuantizedWeight, Settings, affine_rows
from octavo.weights.stored import StoredArray, StoredTensors
from octavo.weights.tensors import AffineRows, AffineTensor, Int32Array, Tensor, Uint8Array
from octavo.weights.unpacking import column_bytes, unpack_stream

NAMES = ("gptq",)

_BITS = (2, 3, 4, 8)
_FLOATS = ("F16", "BF16", "F32")


def read(settings: Settings, stored: StoredTensors) -> dict[str, QuantizedWeight]:
    """Every weight that has a qweight; where `dynamic` gives modules bits and groups of their own, shapes tell them."""
    settings.require("quant_method", ("gptq",))
    settings.require("checkpoint_format", ("gptq", "gptq_v2"))
    settings.require("format", ("gptq", "gptq_v2"))
    version = settings.values.get("checkpoint_format") or settings.values.get("format") or "gptq"
    dynamic = bool(settings.values.get("dynamic"))
    if not dynamic:
        settings.require("bits", _BITS)
    bits = None if dynamic else settings.integer("bits", None, 2, 8)
    group = None if dynamic else settings.group_size("group_size", 128)
    plus_one = str(version).lower() != "gptq_v2"
    return {f"{base}.weight": _weight(base, stored, bits, group, plus_one) for base in stored.ending(".qweight")}


def _weight(base: str, stored: StoredTensors, bits: int | None, group: int | None, plus_one: bool) -> QuantizedWeight:
    indexed = f"{base}.g_idx" in stored
    parts = tuple(f"{base}.{part}" for part in ("qweight", "qzeros", "scales", *(("g_idx",) if indexed else ())))

    def make() -> Tensor:
        qweight = stored.need(parts[0], ("I32",), (None, None))
        words, n = qweight.shape
        scales = stored.need(parts[2], _FLOATS, (None, n))
        groups = scales.shape[0]
        qzeros = stored.need(parts[1], ("I32",), (groups, None))
        if n == 0 or words == 0 or groups == 0:
            raise stored.error(parts[0], "is empty")
        width = 32 * qzeros.shape[1] // n
        if width not in _BITS or 32 * qzeros.shape[1] != width * n or (bits is not None and width != bits):
            raise stored.error(
                parts[1], f"has {qzeros.shape[1]} words for {n} columns of {bits or '2, 3, 4 or 8'} bits"
            )
        k = words * 32 // width
        if k * width != words * 32:
            raise stored.error(parts[0], f"has {words} words a column, no whole number of {width}-bit codes")
        size = -(-k // groups) if group is None else k if group == -1 else min(group, k)
        if -(-k // size) != groups or k % size:
            raise stored.error(parts[2], f"has {groups} groups, {k} inputs in groups of {size} have {-(-k // size)}")
        index = stored.need(parts[3], ("I32", "I64"), (k,)) if indexed else None
        order = None if index is None else group_order(stored, index, size)
        reader = _Rows(qweight, qzeros, scales, width, plus_one, order)
        zero = reader.only_zero = reader.find_only_zero()
        kind = "act-order" if order is not None else f"group {size}"
        return AffineTensor(
            f"{base}.weight",
            (n, k),
            8 if width == 8 else 4,
            size,
            zero or 0,
            zero is None,
            "f16" if zero is not None and scales.dtype == "F16" else "f32",
            f"GPTQ {width}-bit {kind}",
            True,
            reader,
            order,
        )

    return QuantizedWeight(parts, make)


def group_order(stored: StoredTensors, index: StoredArray, group: int) -> Int32Array | None:
    """Inputs sorted by their group, None when they are already; every group must have as many as any other."""
    groups = index.array.astype(np.int64)
    expected = np.arange(len(groups)) // group
    if np.array_equal(groups, expected):
        return None
    order = np.argsort(groups, kind="stable").astype(np.int32)
    if not np.array_equal(groups[order], expected):
        raise stored.error(index.name, f"does not spread {len(groups)} inputs evenly over groups of {group}")
    return order


@dataclass
class _Rows:
    """The rows of one weight. All zero points are unpacked at the first read and forgotten at the last."""

    qweight: StoredArray
    qzeros: StoredArray
    scales: StoredArray
    bits: int
    plus_one: bool
    order: Int32Array | None
    only_zero: int | None = None
    _zeros: Uint8Array | None = field(default=None, init=False)

    def _unpack_zeros(self, words: npt.NDArray[Any]) -> Uint8Array:
        packed = np.ascontiguousarray(words).view(np.uint8).reshape(words.shape[0], 4 * words.shape[1])
        zeros = unpack_stream(packed, self.bits)
        return (zeros + np.uint8(1)) & np.uint8((1 << self.bits) - 1) if self.plus_one else zeros

    def find_only_zero(self) -> int | None:
        """The zero point that all groups have, as symmetric weights do; None when there are several."""
        zeros = self._unpack_zeros(self.qzeros.array)
        first = int(zeros[0, 0])
        return first if bool((zeros == first).all()) else None

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        codes = unpack_stream(column_bytes(self.qweight.array, start, stop), self.bits)
        if self.order is not None:
            codes = codes[:, self.order]
        scales = np.ascontiguousarray(self.scales.finite_f32(np.s_[:, start:stop]).T)
        if self.only_zero is not None:
            return affine_rows(codes, scales, None)
        zeros = self._zeros
        if zeros is None:
            zeros = self._zeros = self._unpack_zeros(self.qzeros.array)
        return affine_rows(codes, scales, zeros[:, start:stop].T)

    def block_rows(self, start: int, stop: int) -> Uint8Array | None:
        return None

    def release(self) -> None:
        self._zeros = None
        for part in (self.qweight, self.qzeros, self.scales):
            part.release()
