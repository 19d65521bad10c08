"""Importance matrices of llama.cpp: how strongly each input of each linear was driven over a calibration text.

Two file kinds are read, GGUF (tensors NAME.in_sum2 and NAME.counts in F32) and the older .dat. Both give the mean
square of every input channel, for stacks of experts one row each. Layout: llama.cpp, tools/imatrix.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.errors import WeightsError
from octavo.weights.gguf_file import MAX_NAME_BYTES, MAX_TENSORS, GgufFile, TensorInfo
from octavo.weights.mapped_file import MappedFile
from octavo.weights.tensors import Float32Array

__all__ = ["Importance", "ImportanceMatrix", "read_imatrix"]

MAX_DATASET_BYTES = 1 << 16
MAX_VALUES = 1 << 27  # of one tensor, experts times inputs
SUMS, COUNTS = ".in_sum2", ".counts"
INT32 = struct.Struct("<i")


@dataclass(frozen=True)
class Importance:
    """What was measured of one weight: mean squares [experts or 1, k], and of how many inputs each row is the mean.

    A row of which nothing was measured (an expert no token went to) is all ones: every channel matters alike.
    """

    mean_squares: Float32Array
    counts: tuple[int, ...]


@dataclass(frozen=True)
class ImportanceMatrix:
    """A whole file; ``entries`` go by GGUF names (blk.0.attn_q.weight). What an old file does not say is 0 or empty."""

    path: Path
    entries: Mapping[str, Importance]
    datasets: tuple[str, ...] = ()
    chunk_count: int = 0
    chunk_size: int = 0


def read_imatrix(path: str | Path) -> ImportanceMatrix:
    """Read an importance matrix of either kind; WeightsError for anything else, naming the tensor and what is wrong."""
    location = Path(path)
    file = MappedFile(location)
    return read_gguf(location) if file.map[:4] == b"GGUF" else read_legacy(location, file)


def read_gguf(path: Path) -> ImportanceMatrix:
    """The GGUF kind: sums of squares and counts, the latter one per expert."""
    file = GgufFile(path)
    kind = file.metadata.get("general.type")
    if kind != "imatrix":
        raise WeightsError(f"{path}: is a GGUF file of type {kind!r:.60}, not an importance matrix")
    parts: dict[str, dict[str, TensorInfo]] = {}
    for name, info in file.tensors.items():
        suffix = next((suffix for suffix in (SUMS, COUNTS) if name.endswith(suffix)), None)
        if suffix is None:
            continue  # later versions may keep more
        if info.type != "F32":
            raise WeightsError(f"{path}: tensor {name!r} is {info.type}, an importance matrix has F32")
        parts.setdefault(name.removesuffix(suffix), {})[suffix] = info
    entries = {}
    for name, both in parts.items():
        if len(both) < 2:
            raise WeightsError(f"{path}: has {next(iter(both.values())).name!r} without its other half")
        sums, counts = (_values(file, both[suffix]) for suffix in (SUMS, COUNTS))
        if sums.size % counts.size or sums.size > MAX_VALUES:
            raise WeightsError(f"{path}: {name + SUMS!r} has {sums.size} values for {counts.size} counts")
        entries[name] = _importance(path, name, sums.reshape(counts.size, -1), counts)
    return ImportanceMatrix(
        path,
        _some(path, entries),
        tuple(str(item) for item in _list(file.metadata.get("imatrix.datasets"))),
        _whole(file.metadata.get("imatrix.chunk_count")),
        _whole(file.metadata.get("imatrix.chunk_size")),
    )


def read_legacy(path: Path, file: MappedFile) -> ImportanceMatrix:
    """The older kind: a number of entries, each a name, how often it was run, and means times that number."""
    reader = _Reader(path, file)
    count = reader.integer("the number of entries", 1, MAX_TENSORS)
    entries: dict[str, Importance] = {}
    for index in range(count):
        name = reader.text(f"the name of entry {index}", MAX_NAME_BYTES)
        if name in entries:
            raise WeightsError(f"{path}: entry {name!r} appears twice")
        calls = reader.integer(f"the runs of {name!r}", 0, (1 << 31) - 1)
        size = reader.integer(f"the number of values of {name!r}", 1, MAX_VALUES)
        raw = reader.take(4 * size, f"the {size} values of {name!r}")
        sums = np.frombuffer(raw, dtype="<f4").reshape(1, size)
        # With no runs noted the values are means already.
        entries[name] = _importance(path, name, sums, np.array([calls or 1], dtype=np.float32))
    chunks = 0
    datasets: tuple[str, ...] = ()
    if not reader.at_end:
        chunks = reader.integer("the number of chunks", 0, (1 << 31) - 1)
        if not reader.at_end:
            datasets = (reader.text("the name of the data set", MAX_DATASET_BYTES),)
    if not reader.at_end:
        raise WeightsError(f"{path}: has bytes after its end; it is not an importance matrix, or a damaged one")
    return ImportanceMatrix(path, _some(path, entries), datasets, chunks)


class _Reader:
    """A position in a file of 32-bit numbers and strings."""

    def __init__(self, path: Path, file: MappedFile) -> None:
        self.path, self.file, self.position = path, file, 0

    @property
    def at_end(self) -> bool:
        return self.position == self.file.size

    def take(self, size: int, what: str) -> bytes:
        start, stop = self.position, self.position + size
        if stop > self.file.size:
            raise WeightsError(
                f"{self.path}: truncated, or no importance matrix: {what} needs bytes [{start}, {stop}), "
                f"the file has {self.file.size}"
            )
        self.position = stop
        return self.file.map[start:stop]

    def integer(self, what: str, least: int, most: int) -> int:
        value: int = INT32.unpack(self.take(4, what))[0]
        if not least <= value <= most:
            raise WeightsError(f"{self.path}: is no importance matrix: {what} is {value}, not {least} to {most}")
        return value

    def text(self, what: str, limit: int) -> str:
        size = self.integer(f"the length of {what}", 1, limit)
        try:
            return self.take(size, what).decode("utf-8").rstrip("\0")
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path}: {what} is not UTF-8 (byte {error.start})") from error


def _values(file: GgufFile, info: TensorInfo) -> Float32Array:
    return file.file.bytes[info.start : info.start + info.size].view("<f4")


def _importance(path: Path, name: str, sums: Float32Array, counts: Float32Array) -> Importance:
    if not (np.isfinite(sums).all() and np.isfinite(counts).all() and (sums >= 0).all() and (counts >= 0).all()):
        raise WeightsError(f"{path}: entry {name!r} has a sum or count that is negative or not a number")
    if counts.max(initial=0) >= 1 << 53:
        raise WeightsError(f"{path}: entry {name!r} has a count of {counts.max()}")
    whole = np.rint(counts).reshape(-1, 1)
    means = np.where(whole > 0, sums / np.maximum(whole, 1), 1).astype(np.float32)
    return Importance(means, tuple(int(count) for count in whole[:, 0]))


def _some(path: Path, entries: dict[str, Importance]) -> dict[str, Importance]:
    if not entries:
        raise WeightsError(f"{path}: is an importance matrix without entries")
    return entries


def _whole(value: object) -> int:
    return value if type(value) is int else 0


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
