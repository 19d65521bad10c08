"""The packed form that the weights of a linear run in: the one that holds them without loss, or the one asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo._native import Act, Form, PackedWeight
from octavo.errors import ModelError
from octavo.quantization import quantized_view
from octavo.quantization.rotation import ROTATION_BLOCK, rotated_view
from octavo.weights.tensors import AffineRows, AffineTensor, DenseTensor, Tensor

__all__ = ["QUANTIZATIONS", "WeightForm", "affine_rows", "choose_form", "is_lossy"]

# "f32" keeps float32 weights and activations: for tests and as a yardstick, not offered to users.
QUANTIZATIONS = (None, "none", "w8", "w4", "f32")

_BITS: Mapping[str | None, Literal[4, 8]] = {"w8": 8, "w4": 4}


@dataclass(frozen=True)
class WeightForm:
    """A packed form: what `PackedWeight` needs to know besides the shape.

    `group` is 0 for bf16 and f32, and for one scale per column of a k that is not a multiple of 32.
    """

    form: Form
    group: int = 0
    zero: int = 0
    minimum: bool = False
    scale_f16: bool = False
    rotated: bool = False

    @property
    def affine(self) -> bool:
        return self.form in (Form.W8, Form.W4)

    @property
    def activation(self) -> tuple[Act, int, bool]:
        """The activations this form is multiplied with: kind, k per scale for int8, whether rotated."""
        if self.affine:
            return Act.I8, 16 if self.group == 16 else 32, self.rotated
        return (Act.BF16 if self.form == Form.BF16 else Act.F32), 32, False

    def nbytes(self, columns: int, k: int) -> int:
        """Packed size of a weight of this form, padding included."""
        return int(PackedWeight.bytes_needed(self.form, columns, k, self.group, self.minimum, self.scale_f16))

    def __str__(self) -> str:
        if not self.affine:
            return "bf16" if self.form == Form.BF16 else "f32"
        kind = " affine" if self.minimum else " rotated" if self.rotated else ""
        return f"w{8 if self.form == Form.W8 else 4} group {self.group}{kind}"


def choose_form(tensors: Sequence[Tensor], quantization: str | None) -> tuple[WeightForm, list[Tensor]]:
    """The form of one linear made of `tensors` (q, k, v; gate, up; or one), and the tensors as they are to be read.

    Without `quantization` quantised tensors keep their own codes. Tensors of different affine forms share the one that
    holds them all: the wider codes, the smaller group, minima in place of unequal zero points.
    """
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"quantization {quantization!r} is not one of {QUANTIZATIONS}")
    if quantization == "f32":
        return WeightForm(Form.F32), list(tensors)
    dense = [tensor for tensor in tensors if isinstance(tensor, DenseTensor)]
    # Quantised tensors keep their own codes; what is rounded to int8 while loading loses less when rotated first.
    rotated = (
        quantization == "w8" and len(dense) == len(tensors) and not any(t.shape[1] % ROTATION_BLOCK for t in dense)
    )
    if rotated:
        tensors = [rotated_view(tensor) for tensor in dense]
    if quantization in _BITS:
        tensors = [quantized_view(tensor, _BITS[quantization]) for tensor in tensors]
    affine = [tensor for tensor in tensors if isinstance(tensor, AffineTensor)]
    if quantization == "none" or len(affine) < len(tensors):
        return WeightForm(Form.BF16), list(tensors)
    zeros = {tensor.zero for tensor in affine}
    minimum = any(tensor.has_minimum for tensor in affine) or len(zeros) > 1
    zero = 0 if minimum else zeros.pop()
    group, k = min(tensor.group for tensor in affine), affine[0].shape[1]
    if any(tensor.group % group for tensor in affine):
        raise ModelError(
            f"tensors {', '.join(tensor.name for tensor in affine)} have groups that do not divide each other: "
            f"{[tensor.group for tensor in affine]}"
        )
    if group != 16 and group % 32:
        if group != k:
            raise ModelError(
                f"tensor {affine[0].name}: has groups of {group}; groups of 16 and multiples of 32 can be run"
            )
        group = 0
    # A zero point folded into a minimum may need more bits than an f16 has.
    folded = minimum and any(tensor.zero for tensor in affine)
    form = WeightForm(
        Form.W8 if any(tensor.bits == 8 for tensor in affine) else Form.W4,
        group,
        zero,
        minimum,
        scale_f16=not folded and all(tensor.scale_dtype == "f16" for tensor in affine),
        rotated=rotated,
    )
    return form, list(affine)


def affine_rows(tensor: AffineTensor, form: WeightForm, start: int, stop: int) -> AffineRows:
    """Rows of a tensor in a form `choose_form` gave for it: the same values in the form's group and zero point."""
    codes, scales, minimums = tensor.read(start, stop)
    repeats = min(tensor.group, tensor.shape[1]) // (form.group or tensor.shape[1])
    if repeats > 1:
        scales = np.repeat(scales, repeats, axis=1)
        minimums = None if minimums is None else np.repeat(minimums, repeats, axis=1)
    if form.minimum:
        offset = scales * np.float32(-tensor.zero)
        minimums = offset if minimums is None else minimums + offset if tensor.zero else minimums
    return AffineRows(codes, scales, minimums)


def is_lossy(tensor: Tensor, form: WeightForm) -> bool:
    """Whether running `tensor` in `form` changes its values: f32 or f16 rounded to bf16, or quantised while loading."""
    if isinstance(tensor, DenseTensor):
        return form.form == Form.BF16 and tensor.dtype != "bf16"
    return form.form == Form.BF16 or not tensor.exact
