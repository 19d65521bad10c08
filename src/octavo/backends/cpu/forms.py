"""The packed form that the weights of a linear run in: the one that holds them without loss, or the one asked for."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from octavo._native import Act, Form, PackedWeight
from octavo.errors import ModelError, WeightsError
from octavo.quantization import quantized_view
from octavo.quantization.float8 import float8_view
from octavo.quantization.rotation import ROTATION_BLOCK, WIDE_ROTATION_BLOCK, rotated_view
from octavo.quantization.views import GROUP
from octavo.weights.built import BuiltRows
from octavo.weights.tensors import AffineRows, AffineTensor, DenseTensor, Int32Array, TableRows, TableTensor, Tensor

__all__ = [
    "QUANTIZATIONS",
    "InputOrder",
    "WeightForm",
    "affine_rows",
    "choose_form",
    "is_lossy",
    "shares_form",
    "table_rows",
]

# "f32" keeps float32 weights and activations: for tests and as a yardstick, not offered to users.
QUANTIZATIONS = (None, "none", "w8", "w8-wide", "w8-channel", "w4", "w4-g32", "w4-g64", "w4-g128", "fp8", "f32")

_BITS: Mapping[str | None, Literal[4, 8]] = {
    "w8": 8, "w8-wide": 8, "w8-channel": 8, "w4": 4, "w4-g32": 4, "w4-g64": 4, "w4-g128": 4
}  # fmt: skip
# k per scale and minimum, where the width of a tensor is a multiple of it.
_W4_GROUPS: Mapping[str | None, int] = {"w4": 32, "w4-g32": 32, "w4-g64": 64, "w4-g128": 128}
# k per scale of "w8-wide", the first that divides k: the wider, the less is done besides integer products.
_WIDE_GROUPS = (192, 128, 64)


# Native forms of what TableTensor calls its kinds, except for tables of integers.
_TABLE_FORMS: Mapping[str, Form] = {"lut4": Form.Lut4F, "e4m3": Form.E4M3, "e5m2": Form.E5M2}
_FORM_NAMES = {Form.F32: "f32", Form.BF16: "bf16", Form.Lut4F: "lut4", Form.E4M3: "e4m3", Form.E5M2: "e5m2"}


class InputOrder:
    """The order in which the input of a linear is read, as a value that can be compared."""

    def __init__(self, order: Int32Array) -> None:
        self.indices = np.ascontiguousarray(order, np.int32)
        self._bytes = self.indices.tobytes()

    def as_text(self) -> str:
        """As base64 of 32-bit numbers, for the manifest of a built model."""
        return base64.b64encode(self.indices.astype("<i4").tobytes()).decode()

    @classmethod
    def from_text(cls, text: str) -> InputOrder:
        """What as_text gave; a ValueError for anything else."""
        return cls(np.frombuffer(base64.b64decode(text, validate=True), "<i4"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputOrder) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return hash(self._bytes)


@dataclass(frozen=True)
class WeightForm:
    """A packed form: what `PackedWeight` needs to know besides the shape.

    `group` is 0 for bf16 and f32, and for one scale per column of a k that is not a multiple of 32. `rotation` is the
    block of k that is rotated, 0 for none. `table` is that of 4-bit codes. With an `order` element j of a packed column
    belongs to element order[j] of the input.
    """

    form: Form
    group: int = 0
    zero: int = 0
    minimum: bool = False
    scale_f16: bool = False
    rotation: int = 0
    table: tuple[float, ...] = ()
    order: InputOrder | None = None

    @property
    def affine(self) -> bool:
        return self.form in (Form.W8, Form.W4)

    @property
    def tabular(self) -> bool:
        """Whether codes stand for the numbers of a table, that of the form or of an 8-bit float."""
        return self.form in (Form.Lut4, Form.Lut4F, Form.E4M3, Form.E5M2)

    @property
    def wide(self) -> bool:
        """Whether activations have one scale for a whole group of the weights, and that of more than 32."""
        return self.rotation == WIDE_ROTATION_BLOCK

    @property
    def activation(self) -> tuple[Act, int, int]:
        """The activations this form is multiplied with: kind, k per scale for int8, block of their rotation."""
        if self.affine or self.form == Form.Lut4:
            return Act.I8, self.group if self.wide or self.group == 16 else 32, self.rotation
        return (Act.F32 if self.form == Form.F32 else Act.BF16), 32, 0

    def nbytes(self, columns: int, k: int) -> int:
        """Packed size of a weight of this form, padding included."""
        return int(PackedWeight.bytes_needed(self.form, columns, k, self.group, self.minimum, self.scale_f16))

    def as_record(self) -> dict[str, Any]:
        """The form as plain values, as the manifest of a built model has it."""
        table = " ".join(map(repr, self.table)) if self.table else None
        order = None if self.order is None else self.order.as_text()
        return {**asdict(replace(self, table=(), order=None)), "form": self.form.name, "table": table, "order": order}

    @classmethod
    def from_record(cls, rows: BuiltRows) -> WeightForm:
        """The form that a built model's manifest gives for some rows."""
        record: dict[str, Any] = dict(rows.weight.form)
        try:
            table = tuple(float(value) for value in str(record["table"] or "").split())
            order = None if record["order"] is None else InputOrder.from_text(record["order"])
            return cls(**{**record, "form": getattr(Form, record["form"]), "table": table, "order": order})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"{rows.path}: tensor {rows.name!r} is in a form this octavo does not know ({error}); build it again"
            ) from error

    def __str__(self) -> str:
        if not self.affine and not self.tabular:
            return _FORM_NAMES[self.form]
        group = f"group {self.group}" if self.group else "per channel"
        if self.tabular:
            return f"lut4 {group} integers" if self.form == Form.Lut4 else f"{_FORM_NAMES[self.form]} {group}"
        kind = " affine" if self.minimum else " rotated" if self.rotation else ""
        ordered = ", input reordered" if self.order is not None else ""
        return f"w{8 if self.form == Form.W8 else 4} group {self.group}{kind}{ordered}"


