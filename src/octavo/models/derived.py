"""Weights that are views of checkpoint tensors: rows of fused or interleaved projections, transposes, parts of stacks.

A graph names such a weight and says what it is of; whoever reads the checkpoint reads it through `derived_source`, as a
tensor like any other. Nothing is copied: rows are read from where they are stored, and those of a quantised tensor stay
the codes they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.weights.built import BuiltCheckpoint
from octavo.weights.row_views import (
    RowOrder,
    matrix_of_stack,
    picked_view,
    row_lengths,
    scaled_view,
    transposed_view,
    unit_rows_view,
)
from octavo.weights.tensors import Tensor

__all__ = ["Derived", "Rows", "TensorSource", "check_views", "derived_source", "rotated_pairs"]

_OFFSETS_SHOWN = 6


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint, or one seen through `derived_source`."""

    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Rows:
    """The rows at `offsets` of every `period` rows, block after block; of all rows at once when `period` is 0."""

    offsets: range | tuple[int, ...]
    period: int = 0

    def order(self, rows: int) -> RowOrder:
        """The indices picked of a matrix of so many rows."""
        period, picked = self.period or rows, self.offsets
        # Stacks of experts have thousands of ranges: they are not walked through in Python.
        if isinstance(picked, range):
            offsets = np.arange(picked.start, picked.stop, picked.step, dtype=np.int64)
        else:
            offsets = np.asarray(picked, np.int64)
        if not offsets.size or offsets.min() < 0 or offsets.max() >= period or rows % period:
            raise ModelError(f"rows {self} cannot be picked of {rows}")
        starts = np.arange(0, rows, period, dtype=np.int64)
        return (starts[:, None] + offsets[None, :]).reshape(-1)

    def __str__(self) -> str:
        offsets = self.offsets
        if isinstance(offsets, range) and abs(offsets.step) == 1 and len(offsets) > 1:
            text = f"{offsets[0]} to {offsets[-1]}"
        elif len(offsets) > _OFFSETS_SHOWN:
            text = f"{', '.join(map(str, offsets[:_OFFSETS_SHOWN]))}, ... ({len(offsets)})"
        else:
            text = ", ".join(map(str, offsets))
        return text + (f" of every {self.period}" if self.period else "")


@dataclass(frozen=True)
class Derived:
    """A weight made of tensor `source` of `shape`: entry `part` of the stack, its transpose, rows of that, scaled."""

    source: str
    shape: tuple[int, ...]
    part: int | None = None
    transposed: bool = False
    rows: Rows | None = None
    scale: float = 1.0
    unit_rows: bool = False

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of what rows are picked of."""
        shape = self.shape if self.part is None else self.shape[1:]
        wrong = not shape or (self.part is not None and not 0 <= self.part < self.shape[0])
        if wrong or (self.transposed and len(shape) != 2):
            raise ModelError(f"tensor {self.source} of shape {self.shape} has no view ({self})")
        return shape[::-1] if self.transposed else shape

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the weight."""
        whole = self.whole
        return whole if self.rows is None else (self.rows.order(whole[0]).size, *whole[1:])

    def view(self, tensor: Tensor) -> Tensor:
        """The weight as a tensor that reads from `tensor`."""
        whole = self.whole
        if self.part is not None:
            tensor = matrix_of_stack(tensor, self.shape, self.part)
        if self.transposed:
            tensor = transposed_view(tensor)
        if self.rows is not None:
            tensor = picked_view(tensor, self.rows.order(whole[0]))
        if self.unit_rows:
            tensor = unit_rows_view(tensor)
        return tensor if self.scale == 1.0 else scaled_view(tensor, self.scale)

    def array(self, values: NDArray[Any]) -> NDArray[Any]:
        """The weight as an array, of the source as one."""
        if self.part is not None:
            values = values.reshape(self.shape)[self.part]
        if self.transposed:
            values = values.T
        if self.rows is not None:
            values = values[self.rows.order(values.shape[0])]
        if self.unit_rows:
            values = values / row_lengths(values)[:, None]
        return values if self.scale == 1.0 else values * np.float32(self.scale)

    def __str__(self) -> str:
        parts = [] if self.part is None else [f"entry {self.part}"]
        parts += ["transposed"] * self.transposed
        parts += [] if self.rows is None else [f"rows {self.rows}"]
        parts += ["rows of length 1"] * self.unit_rows
        parts += [] if self.scale == 1.0 else [f"times {self.scale:g}"]
        return ", ".join(parts) or "all"


def check_views(source: str, views: Mapping[str, Derived]) -> None:
    """Refuse views of one tensor unless every row of it is in exactly one of them."""
    first = next(iter(views.values()))
    whole = first.whole
    uses = np.zeros((1 if first.part is None else first.shape[0], whole[0]), np.int64)
    for name, view in views.items():
        if (view.shape, view.transposed, view.part is None) != (first.shape, first.transposed, first.part is None):
            raise ModelError(f"weight {name}: {source} is viewed in two ways ({view}; {first})")
        np.add.at(uses[view.part or 0], (view.rows or Rows(range(whole[0]))).order(whole[0]), 1)
    wrong = np.argwhere(uses != 1)
    if wrong.size:
        part, row = (int(index) for index in wrong[0])
        entry = "" if first.part is None else f"entry {part}, "
        raise ModelError(f"tensor {source}: {entry}row {row} is in {int(uses[part, row])} weights, must be in one")


def rotated_pairs(head_dim: int, rotary_dim: int | None = None) -> Rows:
    """The rows of q or k with rotated pairs (0, 1), (2, 3), ... in the order of pairs (0, d/2), (1, d/2 + 1), ...

    Both sides of every score are reordered alike, which leaves the score as it was; elements past `rotary_dim`, which
    are not rotated, stay where they are.
    """
    rotary = head_dim if rotary_dim is None else rotary_dim
    return Rows((*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, head_dim)), head_dim)


@dataclass(frozen=True)
class _DerivedSource:
    """A source of tensors that also knows the derived ones."""

    source: TensorSource
    derived: Mapping[str, Derived]

    def tensor(self, name: str) -> Tensor:
        derived = self.derived.get(name)
        if derived is None:
            return self.source.tensor(name)
        return derived.view(replace(self.source.tensor(derived.source), name=name))


def derived_source(source: TensorSource, derived: Mapping[str, Derived]) -> TensorSource:
    """The source with the derived weights of a graph among its tensors; a built model holds them as such."""
    return source if not derived or isinstance(source, BuiltCheckpoint) else _DerivedSource(source, derived)
