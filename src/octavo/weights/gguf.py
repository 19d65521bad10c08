"""A GGUF file as a checkpoint: Hugging Face names, row reordering undone, quantised tensors as they are stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import WeightsError
from octavo.weights.gguf_blocks import BLOCK_FORMATS, DENSE_TYPES, BlockFormat
from octavo.weights.gguf_config import (
    PERMUTED_ARCHITECTURES,
    ROPE_FACTORS_NAME,
    hf_name,
    translate_config,
    translate_generation_config,
)
from octavo.weights.gguf_file import GgufFile, TensorInfo
from octavo.weights.mapped_file import MappedFile
from octavo.weights.tensors import (
    AffineRows,
    AffineTensor,
    DenseTensor,
    Float32Array,
    StoredRows,
    Tensor,
    Uint8Array,
    Uint16Array,
)
from octavo.weights.views import DequantizedRows, MappedRows

__all__ = ["GgufCheckpoint"]

RowOrder = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockRows:
    """The rows of a quantised tensor in a mapped file; ``order`` gives the stored row of each, None for the same."""

    file: MappedFile
    start: int
    rows: int
    row_bytes: int
    format: BlockFormat
    order: RowOrder | None

    def block_rows(self, start: int, stop: int) -> Uint8Array:
        stored = self.file.bytes[self.start : self.start + self.rows * self.row_bytes].reshape(
            self.rows, self.row_bytes
        )
        return stored[start:stop] if self.order is None else stored[self.order[start:stop]]

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        return self.format.unpack_rows(self.block_rows(start, stop))

    def stored_rows(self) -> StoredRows:
        stored = self.file.bytes[self.start : self.start + self.rows * self.row_bytes]
        return StoredRows(self.format.name, stored, self.order)

    def release(self) -> None:
        self.file.release(self.start, self.start + self.rows * self.row_bytes)


@dataclass(frozen=True)
class ReorderedRows:
    """The rows of a dense tensor in another order."""

    stored: MappedRows
    order: RowOrder

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        reordered: Float32Array = self.stored.dense_rows(0, self.stored.rows)[self.order[start:stop]]
        return reordered

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        bits = self.stored.bit_rows(0, self.stored.rows)
        return None if bits is None else bits[self.order[start:stop]]

    def stored_rows(self) -> StoredRows:
        return self.stored.stored_rows()._replace(order=self.order)

    def release(self) -> None:
        self.stored.release()


class GgufCheckpoint:
    """One GGUF file."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        file = GgufFile(path)
        if int_or_zero(file.metadata.get("split.count")) > 1:
            raise WeightsError(
                f"{path}: is one part of a split GGUF; join the parts with llama-gguf-split --merge first"
            )
        self.gguf_metadata: Mapping[str, Any] | None = file.metadata
        self._file = file
        self._stored: dict[str, TensorInfo] = {}
        for info in file.tensors.values():
            if info.name == ROPE_FACTORS_NAME:
                continue
            name = hf_name(info.name)
            if name is None:
                raise WeightsError(f"{path}: tensor {info.name!r} belongs to no supported architecture")
            self._stored[name] = info
        embedding = self._stored.get("model.embed_tokens.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise WeightsError(f"{path}: has no matrix 'token_embd.weight' (a vocabulary-only file cannot be run)")
        self.config = translate_config(file, set(self._stored), embedding.shape[0], self._rope_factors())
        self.generation_config = translate_generation_config(file)

    def _rope_factors(self) -> Float32Array | None:
        info = self._file.tensors.get(ROPE_FACTORS_NAME)
        if info is None:
            return None
        if info.type != "F32" or len(info.shape) != 1:
            raise WeightsError(
                f"{self.path}: tensor {ROPE_FACTORS_NAME!r} is {info.type} {list(info.shape)}, expected F32 [n]"
            )
        return self._dense_rows(info).dense_rows(0, info.shape[0]).reshape(-1)

    def _dense_rows(self, info: TensorInfo) -> MappedRows:
        row_elements = math.prod(info.shape[1:])
        return MappedRows(self._file.file, info.start, row_elements, DENSE_TYPES[info.type], info.shape[0])

    def _order(self, name: str, info: TensorInfo) -> RowOrder | None:
        """The stored row of each row of a q or k projection that llama.cpp has reordered, else None."""
        if self._file.metadata["general.architecture"] not in PERMUTED_ARCHITECTURES:
            return None
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".self_attn.{part}." in name:
                count, rows = self.config[heads], info.shape[0]
                if rows % (2 * count):
                    raise WeightsError(
                        f"{self.path}: tensor {info.name!r} has {rows} rows, which do not divide into {count} heads"
                    )
                # Stored: the two halves of a head interleaved. Wanted: one half after the other.
                return np.arange(rows).reshape(count, rows // count // 2, 2).swapaxes(1, 2).reshape(rows)
        return None

    def metadata_alone(self) -> bytes:
        """A GGUF file with this one's metadata and no tensor."""
        return self._file.metadata_alone()

    def names(self) -> list[str]:
        return list(self._stored)

    def tensor(self, name: str) -> Tensor:
        info = self._stored.get(name)
        if info is None:
            raise WeightsError(f"{self.path}: has no tensor {name!r}")
        order = self._order(name, info)
        if info.type in DENSE_TYPES:
            rows = self._dense_rows(info)
            return DenseTensor(
                name, info.shape, DENSE_TYPES[info.type], rows if order is None else ReorderedRows(rows, order)
            )
        block = BLOCK_FORMATS[info.type]
        k = info.shape[-1]
        count = math.prod(info.shape[:-1])
        reader = BlockRows(
            self._file.file, info.start, count, k // block.block_values * block.block_bytes, block, order
        )
        affine = AffineTensor(
            name,
            (count, k),
            block.bits,
            block.group,
            block.zero,
            block.has_minimum,
            block.scale_dtype,
            block.name,
            True,
            reader,
        )
        if len(info.shape) == 1:
            return DenseTensor(name, info.shape, "f32", DequantizedRows(affine, vector=True))
        if len(info.shape) > 2:
            raise WeightsError(
                f"{self.path}: tensor {info.name!r} has {len(info.shape)} dimensions in {info.type}, 2 are supported"
            )
        return affine

    def close(self) -> None:
        self._stored = {}


def int_or_zero(value: Any) -> int:
    return value if type(value) is int else 0