def vocabulary_form(quantization: str | None) -> str | None:
    """The form of embedding and head, which 4 bits are too few for, and which are not read as 8-bit floats."""
    return "w8" if quantization in _W4_GROUPS or quantization == "fp8" else quantization


def rounded_groups(k: int, quantization: str | None, piece: int = 0) -> tuple[int, int]:
    """The k per scale and the block of the rotation of dense weights that are rounded to int8 while loading."""
    if quantization == "w8-wide":
        for group in _WIDE_GROUPS:
            if k % group == 0 and piece % group == 0:
                return group, WIDE_ROTATION_BLOCK
    rotation = ROTATION_BLOCK if k % ROTATION_BLOCK == 0 else 0
    # One scale for a whole row; those of activations stay with 32 of them.
    return (k if quantization == "w8-channel" else GROUP), rotation


def choose_form(tensors: Sequence[Tensor], quantization: str | None, piece: int = 0) -> tuple[WeightForm, list[Tensor]]:
    """The form of one linear made of `tensors` (q, k, v; gate, up; or one), and the tensors as they are to be read.

    `piece` is how much of a row of its input is made at once, 0 for all: no group of activations may be wider. Without
    `quantization` quantised tensors keep their own codes. Tensors of different affine forms share the one that holds
    them all: the wider codes, the smaller group, minima in place of unequal zero points.
    """
    if quantization not in QUANTIZATIONS:
        raise ModelError(f"quantization {quantization!r} is not one of {QUANTIZATIONS}")
    reader = tensors[0].reader
    if isinstance(reader, BuiltRows):
        return WeightForm.from_record(reader), list(tensors)
    if quantization == "f32":
        return WeightForm(Form.F32), list(tensors)
    dense = [tensor for tensor in tensors if isinstance(tensor, DenseTensor)]
    # Quantised tensors keep their own codes; what is rounded to int8 while loading loses less when rotated first.
    group = rotation = 0
    if _BITS.get(quantization) == 8 and len(dense) == len(tensors):
        group, rotation = rounded_groups(dense[0].shape[1], quantization, piece)
        if rotation:
            tensors = [rotated_view(tensor, rotation) for tensor in dense]
    if quantization == "fp8":
        tensors = [float8_view(tensor) if isinstance(tensor, DenseTensor) else tensor for tensor in tensors]
    if quantization in _BITS:
        bits = _BITS[quantization]
        group = group or _W4_GROUPS.get(quantization, GROUP)
        # Codes of a table are as few bits as were asked for, or fewer, and more exact.
        kept = [isinstance(tensor, TableTensor) and tensor.bits <= bits for tensor in tensors]
        tensors = [
            tensor if keep else quantized_view(tensor, bits, group) for tensor, keep in zip(tensors, kept, strict=True)
        ]
    if quantization != "none" and all(isinstance(tensor, TableTensor) for tensor in tensors):
        return _table_form([tensor for tensor in tensors if isinstance(tensor, TableTensor)]), list(tensors)
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
        group = _whole(affine[0], group, k)
    orders = {None if tensor.order is None else InputOrder(tensor.order) for tensor in affine}
    if len(orders) > 1:
        raise ModelError(f"tensors {', '.join(tensor.name for tensor in affine)} read their input in different orders")
    # A zero point folded into a minimum may need more bits than an f16 has.
    folded = minimum and any(tensor.zero for tensor in affine)
    form = WeightForm(
        Form.W8 if any(tensor.bits == 8 for tensor in affine) else Form.W4,
        group,
        zero,
        minimum,
        scale_f16=not folded and all(tensor.scale_dtype == "f16" for tensor in affine),
        rotation=rotation,
        order=orders.pop(),
    )
    return form, list(affine)


