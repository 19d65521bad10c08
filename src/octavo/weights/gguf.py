"""A GGUF model as a checkpoint: Hugging Face names, row reordering undone, quantised tensors as they are stored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import WeightsError
from octavo.weights.gguf_architectures import PlacedPiece, RowOrder, pieces_of
from octavo.weights.gguf_config import (
    LONG_FACTORS_NAME,
    ROPE_FACTORS_NAME,
    SHORT_FACTORS_NAME,
    RopeFactors,
    find_architecture,
    translate_config,
    translate_generation_config,
)
from octavo.weights.gguf_readers import gguf_tensor, latent_expansion, row_view, shifted_view
from octavo.weights.gguf_split import PlacedTensor, open_parts
from octavo.weights.row_views import matrix_of_stack, picked_view
from octavo.weights.tensors import DenseTensor, Float32Array, Tensor

__all__ = ["GgufCheckpoint"]

_log = logging.getLogger(__name__)

MAX_EXPERTS = 4096
FACTOR_NAMES = (ROPE_FACTORS_NAME, LONG_FACTORS_NAME, SHORT_FACTORS_NAME)


class _Source(NamedTuple):
    """Where a weight is: the tensor, and which part of it."""

    tensor: PlacedTensor
    place: PlacedPiece


class GgufCheckpoint:
    """A GGUF file, or the several of a split model (``path`` may be any of them)."""

    format = "gguf"
    notes: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files, tensors = open_parts(path)
        lead = self._files[0]
        self.gguf_metadata: Mapping[str, Any] | None = lead.metadata
        self._architecture = find_architecture(lead, tensors)
        self._stored: dict[str, _Source] = {}
        self._halves: dict[str, dict[str, PlacedTensor]] = {}
        rounded = 0
        for name, tensor in tensors.items():
            if name in FACTOR_NAMES:
                continue
            self._place(name, tensor)
            rounded += tensor.info.type == "F64"
        if rounded:
            _log.warning("%s: %d tensors stored as F64 are rounded to f32", path, rounded)
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.info.shape) != 2:
            raise WeightsError(f"{path}: has no matrix 'token_embd.weight' (a vocabulary-only file cannot be run)")
        factors = RopeFactors(*(self._factors(name, tensors.get(name)) for name in FACTOR_NAMES))
        self.config, self._heads = translate_config(lead, self._architecture, tensors, embedding.info.shape[0], factors)
        self.generation_config = translate_generation_config(lead)

    def _place(self, name: str, tensor: PlacedTensor) -> None:
        """Note the weights that a tensor holds."""
        shape = tensor.info.shape
        places = list(pieces_of(self._architecture, name, min(shape[0], MAX_EXPERTS)))
        if not places:
            raise WeightsError(f"{self.path}: tensor {name!r} is none that octavo knows of this architecture")
        if places[0].expert is not None and (len(shape) < 2 or shape[0] > MAX_EXPERTS):
            raise WeightsError(
                f"{self.path}: tensor {name!r} of shape {list(shape)} is no stack of at most {MAX_EXPERTS} experts"
            )
        for place in places:
            half = place.piece.half
            if half is not None:
                self._halves.setdefault(place.name, {})[half] = tensor
                if len(self._halves[place.name]) == 2:
                    continue
            if place.name in self._stored:
                other = self._stored[place.name].tensor.info.name
                raise WeightsError(f"{self.path}: tensors {name!r} and {other!r} hold the same weight")
            self._stored[place.name] = _Source(tensor, place)

    def _factors(self, name: str, tensor: PlacedTensor | None) -> Float32Array | None:
        """A tensor of rope factors."""
        if tensor is None:
            return None
        info = tensor.info
        if info.type != "F32" or len(info.shape) != 1:
            raise WeightsError(f"{self.path}: tensor {name!r} is {info.type} {list(info.shape)}, expected F32 [n]")
        return gguf_tensor(tensor.file, info, name).read_f32().reshape(-1)

    def metadata_alone(self) -> bytes:
        """A GGUF file with this one's metadata and no tensor."""
        return self._files[0].metadata_alone()

    def names(self) -> list[str]:
        return list(self._stored)

    def tensor(self, name: str) -> Tensor:
        source = self._stored.get(name)
        if source is None:
            raise WeightsError(f"{self.path}: has no tensor {name!r}")
        (file, info), place = source
        if place.piece.half is not None:
            return self._expansion(name)
        tensor = gguf_tensor(file, info, name)
        if place.piece.row and len(info.shape) == 1 and isinstance(tensor, DenseTensor):
            tensor = row_view(tensor)
        if place.expert is not None:
            tensor = matrix_of_stack(tensor, info.shape, place.expert)
        order = self._order(source, tensor.shape[0])
        if order is not None:
            tensor = picked_view(tensor, order)
        shift = self._architecture.norm_shift
        return shifted_view(tensor, shift) if shift and name.endswith("norm.weight") else tensor

    def _expansion(self, name: str) -> Tensor:
        """A weight that two tensors hold the halves of."""
        halves = self._halves[name]
        if len(halves) < 2:
            raise WeightsError(f"{self.path}: has {next(iter(halves.values())).info.name!r} without its other half")
        keys, values = halves["keys"], halves["values"]
        stacks = (gguf_tensor(keys.file, keys.info, name), gguf_tensor(values.file, values.info, name))
        return latent_expansion(name, keys.info, values.info, stacks)

    def _order(self, source: _Source, rows: int) -> RowOrder | None:
        """The stored row of each row of a weight whose rows llama.cpp has reordered, else None."""
        rule = source.place.piece.rows
        if rule is None:
            return None
        order = rule(self._heads, rows)
        if order is None:
            raise WeightsError(
                f"{self.path}: tensor {source.tensor.info.name!r} has {rows} rows, which do not divide into "
                f"{self._heads.queries} query and {self._heads.keys} key heads"
            )
        return order

    def close(self) -> None:
        self._stored = {}
