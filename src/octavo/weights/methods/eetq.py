"""EETQ checkpoints: int8 with a scale for each output, in the order the tensor cores of NVIDIA GPUs (7.5 to 8.9) want.

`weight` int8 [k, n] beside `weight_scales` f16 [n] (EETQ's own layer calls the first `qweight`). The bytes are plus
128, of pairs of columns by turns 64 k of one and 64 of the other; in each 16 k the order is 0 1 8 9 2 3 10 11 4 5 12 13
6 7 14 15, and then in each four bytes the middle two are exchanged.
"""

from __future__ import annotations

import numpy as np

from octavo.weights.quantized import AffineParts, QuantizedWeight, Settings
from octavo.weights.stored import StoredTensors
from octavo.weights.tensors import AffineRows, AffineTensor, Tensor

NAMES = ("eetq",)

_TILE = 64
_ORDER = np.array([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
# Where in 16 stored bytes each k is: the exchange undone, then the order.
_PLACES = np.argsort(_ORDER.reshape(4, 4)[:, [0, 2, 1, 3]].reshape(16))


def read(settings: Settings, stored: StoredTensors) -> dict[str, QuantizedWeight]:
    """Every weight that has scales."""
    settings.require("weights", ("int8",))
    settings.note("EETQ weights are read in the order of GPUs of compute capability 7.5 to 8.9")
    return {f"{base}.weight": _weight(base, stored) for base in stored.ending(".weight_scales")}


def _weight(base: str, stored: StoredTensors) -> QuantizedWeight:
    name = f"{base}.qweight" if f"{base}.qweight" in stored else f"{base}.weight"
    parts = (name, f"{base}.weight_scales")

    def make() -> Tensor:
        weight = stored.need(name, ("I8",), (None, None))
        k, n = weight.shape
        if k == 0 or n == 0 or k % _TILE or n % 2:
            raise stored.error(name, f"has shape [{k}, {n}], expected multiples of {_TILE} and 2")
        scales = stored.need(parts[1], ("F16", "BF16", "F32"), (n,))
        # [pair, tile of k, column of the pair, 16 k of the tile, byte]
        tiles = weight.array.view(np.uint8).reshape(n // 2, k // _TILE, 2, _TILE // 16, 16)

        def rows(start: int, stop: int) -> AffineRows:
            first, last = start // 2, -(-stop // 2)
            pairs = tiles[first:last][..., _PLACES].transpose(0, 2, 1, 3, 4).reshape(2 * (last - first), k)
            codes = pairs[start - 2 * first : stop - 2 * first]
            return AffineRows(codes, scales.finite_f32(np.s_[start:stop])[:, None], None)

        return AffineTensor(
            f"{base}.weight",
            (n, k),
            8,
            k,
            128,
            False,
            "f16" if scales.dtype == "F16" else "f32",
            "EETQ int8",
            True,
            AffineParts((weight, scales), rows),
        )

    return QuantizedWeight(parts, make)