def _whole(tensor: Tensor, group: int, k: int) -> int:
    """0, for one scale per column, in place of a group the kernels do not have."""
    if group != k:
        raise ModelError(f"tensor {tensor.name}: has groups of {group}; groups of 16 and multiples of 32 can be run")
    return 0


def _table_form(tensors: Sequence[TableTensor]) -> WeightForm:
    """The form of tensors that share a table; the smallest of their groups."""
    first, group = tensors[0], min(tensor.group for tensor in tensors)
    k = first.shape[1]
    if any(
        (tensor.kind, tensor.table[:16]) != (first.kind, first.table[:16]) or tensor.group % group for tensor in tensors
    ):
        raise ModelError(f"tensors {', '.join(tensor.name for tensor in tensors)} have no table or no group in common")
    if group != 16 and group % 32:
        group = _whole(first, group, k)
    table = first.table if first.kind == "lut4" else ()
    whole = all(value.is_integer() and abs(value) <= 127 for value in table)
    form = Form.Lut4 if table and whole else _TABLE_FORMS[first.kind]
    return WeightForm(form, group, scale_f16=all(tensor.scale_dtype == "f16" for tensor in tensors), table=table)


def shares_form(tensors: Sequence[Tensor], quantization: str | None, piece: int = 0) -> bool:
    """Whether tensors side by side in one linear have a form that loses nothing but what was asked for."""
    if len(tensors) == 1 or quantization in ("none", "f32"):
        return True
    reader = tensors[0].reader
    if isinstance(reader, BuiltRows):
        return len(reader.weight.names) == len(tensors)
    try:
        form, _ = choose_form(tensors, quantization, piece)
    except ModelError:
        return False
    return form.form != Form.BF16 or all(isinstance(tensor, DenseTensor) for tensor in tensors)


def table_rows(tensor: TableTensor, form: WeightForm, start: int, stop: int) -> TableRows:
    """Rows of a tensor in a form `choose_form` gave for it: the same codes, scales in the form's group."""
    codes, scales = tensor.read(start, stop)
    k = tensor.shape[1]
    group = form.group or k
    repeats = tensor.group // group if tensor.group > group else 1
    return TableRows(codes, np.repeat(scales, repeats, axis=1)[:, : -(-k // group)])


def affine_rows(tensor: AffineTensor, form: WeightForm, start: int, stop: int) -> AffineRows:
    """Rows of a tensor in a form `choose_form` gave for it: the same values in the form's group and zero point."""
    codes, scales, minimums = tensor.read(start, stop)
    repeats = min(tensor.group, tensor.shape[1]) // (form.group or tensor.shape[1])
    if repeats > 1:
        scales = np.repeat(scales, repeats, axis=1)
        minimums = None if minimums is None else np.repeat(minimums, repeats, axis=1)
    if form.minimum:
        with np.errstate(invalid="ignore"):  # a damaged scale may be infinite
            offset = scales * np.float32(-tensor.zero)
        minimums = offset if minimums is None else minimums + offset if tensor.zero else minimums
    return AffineRows(codes, scales, minimums)


def is_lossy(tensor: Tensor, form: WeightForm) -> bool:
    """Whether running `tensor` in `form` changes its values: f32 or f16 rounded to bf16, or quantised while loading."""
    if isinstance(tensor, DenseTensor):
        return form.form == Form.BF16 and tensor.dtype != "bf16"
    return form.form == Form.BF16 or (isinstance(tensor, AffineTensor) and not tensor.exact)
