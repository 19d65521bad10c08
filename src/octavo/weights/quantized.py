"""Checkpoints that others have quantised: which method it was, and the weights that their stored parts make.

A method is one file of `octavo.weights.methods`: NAMES, what configurations call it, and read(), which finds every
quantised weight among the stored tensors. What a tensor is follows from its parts, and the configuration is checked
against them: lists of modules that were left alone need no reading, their weights are simply stored whole.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, cast

import numpy as np

from octavo.errors import WeightsError
from octavo.weights import methods
from octavo.weights.stored import StoredArray, StoredTensors
from octavo.weights.tensors import AffineRows, Float32Array, TableRows, Tensor, Uint8Array

__all__ = [
    "AffineParts",
    "Method",
    "QuantizedWeight",
    "Settings",
    "TableParts",
    "affine_rows",
    "find_method",
    "supported_methods",
]

# Why not, for those that people have; the rest is unknown.
_REFUSALS = {
    "exl2": "EXL2 mixes bit widths inside a tensor in an order made for ExLlamaV2's GPU kernels",
    "exl3": "EXL3 stores trellis codes that only ExLlamaV3's GPU kernels decode",
    "aqlm": "AQLM's additive codebooks are not implemented",
    "quip": "QuIP#'s lattice codebooks are not implemented",
    "vptq": "VPTQ's vector codebooks are not implemented",
    "spqr": "SpQR's sparse outliers are not implemented",
    "higgs": "HIGGS's vector codebooks are not implemented",
    "quanto": "quanto saves pickled subclasses",
    "torchao": "torchao saves pickled subclasses",
    "bitnet": "BitNet's ternary layers quantise their activations in a way of their own",
    "marlin": "the Marlin layout is made for one kind of GPU",
}
_INSTEAD = (
    "take the unquantised checkpoint with quantization='w8' or 'w4', one quantised by another method, or a GGUF file"
)


class Settings:
    """The `quantization_config` of a configuration; errors name the field, its value and what would be accepted.

    `notes` collects what a user should know of how the method is run here.
    """

    def __init__(self, values: Mapping[str, Any], method: str, prefix: str = "quantization_config") -> None:
        self.values = values
        self.method = method
        self.prefix = prefix
        self.notes: list[str] = []

    def refusal(self, name: str, limit: str) -> WeightsError:
        """The error for a value that cannot be honoured."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        return WeightsError(
            f"config.json: {self.prefix}.{name} = {shown} is not supported by {self.method}: it must be {limit}"
        )

    def require(self, name: str, allowed: Collection[Any]) -> None:
        """Refuse a field that is given (and not null) as none of `allowed`; text is compared without regard to case."""
        value = self.values.get(name)
        given = value.lower() if isinstance(value, str) else value
        # 1 == True in Python, so types are compared too.
        if value is not None and not any(given == item and type(given) is type(item) for item in allowed):
            raise self.refusal(name, " or ".join(repr(item) for item in allowed) or "absent")

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        """A whole number in [least, most]."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refusal(name, f"a whole number from {least} to {most}")
        return value

    def group_size(self, name: str, default: int) -> int:
        """A group size; -1 stands for a whole row."""
        value = self.integer(name, default, -1, 1 << 24)
        if value is None or value == 0:
            raise self.refusal(name, "-1 or at least 1")
        return value

    def note(self, text: str) -> None:
        """Have something said once when the model is loaded."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight to be: the stored tensors it takes up, and what describes it once it is asked for."""

    parts: tuple[str, ...]
    make: Callable[[], Tensor]


class Method(Protocol):
    """A module of `octavo.weights.methods`."""

    NAMES: tuple[str, ...]

    def read(self, settings: Settings, stored: StoredTensors) -> dict[str, QuantizedWeight]:
        """Every quantised weight by the name a model knows it by."""


@cache
def supported_methods() -> Mapping[str, Method]:
    """Every method by the names configurations have for it."""
    found: dict[str, Method] = {}
    for item in pkgutil.iter_modules(methods.__path__):
        module = cast(Method, importlib.import_module(f"{methods.__name__}.{item.name}"))
        found |= dict.fromkeys(module.NAMES, module)
    return found


def find_method(quantization: Any) -> tuple[Method, Settings]:
    """The method that a configuration's `quantization_config` names; anything else is refused with what works."""
    if not isinstance(quantization, Mapping):
        raise WeightsError(f"config.json: quantization_config is a {type(quantization).__name__}, not an object")
    name = quantization.get("quant_method")
    if name is None and "config_groups" in quantization:
        name = "compressed-tensors"
    if name is None and ("load_in_8bit" in quantization or "load_in_4bit" in quantization):
        name = "bitsandbytes"  # as it was written before there were other methods
    known = supported_methods()
    method = known.get(name.lower()) if isinstance(name, str) else None
    if method is None:
        reason = (
            _REFUSALS.get(name.lower(), "octavo does not know it") if isinstance(name, str) else "it must be a name"
        )
        raise WeightsError(
            f"config.json: quantization_config.quant_method = {str(name)[:60]!r} is not supported: {reason}; "
            f"supported are {', '.join(sorted(known))}; {_INSTEAD}"
        )
    return method, Settings(quantization, str(name).lower())


@dataclass(frozen=True)
class _Parts:
    """Stored tensors that the rows of a weight are made of."""

    stored: tuple[StoredArray, ...] = field(repr=False)

    def release(self) -> None:
        for part in self.stored:
            part.release()


@dataclass(frozen=True)
class AffineParts(_Parts):
    """The rows of an affine weight, made by a function of the first and the last."""

    rows: Callable[[int, int], AffineRows] = field(repr=False)

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        return self.rows(start, stop)

    def block_rows(self, start: int, stop: int) -> Uint8Array | None:
        return None


@dataclass(frozen=True)
class TableParts(_Parts):
    """The rows of a weight of table codes, made by a function of the first and the last."""

    rows: Callable[[int, int], TableRows] = field(repr=False)

    def table_rows(self, start: int, stop: int) -> TableRows:
        return self.rows(start, stop)


def affine_rows(codes: Uint8Array, scales: Float32Array, zeros: Uint8Array | None) -> AffineRows:
    """Rows with a zero point for each group, as a minimum: scale * (code - zero) is scale * code + (-zero * scale).

    Of f16 or bf16 scales and 8-bit codes both products and their sum are exact in float32. A product of a float32
    scale is rounded once.
    """
    if zeros is None:
        return AffineRows(codes, scales, None)
    with np.errstate(over="ignore"):
        return AffineRows(codes, scales, scales * -zeros.astype(np.float32))
