"""Writing safetensors files tensor by tensor: the header is known before any tensor is, so none is held for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import WeightsError
from octavo.weights.safetensors_files import ELEMENT_BITS

__all__ = ["OutgoingTensor", "write_safetensors", "write_sharded"]

_ALIGNMENT = 8


@dataclass(frozen=True)
class OutgoingTensor:
    """A tensor to write: its bytes come in pieces when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Any]]

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * ELEMENT_BITS[self.dtype] // 8


def write_safetensors(path: Path, tensors: Sequence[OutgoingTensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a file under another name and put it in place when it is whole. Wider types first, so all are aligned."""
    ordered = sorted(tensors, key=lambda tensor: (-ELEMENT_BITS[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    position = 0
    for tensor in ordered:
        end = position + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            written = sum(stream.write(memoryview(piece).cast("B")) for piece in tensor.pieces())
            if written != tensor.nbytes:
                raise WeightsError(f"tensor {tensor.name}: gave {written} bytes, {tensor.nbytes} were announced")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def write_sharded(folder: Path, tensors: Sequence[OutgoingTensor], shard_bytes: int = 5 << 30) -> list[Path]:
    """Write a checkpoint's tensors as model.safetensors, or as shards with an index when they are too many bytes."""
    shards: list[list[OutgoingTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", shards[0])
        return [folder / "model.safetensors"]
    paths, where = [], {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(path, shard)
        paths.append(path)
        where.update({tensor.name: path.name for tensor in shard})
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return paths
