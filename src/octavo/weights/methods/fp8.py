"""FP8 checkpoints: e4m3 or e5m2 with one scale a tensor, a row, or a block of 128 x 128 (DeepSeek-V3, Qwen3-FP8).

`weight` [n, k] beside `weight_scale` or, of blocks, `weight_scale_inv`: both are what codes are multiplied with. A
static scale of activations (`input_scale`) is not needed: products are of bf16 activations, which lose less.
"""

from __future__ import annotations

from typing import Any

from octavo.errors import WeightsError
from octavo.weights.float8 import FLOAT8_DTYPES, float8_tensor
from octavo.weights.quantized import QuantizedWeight, Settings
from octavo.weights.stored import StoredTensors
from octavo.weights.tensors import Tensor

NAMES = ("fp8", "fbgemm_fp8")

_SCALES = (".weight_scale_inv", ".weight_scale")


def read(settings: Settings, stored: StoredTensors) -> dict[str, QuantizedWeight]:
    """Every weight in FP8 that has a scale."""
    settings.require("fmt", ("e4m3", "e5m2"))
    settings.require("activation_scheme", ("dynamic", "static"))
    block = block_size(settings, "weight_block_size", settings.values.get("weight_block_size"))
    found = {}
    for suffix in _SCALES:
        for base in stored.ending(suffix):
            if f"{base}.weight" in found:
                raise stored.error(f"{base}{suffix}", "is a second scale of one weight")
            found[f"{base}.weight"] = _weight(base, suffix, stored, block if suffix == _SCALES[0] or block else None)
    settings.note("FP8 activations, static or dynamic, are not rounded to FP8: products are of bf16 activations")
    return found


def block_size(settings: Settings, name: str, value: Any) -> tuple[int, int] | None:
    """Rows and columns of a block, None when nothing is given."""
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and 0 < size < 1 << 24 for size in value)
    ):
        raise WeightsError(
            f"config.json: {settings.prefix}.{name} = {str(value)[:80]} must be two sizes, rows and columns"
        )
    return value[0], value[1]


def _weight(base: str, suffix: str, stored: StoredTensors, block: tuple[int, int] | None) -> QuantizedWeight:
    used = tuple(name for name in (f"{base}.input_scale", f"{base}.activation_scale") if name in stored)

    def make() -> Tensor:
        weight = stored.need(f"{base}.weight", tuple(FLOAT8_DTYPES), (None, None))
        return float8_tensor(stored, f"{base}.weight", weight, stored[base + suffix], block)

    return QuantizedWeight((f"{base}.weight", base + suffix, *used), make)
