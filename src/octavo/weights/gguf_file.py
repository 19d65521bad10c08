"""The container format GGUF, versions 2 and 3: header, metadata, tensor table; every count and length is checked."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo._native import read_strings
from octavo.errors import WeightsError
from octavo.weights.gguf_blocks import BLOCK_FORMATS, DENSE_BYTES, TYPE_NAMES
from octavo.weights.mapped_file import MappedFile

__all__ = ["GgufFile", "TensorInfo"]

MAX_TENSORS = 1 << 17
MAX_KEYS = 1 << 14
MAX_KEY_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 16 << 20
MAX_NAME_BYTES = 127
MAX_DIMENSIONS = 4
MAX_ARRAY_ITEMS = 8_000_000  # in all arrays of a file together: four times the largest vocabularies with their merges
MAX_ARRAY_DEPTH = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, struct.Struct] = {
    number: struct.Struct("<" + code)
    for number, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "B",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
UINT32 = struct.Struct("<I")
UINT64 = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table; ``shape`` has the fastest dimension last, ``start`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    size: int


class GgufFile:
    """A mapped GGUF file: ``metadata`` as plain Python values, ``tensors`` by their GGUF names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        self._position = 0
        self._array_items = 0
        magic = self._take(4, "the magic number")
        if magic != b"GGUF":
            raise WeightsError(f"{path}: is not a GGUF file (it starts with {magic!r})")
        self.version = self._number(UINT32, "the version")
        if self.version not in (2, 3):
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            what = "a big-endian file" if swapped in (1, 2, 3) else f"GGUF version {self.version}"
            raise WeightsError(f"{path}: {what} is not supported; versions 2 and 3 in little-endian are")
        tensor_count = self._count("tensors", MAX_TENSORS)
        key_count = self._count("metadata keys", MAX_KEYS)
        self.metadata: dict[str, Any] = {}
        for index in range(key_count):
            key = self._string(f"the name of metadata key {index}", MAX_KEY_BYTES)
            if key in self.metadata:
                raise WeightsError(f"{path}: metadata key {key[:200]!r} appears twice")
            self.metadata[key] = self._value(self._number(UINT32, f"the type of {key[:200]!r}"), key[:200], 0)
        self._metadata_end = self._position
        self.tensors = self._tensor_table(tensor_count, self._alignment())

    def metadata_alone(self) -> bytes:
        """The file without its tensors: a GGUF file of its own."""
        header = self.file.map[:8] + UINT64.pack(0)
        return header + self.file.map[len(header) : self._metadata_end]

    def _take(self, count: int, what: str) -> bytes:
        start, stop = self._position, self._position + count
        if stop > self.file.size:
            raise WeightsError(
                f"{self.path}: truncated: {what} needs bytes [{start}, {stop}), the file has {self.file.size}"
            )
        self._position = stop
        return self.file.map[start:stop]

    def _number(self, kind: struct.Struct, what: str) -> Any:
        return kind.unpack(self._take(kind.size, what))[0]

    def _count(self, what: str, limit: int) -> int:
        count: int = self._number(UINT64, f"the number of {what}")
        if count > limit:
            raise WeightsError(f"{self.path}: claims {count} {what}, the limit is {limit}")
        return count

    def _string(self, what: str, limit: int) -> str:
        length = self._number(UINT64, f"the length of {what}")
        if length > limit:
            raise WeightsError(f"{self.path}: {what} claims {length} bytes, the limit is {limit}")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path}: {what} is not UTF-8 (byte {error.start})") from error

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind == STRING:
            return self._string(f"the value of {key!r}", MAX_STRING_BYTES)
        if kind == ARRAY:
            return self._array(key, depth + 1)
        scalar = SCALARS.get(kind)
        if scalar is None:
            raise WeightsError(f"{self.path}: metadata key {key!r} has unknown value type {kind}")
        value = self._number(scalar, f"the value of {key!r}")
        if kind == BOOL:
            self._check_booleans([value], key)
            return bool(value)
        return value

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            raise WeightsError(f"{self.path}: metadata key {key!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        kind = self._number(UINT32, f"the item type of {key!r}")
        count = self._number(UINT64, f"the number of items of {key!r}")
        self._array_items += count
        if self._array_items > MAX_ARRAY_ITEMS:
            raise WeightsError(
                f"{self.path}: metadata key {key!r} claims {count} items, "
                f"the limit is {MAX_ARRAY_ITEMS} in all arrays together"
            )
        if kind == STRING:
            return self._strings(key, count)
        if kind == ARRAY:
            return [self._array(key, depth + 1) for _ in range(count)]
        scalar = SCALARS.get(kind)
        if scalar is None:
            raise WeightsError(f"{self.path}: metadata key {key!r} has unknown item type {kind}")
        raw = self._take(count * scalar.size, f"the {count} items of {key!r}")
        items = list(struct.unpack(f"<{count}{scalar.format[-1]}", raw))
        if kind == BOOL:
            self._check_booleans(items, key)
            return [bool(item) for item in items]
        return items

    def _strings(self, key: str, count: int) -> list[str]:
        """A list of strings, read natively: vocabularies and merges are most of what a file's header holds."""
        strings, self._position = read_strings(self.file.bytes, self._position, count, MAX_STRING_BYTES)
        if len(strings) < count:
            raise self._wrong_string(key, len(strings), count)
        return strings

    def _wrong_string(self, key: str, index: int, count: int) -> WeightsError:
        """What is wrong with the string of an array that reading stopped at."""
        start, size = self._position + 8, self.file.size
        if start > size:
            return WeightsError(f"{self.path}: truncated: {key!r} claims {count} strings, the file ends after {index}")
        (length,) = UINT64.unpack_from(self.file.map, self._position)
        if length > min(size - start, MAX_STRING_BYTES):
            what = f"claims {length} bytes at {start}, the file has {size}"
        else:
            what = "is not UTF-8"
        return WeightsError(f"{self.path}: item {index} of {key!r} {what}")

    def _check_booleans(self, items: list[int], key: str) -> None:
        if any(item > 1 for item in items):
            raise WeightsError(f"{self.path}: metadata key {key!r} has a boolean that is neither 0 nor 1")

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        valid = type(alignment) is int and 1 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
        if not valid:
            raise WeightsError(
                f"{self.path}: general.alignment is {alignment!r:.60}, not a power of two up to {MAX_ALIGNMENT}"
            )
        return int(alignment)

    def _tensor_table(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        rows: dict[str, tuple[tuple[int, ...], str, int, int]] = {}
        for index in range(count):
            name = self._string(f"the name of tensor {index}", MAX_NAME_BYTES)
            where = f"{self.path}: tensor {name!r}"
            if name in rows:
                raise WeightsError(f"{where}: appears twice")
            dimensions = self._number(UINT32, f"the dimensions of {name!r}")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise WeightsError(f"{where}: has {dimensions} dimensions, 1 to {MAX_DIMENSIONS} are possible")
            sizes = [self._number(UINT64, f"the shape of {name!r}") for _ in range(dimensions)]
            number = self._number(UINT32, f"the type of {name!r}")
            offset = self._number(UINT64, f"the offset of {name!r}")
            kind = TYPE_NAMES.get(number, f"number {number}")
            size = self._stored_size(where, kind, sizes)
            if offset % alignment:
                raise WeightsError(f"{where}: starts at {offset}, which is not a multiple of the alignment {alignment}")
            rows[name] = (tuple(reversed(sizes)), kind, offset, size)
        data_start = -(-self._position // alignment) * alignment
        available = max(self.file.size - data_start, 0)
        end, before = 0, ""
        for name, (_, _, offset, size) in sorted(rows.items(), key=lambda item: item[1][2]):
            if offset < end:
                raise WeightsError(f"{self.path}: tensor {name!r} at {offset} overlaps {before!r}, which ends at {end}")
            end, before = offset + size, name
            if end > available:
                raise WeightsError(
                    f"{self.path}: truncated: tensor {name!r} needs bytes [{offset}, {end}) of the data, "
                    f"the file has {available}"
                )
        return {
            name: TensorInfo(name, shape, kind, data_start + at, size) for name, (shape, kind, at, size) in rows.items()
        }

    def _stored_size(self, where: str, kind: str, sizes: list[int]) -> int:
        """The bytes a tensor takes, its type and shape checked; ``sizes`` has the fastest dimension first."""
        if min(sizes) < 1:
            raise WeightsError(f"{where}: has an empty dimension in its shape {sizes}")
        elements = math.prod(sizes)
        if kind in DENSE_BYTES:
            return elements * DENSE_BYTES[kind]
        block = BLOCK_FORMATS.get(kind)
        if block is None:
            supported = ", ".join([*DENSE_BYTES, *BLOCK_FORMATS])
            raise WeightsError(f"{where}: has type {kind}, which is not supported; supported are {supported}")
        if sizes[0] % block.block_values:
            raise WeightsError(
                f"{where}: its rows of {sizes[0]} values do not divide into {kind} blocks of {block.block_values}"
            )
        return elements // block.block_values * block.block_bytes
