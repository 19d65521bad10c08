"""Weights from a checkpoint into panels: where each row goes, and streaming them there a few rows at a time.

Rows that the file holds in a form the native library reads are packed by one call for all of them, rounded where they
have to be: it keeps the interpreter free for whatever else a start has to do. Others (made as they are read, or of
unusual groups) pass through numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo._native import Form, PackedWeight, PackingJob, Region, pack_stored
from octavo.backends.cpu.forms import WeightForm, affine_rows, table_rows
from octavo.weights.tensors import AffineTensor, DenseTensor, StoredRows, TableTensor, Tensor

__all__ = ["Packing", "fill_all", "interleaved_columns", "pack_all", "region_bytes", "stacked_columns"]

# Weights read at once, in elements: small enough to stay in a core's cache share, large enough to hide Python.
_ELEMENTS_AT_ONCE = 1 << 20
_PANEL = 16
# What the native library rounds: dense rows, to groups of a multiple of 16 up to this.
_DENSE_KINDS = ("BF16", "F16", "F32")
_LARGEST_ROUNDED = 256
_REGION_ALIGNMENT = 64 * 3  # a weight is up to three arrays, each 64-byte aligned

Int32Array = NDArray[np.int32]


def stacked_columns(sizes: Sequence[int]) -> tuple[list[Int32Array], int]:
    """Packed columns of weights one after another, and how many there are."""
    starts = np.cumsum([0, *sizes])
    columns = [np.arange(start, start + size, dtype=np.int32) for start, size in zip(starts, sizes, strict=False)]
    return columns, int(starts[-1])


def interleaved_columns(size: int) -> tuple[list[Int32Array], int]:
    """Packed columns of gate and up, alternating 16 by 16, so that one tile holds both halves of its outputs."""
    index = np.arange(size, dtype=np.int32)
    gate = index // _PANEL * 2 * _PANEL + index % _PANEL
    return [gate, gate + _PANEL], -(-size // _PANEL) * 2 * _PANEL


@dataclass(frozen=True)
class Packing:
    """One packed weight to be made: its tensors, the form, and the packed column of every row of each tensor."""

    tensors: tuple[Tensor, ...]
    form: WeightForm
    columns: tuple[Int32Array, ...]
    count: int

    @property
    def k(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def nbytes(self) -> int:
        return self.form.nbytes(self.count, self.k)

    def allocate(self, region: Region) -> PackedWeight:
        form = self.form
        return PackedWeight(
            region,
            form.form,
            self.count,
            self.k,
            form.group,
            form.zero,
            form.minimum,
            form.scale_f16,
            form.rotation,
            np.asarray(form.table, np.float32) if form.table else None,
        )

    def jobs(self, weight: PackedWeight) -> list[PackingJob]:
        """How the native library fills the weight from the mapped file; empty when it cannot."""
        stored = [self._stored(tensor) for tensor in self.tensors]
        return [
            PackingJob(weight, rows.kind, rows.bytes, rows.order, columns, True)
            for rows, columns in zip(stored, self.columns, strict=True)
            if rows is not None and None not in stored
        ]

    def _stored(self, tensor: Tensor) -> StoredRows | None:
        form = self.form
        if isinstance(tensor, AffineTensor):
            # One scale per column of a narrow k (group 0) is not a group the file's blocks have.
            rows = tensor.stored_rows() if form.affine and form.group else None
            if rows is None or rows.kind not in _DENSE_KINDS:
                return rows
            same = (tensor.group, tensor.zero, tensor.has_minimum) == (form.group, form.zero, form.minimum)
            native = form.scale_f16 and form.group <= _LARGEST_ROUNDED and form.group % _PANEL == 0
            return rows if same and native and rows.rotation == form.rotation else None
        rows = None if form.affine or form.tabular else tensor.stored_rows()
        return None if rows is None or rows.rotation else rows

    def fill(self, weight: PackedWeight) -> None:
        """Read the tensors and pack them; pages of the file that were read are given back."""
        step = max(1, _ELEMENTS_AT_ONCE // self.k)
        for tensor, columns in zip(self.tensors, self.columns, strict=True):
            rows = tensor.shape[0]
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                self._pack(weight, tensor, columns[start:stop], start, stop)
            tensor.release()

    def _pack(self, weight: PackedWeight, tensor: Tensor, columns: Int32Array, start: int, stop: int) -> None:
        if self.form.affine:
            assert isinstance(tensor, AffineTensor)
            codes, scales, minimums = affine_rows(tensor, self.form, start, stop)
            contiguous = np.ascontiguousarray
            lowest = None if minimums is None else contiguous(minimums, np.float32)
            weight.pack_affine(columns, contiguous(codes), contiguous(scales, np.float32), lowest)
        elif self.form.tabular:
            assert isinstance(tensor, TableTensor)
            codes, scales = table_rows(tensor, self.form, start, stop)
            weight.pack_codes(columns, np.ascontiguousarray(codes), np.ascontiguousarray(scales, np.float32))
        elif self.form.form == Form.BF16 and isinstance(tensor, DenseTensor) and tensor.dtype == "bf16":
            weight.pack_bf16(columns, np.ascontiguousarray(tensor.read_bf16(start, stop)))
        else:
            weight.pack_f32(columns, np.ascontiguousarray(tensor.read_f32(start, stop)))


def region_bytes(packings: Sequence[Packing]) -> int:
    """Memory for all of them, alignment included."""
    return sum(packing.nbytes + _REGION_ALIGNMENT for packing in packings)


def pack_all(packings: Sequence[Packing], threads: int) -> list[PackedWeight]:
    """Make every weight, with so many threads."""
    region = Region(region_bytes(packings))
    weights = [packing.allocate(region) for packing in packings]
    fill_all(packings, weights, threads)
    return weights


def fill_all(packings: Sequence[Packing], weights: Sequence[PackedWeight], threads: int) -> None:
    """Fill the weights made for `packings`, with so many threads."""
    native: list[PackingJob] = []
    others: list[tuple[Packing, PackedWeight]] = []
    for packing, weight in zip(packings, weights, strict=True):
        jobs = packing.jobs(weight)
        native += jobs
        if not jobs:
            others.append((packing, weight))
    try:
        pack_stored(native, threads)
    except OverflowError:
        # Some tensor has weights that cannot be rounded; read in Python, the error names it and them.
        others = [*zip(packings, weights, strict=True)]
    if others:
        with ThreadPoolExecutor(threads, thread_name_prefix="octavo-pack") as pool:
            for job in [pool.submit(packing.fill, weight) for packing, weight in others]:
                job.result()
