"""Plans of a few operations over values written by hand, for the kernel tests, and numpy's view of weight forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo._native import Act, Activation, Epilogue, Form, PackedWeight, Plan, Region, available_levels
from octavo.weights.float8 import float8_table

Array = NDArray[Any]

LEVELS = available_levels()
EPS = float(np.finfo(np.float32).eps)
_BYTES = {Act.F32: 4, Act.BF16: 2, Act.I8: 1}


def pad(size: int, multiple: int = 32) -> int:
    return -(-size // multiple) * multiple


def bf16_bits(x: Array) -> Array:
    """The nearest bf16 of each number (ties to even) as bits; a NaN stays one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), bits >> np.uint32(16) | np.uint32(0x40), rounded).astype(np.uint16)


def bf16_values(bits: Array) -> Array:
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Array) -> Array:
    """Rounded to bf16, as float32."""
    return bf16_values(bf16_bits(x))


def hadamard(size: int = 32) -> Array:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / math.sqrt(size)


def rotate(x: Array, block: int = 32) -> Array:
    """Blocks times the Hadamard matrix, in float64."""
    return (np.asarray(x, np.float64).reshape(-1, block) @ hadamard(block)).reshape(np.shape(x))


@dataclass
class Quantized:
    """int8 activations: codes [rows, width], scales and sums [rows, groups]."""

    codes: Array
    scales: Array
    scaled_sums: Array
    sums: Array

    def values(self) -> Array:
        group = self.codes.shape[1] // self.scales.shape[1]
        return self.codes * np.repeat(self.scales.astype(np.float64), group, axis=1)


def quantize(x: Array, group: int) -> Quantized:
    """What the native quantiser must give, bit for bit: every operation is one float32 operation."""
    rows, width = x.shape
    grouped = np.asarray(x, np.float32).reshape(rows, width // group, group)
    largest = np.abs(grouped).max(axis=2)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 1e-36)
    codes = np.rint(grouped * inverse[..., None]).astype(np.int32)
    scales = (largest / np.float32(127)).astype(np.float32)
    sums = codes.sum(axis=2, dtype=np.int32)
    return Quantized(codes.reshape(rows, width).astype(np.int8), scales, scales * sums.astype(np.float32), sums)


