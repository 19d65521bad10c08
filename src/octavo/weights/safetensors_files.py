"""Hugging Face model directories: safetensors files (one, or shards with an index) beside a config.json.

The header parser is octavo's own: it trusts nothing, and gives views of the mapped file instead of copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import WeightsError
from octavo.weights.json_files import parse_json_object, read_json_object
from octavo.weights.mapped_file import MappedFile
from octavo.weights.quantized import QuantizedWeight, find_method
from octavo.weights.stored import StoredArray, StoredTensors
from octavo.weights.tensors import DenseDtype, DenseTensor, Tensor
from octavo.weights.views import MappedRows

__all__ = ["SafetensorsCheckpoint", "SafetensorsFile"]

MAX_HEADER_BYTES = 32 << 20
MAX_DIMENSIONS = 8
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Bytes per element of every dtype the format has; the first three are readable, the others are only accounted for.
DENSE_DTYPES: dict[str, DenseDtype] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
ELEMENT_BITS = {
    "F32": 32, "F16": 16, "BF16": 16, "F64": 64, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6,
    "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One line of a safetensors header, checked."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One mapped safetensors file and its checked header."""

    def __init__(self, path: Path) -> None:
        self.file = MappedFile(path)
        self.path = path
        size = self.file.size
        if size < 8:
            raise WeightsError(f"{path}: is {size} bytes long, a safetensors file has at least 8")
        length = int.from_bytes(self.file.map[:8], "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise WeightsError(
                f"{path}: claims a header of {length} bytes, the file has {size} (limit {MAX_HEADER_BYTES})"
            )
        header = parse_json_object(self.file.map[8 : 8 + length], f"{path}: header")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise WeightsError(f"{path}: __metadata__ is not an object of strings")
        self.data_start = 8 + length
        self.entries = {name: self._entry(name, value) for name, value in header.items()}
        self._check_coverage()

    def _entry(self, name: str, value: Any) -> Entry:
        where = f"{self.path}: tensor {name[:200]!r}"
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise WeightsError(f"{where}: its header entry must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ELEMENT_BITS:
            raise WeightsError(f"{where}: unknown dtype {str(dtype)[:40]!r}")
        if not is_counts(shape) or len(shape) > MAX_DIMENSIONS:
            raise WeightsError(f"{where}: its shape is not a list of at most {MAX_DIMENSIONS} sizes")
        if not is_counts(offsets) or len(offsets) != 2:
            raise WeightsError(f"{where}: data_offsets is not a pair of positions")
        start, stop = offsets
        available = self.file.size - self.data_start
        if not start <= stop <= available:
            raise WeightsError(f"{where}: its bytes [{start}, {stop}) are outside of the {available} bytes of data")
        bits = math.prod(shape) * ELEMENT_BITS[dtype]
        if bits != 8 * (stop - start):
            raise WeightsError(f"{where}: {dtype} {shape} takes {-(-bits // 8)} bytes, its offsets say {stop - start}")
        return Entry(dtype, tuple(shape), start, stop)

    def _check_coverage(self) -> None:
        """Tensors lie one after the other and fill the file, as the format demands: no overlap and no gap."""
        position = 0
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != position:
                what = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
                raise WeightsError(
                    f"{self.path}: tensor {name[:200]!r} {what}: it starts at {entry.start}, expected {position}"
                )
            position = entry.stop
        available = self.file.size - self.data_start
        if position != available:
            raise WeightsError(f"{self.path}: the tensors end at {position}, the file has {available} bytes of data")

    def tensor(self, name: str) -> DenseTensor:
        entry = self.entries[name]
        dtype = DENSE_DTYPES.get(entry.dtype)
        if dtype is None:
            supported = ", ".join(DENSE_DTYPES)
            raise WeightsError(f"{self.path}: tensor {name!r} has dtype {entry.dtype}; supported are {supported}")
        rows = entry.shape[0] if entry.shape else 1
        row_elements = math.prod(entry.shape[1:])
        start = self.data_start + entry.start
        return DenseTensor(name, entry.shape, dtype, MappedRows(self.file, start, row_elements, dtype, rows))

    def stored(self, name: str) -> StoredArray:
        """A tensor of any dtype, as an array."""
        entry = self.entries[name]
        return StoredArray(name, entry.dtype, entry.shape, self.file, self.data_start + entry.start)


def is_counts(value: Any) -> bool:
    """Whether ``value`` is a list of integers >= 0 that fit 63 bits."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


class SafetensorsCheckpoint:
    """A Hugging Face model directory."""

    format = "safetensors"
    gguf_metadata: Mapping[str, Any] | None = None
    _parts: Mapping[str, str] = {}  # the quantised weight that a stored tensor is a part of

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json_object(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = read_json_object(generation) if generation.is_file() else {}
        self._owner: dict[str, SafetensorsFile] = {}
        for file_path, expected in self._shards():
            shard = SafetensorsFile(file_path)
            for name in shard.entries:
                if name in self._owner:
                    raise WeightsError(
                        f"{path}: tensor {name[:200]!r} is both in {self._owner[name].path.name} and {file_path.name}"
                    )
                self._owner[name] = shard
            for name in expected:
                if name not in shard.entries:
                    raise WeightsError(
                        f"{path}: {INDEX_NAME} puts tensor {name[:200]!r} in {file_path.name}, which lacks it"
                    )
        self.notes: tuple[str, ...] = ()
        self._quantized: dict[str, QuantizedWeight] = {}
        self._described: dict[str, Tensor] = {}
        quantization = self._quantization()
        if quantization is not None:
            self._read_quantized(quantization)

    def _quantization(self) -> Any:
        """How the weights are quantised, also where older writers put it."""
        for key in ("quantization_config", "compression_config"):
            if self.config.get(key) is not None:
                return self.config[key]
        for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
            if (self.path / name).is_file():
                return {"quant_method": method, **read_json_object(self.path / name)}
        return None

    def _read_quantized(self, quantization: Any) -> None:
        """Find the weights that are made of several stored tensors, and say which of these they take up."""
        method, settings = find_method(quantization)
        stored = StoredTensors(str(self.path), self._owner, lambda name: self._owner[name].stored(name))
        self._quantized = method.read(settings, stored)
        owners: dict[str, str] = {}
        for name, weight in self._quantized.items():
            if name in self._owner and name not in weight.parts:
                raise stored.error(name, "is stored whole and quantised")
            for part in weight.parts:
                if owners.setdefault(part, name) != name:
                    raise stored.error(part, f"belongs to both {owners[part][:200]!r} and {name[:200]!r}")
        self._parts = owners
        self.notes = tuple(settings.notes)

    def _shards(self) -> list[tuple[Path, list[str]]]:
        """The weight files, each with the tensors the index promises in it."""
        index_path = self.path / INDEX_NAME
        if index_path.is_file():
            weight_map = read_json_object(index_path).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise WeightsError(f"{index_path}: weight_map is missing or not an object of file names")
            promised: dict[str, list[str]] = {}
            for name, file_name in weight_map.items():
                if not isinstance(file_name, str) or not is_plain_name(file_name):
                    raise WeightsError(
                        f"{index_path}: tensor {name[:200]!r} is in {str(file_name)[:120]!r}, which is not the "
                        "name of a .safetensors file of the same directory"
                    )
                promised.setdefault(file_name, []).append(name)
            return [(self.path / file_name, names) for file_name, names in sorted(promised.items())]
        if (self.path / SINGLE_NAME).is_file():
            return [(self.path / SINGLE_NAME, [])]
        found = sorted(self.path.glob("*.safetensors"))
        if len(found) == 1:
            return [(found[0], [])]
        if found:
            raise WeightsError(
                f"{self.path}: {len(found)} .safetensors files but no {INDEX_NAME} that says what is where"
            )
        raise WeightsError(
            f"{self.path}: no .safetensors files; pickled weights (.bin, .pth) are never read, convert them"
        )

    def names(self) -> list[str]:
        if not self._quantized:
            return list(self._owner)
        # A quantised weight stands where the first of its parts does.
        return list(dict.fromkeys(self._parts.get(name, name) for name in self._owner))

    def tensor(self, name: str) -> Tensor:
        if name in self._quantized:
            if name not in self._described:
                self._described[name] = self._quantized[name].make()
            return self._described[name]
        shard = self._owner.get(name)
        if shard is None:
            raise WeightsError(f"{self.path}: has no tensor {name!r}")
        return shard.tensor(name)

    def close(self) -> None:
        self._owner, self._quantized, self._described = {}, {}, {}


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is a .safetensors file name without any directory part."""
    return name.endswith(".safetensors") and name == Path(name).name and not any(char in name for char in "/\\:\0")
