"""The GPTQ layout (version 1): codes packed along k, zero points stored less one, a group index for every input.

qweight int32 [k * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales f16 [groups, out], g_idx int32 [k];
the fields of quantize_config.json and of config.json are those AutoGPTQ writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo.ptq.formats.bits import pack_stream
from octavo.ptq.formats.layout import Stored, WrittenTensor, module_of
from octavo.ptq.grid import QuantizedMatrix, ScaleDtype
from octavo.ptq.settings import QuantizeSettings

__all__ = ["GptqLayout"]


class GptqLayout:
    """See `octavo.ptq.formats.layout.Layout`."""

    scale_dtype: ScaleDtype = "f16"
    torch_dtype: str | None = "float16"

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def check(self, name: str, shape: tuple[int, int], group: int) -> None:
        for size, what in zip(shape, ("outputs", "inputs"), strict=True):
            if size % 32:
                raise ConfigError(f"tensor {name}: has {size} {what}; the gptq layout needs a multiple of 32")

    def pack(self, name: str, matrix: QuantizedMatrix, input_scale: float | None) -> Stored:
        module, grid = module_of(name), matrix.grid
        k = matrix.codes.shape[1]
        words = pack_stream(np.ascontiguousarray(matrix.codes), self.bits)
        zeros = pack_stream(np.ascontiguousarray(grid.zeros.T - 1), self.bits)
        return {
            f"{module}.qweight": WrittenTensor("I32", np.ascontiguousarray(words.T)),
            f"{module}.qzeros": WrittenTensor("I32", zeros),
            f"{module}.scales": WrittenTensor("F16", np.ascontiguousarray(grid.scales.T.astype(np.float16))),
            f"{module}.g_idx": WrittenTensor("I32", (np.arange(k) // grid.spec.group).astype(np.int32)),
        }

    def config(self, settings: QuantizeSettings, ignored: Sequence[str]) -> dict[str, Any]:
        from octavo import __version__

        return {
            "quant_method": "gptq",
            "bits": settings.bits,
            "group_size": settings.group_size,
            "damp_percent": settings.damping,
            "desc_act": False,
            "static_groups": True,
            "sym": settings.symmetric,
            "true_sequential": False,
            "lm_head": False,
            "checkpoint_format": "gptq",
            "meta": {"quantizer": f"octavo:{__version__}", "method": settings.method},
        }
