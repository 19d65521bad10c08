"""The compressed-tensors layout: pack-quantized for 4 and 8 bits of weights, int-quantized for W8A8.

pack-quantized: weight_packed int32 [out, k * bits / 32] of codes along k, weight_scale [out, groups], weight_shape
int64 [2], and for grids with zero points weight_zero_point int32 [out * bits / 32, groups], packed along the outputs.
int-quantized: weight int8 [out, k], weight_scale [out, 1], and input_scale [1] where activations have static scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo.ptq.formats.bits import pack_words
from octavo.ptq.formats.layout import Stored, WrittenTensor, module_of
from octavo.ptq.grid import Float32Array, QuantizedMatrix, ScaleDtype
from octavo.ptq.settings import QuantizeSettings
from octavo.weights.tensors import f32_to_bf16

__all__ = ["CompressedTensorsLayout"]


class CompressedTensorsLayout:
    """See `octavo.ptq.formats.layout.Layout`. ``integers`` is int-quantized; scales are of the checkpoint's type."""

    torch_dtype: str | None = None

    def __init__(self, bits: int, scale_dtype: ScaleDtype, *, integers: bool) -> None:
        self.bits = bits
        self.scale_dtype = scale_dtype
        self.integers = integers

    def check(self, name: str, shape: tuple[int, int], group: int) -> None:
        each = 32 // self.bits
        for size, what in zip(shape, ("outputs", "inputs"), strict=True):
            if not self.integers and size % each:
                raise ConfigError(
                    f"tensor {name}: has {size} {what}; the compressed-tensors layout needs a multiple of {each}"
                )

    def pack(self, name: str, matrix: QuantizedMatrix, input_scale: float | None) -> Stored:
        module, grid = module_of(name), matrix.grid
        tensors = {f"{module}.weight_scale": self._scales(grid.scales)}
        if self.integers:
            tensors[f"{module}.weight"] = WrittenTensor("I8", (matrix.codes.astype(np.int16) - 128).astype(np.int8))
            if input_scale is not None:
                tensors[f"{module}.input_scale"] = WrittenTensor("F32", np.array([input_scale], np.float32))
            return tensors
        tensors[f"{module}.weight_packed"] = WrittenTensor("I32", pack_words(matrix.codes, self.bits))
        tensors[f"{module}.weight_shape"] = WrittenTensor("I64", np.array(matrix.codes.shape, np.int64))
        if not grid.spec.symmetric:
            packed = pack_words(np.ascontiguousarray(grid.zeros.T), self.bits)
            tensors[f"{module}.weight_zero_point"] = WrittenTensor("I32", np.ascontiguousarray(packed.T))
        return tensors

    def _scales(self, scales: Float32Array) -> WrittenTensor:
        if self.scale_dtype == "f16":
            return WrittenTensor("F16", scales.astype(np.float16))
        return WrittenTensor("BF16", f32_to_bf16(scales))

    def config(self, settings: QuantizeSettings, ignored: Sequence[str]) -> dict[str, Any]:
        row = settings.group_size == -1
        weights = _scheme(settings.bits, settings.symmetric or self.integers, "channel" if row else "group")
        if not row:
            weights["group_size"] = settings.group_size
        activations = None
        if self.integers:
            static = settings.static_scales is not None
            activations = _scheme(8, True, "tensor" if static else "token", dynamic=not static)
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if self.integers else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": activations,
                    "output_activations": None,
                }
            },
            "ignore": list(ignored),
            "kv_cache_scheme": None,
        }


def _scheme(bits: int, symmetric: bool, strategy: str, *, dynamic: bool = False) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": dynamic}
