"""The scales of an fp8 KV cache that a checkpoint was calibrated with: one for a layer's keys and one for its values.

They are tensors of one number each, `model.layers.N.self_attn.k_scale` and `v_scale` (also behind `k_proj.` and
`v_proj.`, as ModelOpt writes them): a cached number is a code times the scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import WeightsError

__all__ = ["is_kv_scale", "static_kv_scales"]

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:(?:[kv]_proj|qkv_proj|attn)\.)?([kv])_scale$")
_SMALLEST, _LARGEST = 1e-30, 1e30


class ScaleTensor(Protocol):
    """What is needed of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_f32(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]: ...


class ScaleSource(Protocol):
    """What is needed of a checkpoint."""

    def names(self) -> Iterable[str]: ...

    def tensor(self, name: str) -> ScaleTensor: ...


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name is such a scale."""
    return _NAME.search(name) is not None


def static_kv_scales(checkpoint: ScaleSource, layers: int) -> list[tuple[float, float]]:
    """(scale of keys, scale of values) of each layer, or nothing if the checkpoint has none; all or none are there."""
    found: dict[tuple[int, str], tuple[str, float]] = {}
    for name in checkpoint.names():
        match = _NAME.search(name)
        if match is None:
            continue
        layer, which = int(match[1]), match[2]
        if layer >= layers:
            raise WeightsError(f"tensor {name!r} is of layer {layer}; the model has {layers} layers")
        if (layer, which) in found:
            raise WeightsError(f"tensors {found[layer, which][0]!r} and {name!r} are the same scale")
        found[layer, which] = name, _read(checkpoint, name)
    if not found:
        return []
    for layer in range(layers):
        for which in "kv":
            if (layer, which) not in found:
                raise WeightsError(
                    f"tensor 'model.layers.{layer}.self_attn.{which}_scale' is missing; other layers have KV scales"
                )
    return [(found[layer, "k"][1], found[layer, "v"][1]) for layer in range(layers)]


def _read(checkpoint: ScaleSource, name: str) -> float:
    tensor = checkpoint.tensor(name)
    if math.prod(tensor.shape) != 1:
        raise WeightsError(f"tensor {name!r} has shape {tuple(tensor.shape)}; a KV scale is one number")
    value = float(tensor.read_f32().reshape(-1)[0])
    if not _SMALLEST <= value <= _LARGEST:
        raise WeightsError(f"tensor {name!r} is {value:g}; a KV scale lies between {_SMALLEST:g} and {_LARGEST:g}")
    return value
