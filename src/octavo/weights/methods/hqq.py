"""HQQ checkpoints (Half-Quadratic Quantization): 8, 4, 3, 2 or 1 bits, groups with zero points that are no integers.

`W_q` holds the codes of all groups, [groups, group size], in parts of equal height that share its words: the first part
in the highest bits. `scale` and `zero` [groups, 1]; w = (code - zero) * scale. `shape`, `nbits`, `group_size`, `axis`,
`packing` and others say how it was made, as small tensors (text as its characters).

Groups along a row (axis 1) run as affine groups, their minimum -zero * scale exact of f16 parts. Groups along axis 0
lie across rows, with a scale for every weight of a row, and are refused.
"""

from __future__ import annotations

import numpy as np

from octavo.weights.quantized import QuantizedWeight, Settings
from octavo.weights.stored import StoredArray, StoredTensors
from octavo.weights.tensors import AffineRows, AffineTensor, Tensor, Uint8Array

NAMES = ("hqq",)

# How a packing holds codes: bits of each, how many share a word.
_PACKINGS = {
    "8bit_u8": (8, 1), "4bit_u8": (4, 2), "2bit_u8": (2, 4), "1bit_u8": (1, 8), "3bit_32": (3, 10),
}  # fmt: skip
_FLOATS = ("F16", "BF16", "F32")
_NOTES = (
    "axis", "channel_wise", "compute_dtype", "encoded_state_dict", "group_size", "nbits",
    "offload_meta", "optimize", "packing", "quant_scale", "quant_zero", "round_zero", "scale", "shape",
    "stores_quant_config", "unpack_view_dtype", "view_as_float", "zero",
)  # fmt: skip


def read(settings: Settings, stored: StoredTensors) -> dict[str, QuantizedWeight]:
    """Every weight that has a W_q."""
    return {f"{base}.weight": _weight(base, stored) for base in stored.ending(".W_q")}


def _weight(base: str, stored: StoredTensors) -> QuantizedWeight:
    parts = (f"{base}.W_q", *(f"{base}.{name}" for name in _NOTES if f"{base}.{name}" in stored))

    def number(name: str) -> int:
        array = stored.need(f"{base}.{name}", ("I32", "I64", "U8")).array
        if array.size != 1:
            raise stored.error(f"{base}.{name}", f"has {array.size} numbers, expected 1")
        return int(array.reshape(-1)[0])

    def make() -> Tensor:
        for name in ("quant_scale", "quant_zero", "view_as_float"):
            if f"{base}.{name}" in stored and number(name):
                raise stored.error(f"{base}.{name}", "is set; quantised scales and codes seen as floats are not read")
        axis = number("axis")
        if axis != 1:
            raise stored.error(f"{base}.axis", f"is {axis}: groups across rows cannot be run; quantise with axis=1")
        text = stored.need(f"{base}.packing", ("U8",), (None,)).array[:32].tobytes().decode("latin-1")
        if text not in _PACKINGS:
            raise stored.error(f"{base}.packing", f"is {text!r}, expected {' or '.join(_PACKINGS)}")
        bits, shared = _PACKINGS[text]
        sizes = stored.need(f"{base}.shape", ("I64", "I32"), (2,)).array
        n, k, group = int(sizes[0]), int(sizes[1]), number("group_size")
        if not 0 < n < 1 << 31 or not 0 < k < 1 << 31 or group < 1 or k % group:
            raise stored.error(f"{base}.shape", f"is {n} x {k} in groups of {group}, which do not divide rows")
        groups = n * (k // group)
        codes = stored.need(parts[0], ("I32",) if bits == 3 else ("U8",), (-(-groups // shared), group))
        scale = stored.need(f"{base}.scale", _FLOATS, (groups, 1))
        zero = stored.need(f"{base}.zero", _FLOATS, (groups, 1))
        return AffineTensor(
            f"{base}.weight",
            (n, k),
            8 if bits == 8 else 4,
            group,
            0,
            True,
            "f32",
            f"HQQ {bits}-bit group {group}",
            True,
            _Rows(codes, scale, zero, bits, shared, k // group),
        )

    return QuantizedWeight(parts, make)


class _Rows:
    """The rows of one weight; `shared` codes are in a word, those of groups far apart."""

    def __init__(
        self, codes: StoredArray, scale: StoredArray, zero: StoredArray, bits: int, shared: int, a_row: int
    ) -> None:
        self.codes, self.scale, self.zero = codes, scale, zero
        self.bits, self.shared, self.a_row = bits, shared, a_row

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        first, last = start * self.a_row, stop * self.a_row
        words = self.codes.array
        height, group = words.shape
        # Group g is in row g % height of the words, in the part g // height from the highest bits.
        wanted = np.arange(first, last)
        shifts = self.bits * (self.shared - 1 - wanted // height)
        found = words[wanted % height] >> shifts.astype(words.dtype)[:, None] & words.dtype.type((1 << self.bits) - 1)
        scales = self.scale.finite_f32(np.s_[first:last]).reshape(stop - start, self.a_row)
        zeros = self.zero.finite_f32(np.s_[first:last]).reshape(stop - start, self.a_row)
        with np.errstate(over="ignore"):
            minimums = scales * -zeros
        return AffineRows(found.astype(np.uint8).reshape(stop - start, self.a_row * group), scales, minimums)

    def block_rows(self, start: int, stop: int) -> Uint8Array | None:
        return None

    def release(self) -> None:
        for part in (self.codes, self.scale, self.zero):
            part.release()