@dataclass
class Slot:
    """Where a value lies in the arena: `rows` rows of `width` elements."""

    bench: Bench
    form: Act
    width: int
    rows: int
    group: int
    rotation: int
    offset: int

    @property
    def _elements(self) -> int:
        return pad(self.rows * self.width * _BYTES[self.form], 64)

    @property
    def _groups(self) -> int:
        return pad(self.rows * (self.width // self.group) * 4, 64) if self.form == Act.I8 else 0

    @property
    def nbytes(self) -> int:
        return self._elements + 3 * self._groups

    def activation(self) -> Activation:
        start, step = self.offset + self._elements, self._groups
        return Activation(
            self.form, self.width, self.offset, self.group, start, start + step, start + 2 * step, self.rotation
        )

    def _view(self, offset: int, dtype: Any, columns: int) -> Array:
        size = self.rows * columns * np.dtype(dtype).itemsize
        view: Array = self.bench.plan.arena[offset : offset + size].view(dtype).reshape(self.rows, columns)
        return view

    @property
    def raw(self) -> Array:
        """The elements in the arena themselves: float32, bf16 bits or int8 codes."""
        dtype = {Act.F32: np.float32, Act.BF16: np.uint16, Act.I8: np.int8}[self.form]
        return self._view(self.offset, dtype, self.width)

    def write(self, x: Array) -> None:
        """Round to the slot's form; columns past those of x are zeros."""
        values = np.zeros((len(x), self.width), np.float32)
        values[:, : x.shape[1]] = x
        if self.form == Act.I8:
            self.write_quantized(quantize(values, self.group))
        else:
            self.raw[: len(x)] = values if self.form == Act.F32 else bf16_bits(values)

    def write_quantized(self, q: Quantized) -> None:
        rows = len(q.codes)
        self.raw[:rows] = q.codes
        for array, values in zip(self._group_arrays(), (q.scales, q.scaled_sums, q.sums), strict=True):
            array[:rows] = values

    def _group_arrays(self) -> list[Array]:
        groups = self.width // self.group
        start = self.offset + self._elements
        types = (np.float32, np.float32, np.int32)
        return [self._view(start + i * self._groups, dtype, groups) for i, dtype in enumerate(types)]

    def read_quantized(self, rows: int) -> Quantized:
        scales, scaled_sums, sums = (array[:rows].copy() for array in self._group_arrays())
        return Quantized(self.raw[:rows].copy(), scales, scaled_sums, sums)

    def read(self, rows: int) -> Array:
        """The values as float32 (float64 for int8)."""
        if self.form == Act.I8:
            return self.read_quantized(rows).values()
        return self.raw[:rows].copy() if self.form == Act.F32 else bf16_values(self.raw[:rows])

    def bits(self, rows: int) -> bytes:
        """Everything the value is made of, to compare bit for bit."""
        if self.form != Act.I8:
            return self.raw[:rows].tobytes()
        q = self.read_quantized(rows)
        return b"".join(part.tobytes() for part in (q.codes, q.scales, q.scaled_sums, q.sums))


def row_bits(slot: Slot, rows: int) -> list[bytes]:
    """Every row's bits, scales and sums among them."""
    if slot.form != Act.I8:
        return [row.tobytes() for row in slot.raw[:rows]]
    q = slot.read_quantized(rows)
    return [b"".join(part[i].tobytes() for part in (q.codes, q.scales, q.scaled_sums, q.sums)) for i in range(rows)]


@dataclass
class Bench:
    """Slots and the operations on them; the plan is made when it is first needed, as the arena's size is known then."""

    level: str
    rows: int
    threads: int = 2
    sequences: int = 4
    vocab: int = 8
    head_rows: int = 64
    table_stride: int = 0
    size: int = 0
    operations: list[Callable[[Plan], None]] = field(default_factory=list)
    _plan: Plan | None = None

    def slot(self, form: Act, width: int, *, group: int = 32, rotation: int = 0, rows: int | None = None) -> Slot:
        slot = Slot(self, form, width, rows or self.rows, group, rotation, self.size)
        self.size += slot.nbytes
        return slot

    def add(self, operation: Callable[[Plan], None]) -> None:
        self.operations.append(operation)

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            stride = self.table_stride or -(-self.rows // 16)
            self._plan = Plan(
                self.level, self.threads, self.rows, self.sequences, stride, self.head_rows, self.vocab, self.size
            )
            for operation in self.operations:
                operation(self._plan)
            self.operations.clear()  # they refer to the bench: a plan and its threads should go with the last reference
        return self._plan

    def run(self, rows: int | None = None) -> None:
        """One step of one sequence with `rows` tokens."""
        self.plan.starts[0], self.plan.counts[0] = 0, self.rows if rows is None else rows
        self.plan.run(1, 0)


@dataclass(frozen=True)
class Shape:
    """A packed form of weights as a test wants it. group 0 is one scale per column."""

    form: Form
    group: int = 0
    zero: int = 0
    minimum: bool = False
    scale_f16: bool = False
    rotation: int = 0
    act_group: int = 32
    table: tuple[float, ...] = ()

    @property
    def affine(self) -> bool:
        return self.form in (Form.W8, Form.W4)

    @property
    def integer(self) -> bool:
        """Whether it is multiplied with int8 activations."""
        return self.affine or self.form == Form.Lut4

    @property
    def coded(self) -> bool:
        """Whether codes stand for the numbers of a table."""
        return self.form in (Form.Lut4, Form.Lut4F, Form.E4M3, Form.E5M2)

    @property
    def act(self) -> Act:
        if self.form == Form.F32:
            return Act.F32
        return Act.I8 if self.integer else Act.BF16

    @property
    def numbers(self) -> Array:
        """What the codes of a table stand for."""
        if self.table:
            return np.asarray(self.table, np.float32)
        return np.asarray(float8_table("e4m3" if self.form == Form.E4M3 else "e5m2"), np.float32)

    def packed(self, region: Region, columns: int, k: int) -> PackedWeight:
        """An empty weight of this form."""
        table = np.asarray(self.table, np.float32) if self.table else None
        options = (self.group, self.zero, self.minimum, self.scale_f16, self.rotation, table)
        return PackedWeight(region, self.form, columns, k, *options)

    def fitting(self, k: int) -> int:
        """The next k that is whole rotated blocks, and whole groups of activations where they are wide."""
        return pad(k, max(self.rotation, self.act_group if self.act_group > 32 else 1, 1))

    def slot(self, bench: Bench, k: int, rows: int | None = None) -> Slot:
        return bench.slot(self.act, pad(k), group=self.act_group, rotation=self.rotation, rows=rows)

    def __str__(self) -> str:
        if not self.affine and not self.coded:
            return self.form.name.lower()
        marks = ["min"] * self.minimum + ["f16"] * self.scale_f16 + [f"rotated{self.rotation}"] * bool(self.rotation)
        acts = [f"a{self.act_group}"] if self.act_group != 32 else []
        return "-".join([self.form.name.lower(), f"g{self.group}", f"z{self.zero}", *marks, *acts])


# Tables: twice the values of e2m1, integers from end to end, and numbers that no bf16 is.
E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
UNEVEN = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 127.0)
NF4 = tuple(float(value) for value in np.float32(np.tanh(np.linspace(-1.7, 1.8, 16))))

FORMS = [
    Shape(Form.F32),
    Shape(Form.BF16),
    Shape(Form.W8, 32, 128, scale_f16=True),
    Shape(Form.W8, 32, 128, scale_f16=True, rotation=32),
    Shape(Form.W8, 16, 128, act_group=16),
    Shape(Form.W8, 0, 128),
    Shape(Form.W8, 64, 0, minimum=True, scale_f16=True),
    Shape(Form.W8, 128, 117, act_group=16),
    Shape(Form.W8, 0, 0, minimum=True),
    Shape(Form.W4, 32, 0, minimum=True, scale_f16=True),
    Shape(Form.W4, 32, 8, scale_f16=True),
    Shape(Form.W4, 16, 0, minimum=True, act_group=16),
    Shape(Form.W4, 64, 8, rotation=32),
    Shape(Form.W4, 128, 3, minimum=True, scale_f16=True),
    Shape(Form.W4, 0, 8),
    Shape(Form.W4, 0, 0, minimum=True, scale_f16=True),
    Shape(Form.Lut4, 32, table=E2M1, scale_f16=True),
    Shape(Form.Lut4, 16, table=UNEVEN, act_group=16),
    Shape(Form.Lut4, 0, table=UNEVEN),
    Shape(Form.Lut4F, 64, table=NF4),
    Shape(Form.Lut4F, 16, table=NF4, scale_f16=True),
    Shape(Form.E4M3, 128),
    Shape(Form.E4M3, 0, scale_f16=True),
    Shape(Form.E5M2, 32),
    Shape(Form.W8, 64, 128, scale_f16=True, rotation=64, act_group=64),
    Shape(Form.W8, 192, 128, scale_f16=True, rotation=64, act_group=192),
    Shape(Form.W8, 256, 117, act_group=128),
]
WIDE_FORMS = FORMS[-3:]


@dataclass
class Weight:
    """A packed weight, and the same numbers for numpy. For affine forms `values` is scale * (code - zero) + minimum."""

    shape: Shape
    packed: PackedWeight
    values: Array
    codes: Array | None = None
    scales: Array | None = None
    minimums: Array | None = None


def make_weight(shape: Shape, columns: int, k: int, seed: int = 0, targets: Array | None = None) -> Weight:
    """Random weights [columns, k], row r at packed column targets[r] (r when None); k is made to fit the form."""
    k = shape.fitting(k)
    rng = np.random.default_rng(seed)
    places = np.arange(columns, dtype=np.int32) if targets is None else targets.astype(np.int32)
    count = int(places.max()) + 1
    needed = PackedWeight.bytes_needed(shape.form, count, k, shape.group, shape.minimum, shape.scale_f16)
    packed = shape.packed(Region(needed), count, k)
    if not shape.affine and not shape.coded:
        values = rng.standard_normal((columns, k)).astype(np.float32)
        packed.pack_f32(places, values)
        return Weight(shape, packed, values if shape.form == Form.F32 else to_bf16(values))
    group = shape.group or pad(k)
    groups = -(-k // group)
    codes = rng.integers(0, 16 if shape.form == Form.W4 or shape.table else 256, (columns, k), dtype=np.uint8)
    if shape.coded:
        return _coded_weight(shape, packed, places, codes, group, groups)
    scales = (rng.uniform(0.5, 2, (columns, groups)) / (128 if shape.form == Form.W8 else 8)).astype(np.float32)
    minimums = rng.standard_normal((columns, groups)).astype(np.float32) if shape.minimum else None
    if shape.scale_f16:
        scales = scales.astype(np.float16).astype(np.float32)
        minimums = None if minimums is None else minimums.astype(np.float16).astype(np.float32)
    packed.pack_affine(places, codes, scales, minimums)
    wide = np.repeat(scales.astype(np.float64), group, axis=1)[:, :k]
    values = wide * (codes.astype(np.float64) - shape.zero)
    if minimums is not None:
        values = values + np.repeat(minimums.astype(np.float64), group, axis=1)[:, :k]
    return Weight(shape, packed, values, codes, scales, minimums)


def _coded_weight(shape: Shape, packed: PackedWeight, places: Array, codes: Array, group: int, groups: int) -> Weight:
    rng = np.random.default_rng(1)
    numbers = shape.numbers
    codes = np.where(np.isfinite(numbers[codes]), codes, 1).astype(np.uint8)
    if shape.form == Form.E5M2:
        codes[np.abs(numbers[codes]) > 100] = 3  # else the largest numbers are all there is
    largest = np.abs(numbers[np.isfinite(numbers)]).max()
    scales = (rng.uniform(0.5, 2, (len(codes), groups)) / largest).astype(np.float32)
    if shape.scale_f16:
        scales = scales.astype(np.float16).astype(np.float32)
    packed.pack_codes(places, codes, scales)
    values = np.repeat(scales, group, axis=1)[:, : codes.shape[1]] * numbers[codes]
    return Weight(shape, packed, values, codes, scales)


@dataclass
class LinearBench:
    """A plan of one linear from slot `x` to slot `out`."""

    bench: Bench
    x: Slot
    out: Slot

    def run(self, x: Array | Quantized, residual: Array | None = None) -> None:
        if isinstance(x, Quantized):
            self.x.write_quantized(x)
            rows = len(x.codes)
        else:
            self.x.write(x)
            rows = len(x)
        if residual is not None:
            self.out.write(residual)
        self.bench.run(rows)


def linear_bench(
    level: str,
    weight: Weight,
    rows: int,
    out_columns: int,
    *,
    bias: Array | None = None,
    epilogue: Epilogue = Epilogue.Store,
    out: Act = Act.F32,
    out_group: int = 32,
    out_rotation: int = 0,
    threads: int = 2,
) -> LinearBench:
    """A linear of at most `rows` rows; rows that are not f32 are padded to 32 and written whole."""
    bench = Bench(level, rows, threads)
    x = weight.shape.slot(bench, weight.packed.k)
    width = out_columns if out == Act.F32 else pad(out_columns)
    target = bench.slot(out, width, group=out_group, rotation=out_rotation)

    def add(plan: Plan) -> None:
        plan.add_linear("linear", weight.packed, x.activation(), bias, epilogue, target.activation(), width)

    bench.add(add)
    return LinearBench(bench, x, target)


def linear_reference(weight: Weight, x: Array | Quantized) -> tuple[Array, Array]:
    """x W' in float64, and the sum of the magnitudes of its terms, which bounds what rounding can do."""
    if not weight.shape.integer:
        assert not isinstance(x, Quantized)
        x = np.asarray(x if weight.shape.form == Form.F32 else to_bf16(x), np.float64)
        return x @ weight.values.T, np.abs(x) @ np.abs(weight.values.T)
    assert isinstance(x, Quantized)
    assert weight.codes is not None
    assert weight.scales is not None
    rows, width = x.codes.shape
    groups = x.scales.shape[1]
    codes = np.zeros((len(weight.codes), width))
    codes[:, : weight.codes.shape[1]] = weight.shape.numbers[weight.codes] if weight.shape.coded else weight.codes
    a = x.codes.astype(np.float64).reshape(rows, groups, -1).transpose(1, 0, 2)
    products = a @ codes.reshape(len(codes), groups, -1).transpose(1, 2, 0)  # exact integers [groups, rows, columns]
    products -= weight.shape.zero * x.sums.T.astype(np.float64)[:, :, None]
    group = weight.shape.group or width
    which = np.minimum(np.arange(groups) * (width // groups) // group, weight.scales.shape[1] - 1)
    # Padding past the last group of the source has zero activations.
    terms = products * weight.scales.T.astype(np.float64)[which][:, None, :] * x.scales.T[:, :, None]
    total, magnitude = terms.sum(axis=0), np.abs(terms).sum(axis=0)
    if weight.minimums is not None:
        terms = weight.minimums.T.astype(np.float64)[which][:, None, :] * x.scaled_sums.T[:, :, None]
        total, magnitude = total + terms.sum(axis=0), magnitude + np.abs(terms).sum(axis=0)
    return total, magnitude


def random_input(weight: Weight, rows: int, seed: int = 1) -> Array | Quantized:
    """Activations of the form the weight wants."""
    x = np.random.default_rng(seed).standard_normal((rows, weight.packed.k)).astype(np.float32)
    if not weight.shape.integer:
        return x
    padded = np.zeros((rows, pad(weight.packed.k)), np.float32)
    padded[:, : weight.packed.k] = x
    return quantize(padded, weight.shape.act_group)
