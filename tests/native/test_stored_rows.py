"""Rows packed natively from the bytes of a file equal those unpacked in Python first; strings end at a wrong one."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo._native import Form, PackedWeight, PackingJob, Region, available_levels, pack_stored, read_strings
from octavo.backends.cpu.forms import affine_rows, choose_form
from octavo.quantization import quantize_rows
from octavo.quantization.rotation import rotate_rows
from octavo.weights.gguf_blocks import BLOCK_FORMATS, BlockFormat
from octavo.weights.tensors import AffineRows, AffineTensor, bf16_to_f32, f32_to_bf16
from tests.weights.gguf_files import random_blocks

Array = NDArray[Any]
NATIVE = [name for name, block in BLOCK_FORMATS.items() if block.native]
DENSE = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


@dataclass(frozen=True)
class RawRows:
    """The rows of blocks in memory."""

    block: BlockFormat
    raw: Array

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        return self.block.unpack_rows(self.raw[start:stop])

    def block_rows(self, start: int, stop: int) -> Array:
        return self.raw[start:stop]

    def release(self) -> None:
        pass


def blocks(kind: str, rows: int, k: int) -> Array:
    return np.frombuffer(random_blocks(np.random.default_rng(5), kind, (rows, k)), np.uint8)


def affine(kind: str, columns: int, k: int) -> PackedWeight:
    block = BLOCK_FORMATS[kind]
    form, halves = Form.W4 if block.bits == 4 else Form.W8, block.scale_dtype == "f16"
    size = PackedWeight.bytes_needed(form, columns, k, block.group, block.has_minimum, halves)
    return PackedWeight(
        Region(size + 192),
        form,
        columns,
        k,
        block.group,
        0 if block.has_minimum else block.zero,
        block.has_minimum,
        halves,
    )


def dense(form: Form, columns: int, k: int) -> PackedWeight:
    return PackedWeight(Region(PackedWeight.bytes_needed(form, columns, k) + 192), form, columns, k)


def columns_of(weight: PackedWeight) -> Array:
    return np.stack([weight.column(index) for index in range(weight.columns)])


def assert_same(values: Array, expected: Array) -> None:
    np.testing.assert_array_equal(np.isnan(values), np.isnan(expected))
    np.testing.assert_array_equal(values[~np.isnan(values)], expected[~np.isnan(expected)])


def unpacked(block: BlockFormat, raw: Array, rows: int) -> tuple[Array, Array, Array | None]:
    codes, scales, minimums = block.unpack_rows(raw.reshape(rows, -1))
    return codes, np.ascontiguousarray(scales), None if minimums is None else np.ascontiguousarray(minimums)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", NATIVE)
def test_blocks_are_packed_as_their_unpacked_codes_are(kind: str, threads: int) -> None:
    rows, k = 1300, 512  # more than one piece
    raw = blocks(kind, rows, k)
    target = np.random.default_rng(1).permutation(rows).astype(np.int32)
    order = np.random.default_rng(2).permutation(rows)
    native, python = affine(kind, rows, k), affine(kind, rows, k)
    pack_stored([PackingJob(native, kind, raw, order, target, False)], threads)
    codes, scales, minimums = unpacked(BLOCK_FORMATS[kind], raw, rows)
    python.pack_affine(target, codes[order], scales[order], None if minimums is None else minimums[order])
    assert_same(columns_of(native), columns_of(python))


def test_the_kinds_said_to_be_native_are() -> None:
    for kind, block in BLOCK_FORMATS.items():
        raw, weight = blocks(kind, 16, 256), affine(kind, 16, 256)
        arguments = (weight, kind, raw, None, np.arange(16, dtype=np.int32), False)
        if block.native:
            PackingJob(*arguments)
        else:
            with pytest.raises(ValueError, match="are not known"):
                PackingJob(*arguments)


@pytest.mark.parametrize(
    "kinds",
    [("Q4_K", "Q6_K"), ("Q5_K", "Q6_K"), ("Q3_K", "Q2_K"), ("Q4_0", "Q8_0"), ("Q4_K", "Q5_0"), ("Q6_K", "Q8_0")],
)
def test_blocks_of_two_kinds_share_a_weight_in_the_form_that_holds_both(kinds: tuple[str, str]) -> None:
    rows, k = 40, 512
    tensors = []
    for kind in kinds:
        block, raw = BLOCK_FORMATS[kind], blocks(kind, rows, k)
        read = RawRows(block, raw.reshape(rows, -1))
        tensors.append(
            AffineTensor(
                kind,
                (rows, k),
                block.bits,
                block.group,
                block.zero,
                block.has_minimum,
                block.scale_dtype,
                kind,
                True,
                read,
            )
        )
    form, _ = choose_form(tensors, None)
    places = [np.arange(rows, dtype=np.int32), np.arange(rows, 2 * rows, dtype=np.int32)]
    native, python = (
        PackedWeight(
            Region(form.nbytes(2 * rows, k) + 192),
            form.form,
            2 * rows,
            k,
            form.group,
            form.zero,
            form.minimum,
            form.scale_f16,
        )
        for _ in range(2)
    )
    jobs = []
    for tensor, place in zip(tensors, places, strict=True):
        jobs.append(PackingJob(native, tensor.name, tensor.raw_blocks().reshape(-1), None, place, False))
        codes, scales, minimums = affine_rows(tensor, form, 0, rows)
        python.pack_affine(place, codes, np.ascontiguousarray(scales), minimums)
    pack_stored(jobs, 2)
    assert_same(columns_of(native), columns_of(python))


@pytest.mark.parametrize("form", [Form.BF16, Form.F32])
@pytest.mark.parametrize("kind", DENSE)
def test_dense_rows_are_widened_and_rounded_as_in_python(kind: str, form: Form) -> None:
    rows, k = 40, 37
    values = np.random.default_rng(0).standard_normal((rows, k))
    stored = (
        (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if kind == "BF16"
        else values.astype(DENSE[kind])
    )
    padded = np.frombuffer(b"\0" + stored.tobytes(), np.uint8)[1:]  # at an odd address
    native, python = dense(form, rows, k), dense(form, rows, k)
    target = np.arange(rows, dtype=np.int32)[::-1].copy()
    pack_stored([PackingJob(native, kind, padded, None, target, False)], 2)
    python.pack_f32(target, bf16_to_f32(stored) if kind == "BF16" else stored.astype(np.float32))
    np.testing.assert_array_equal(columns_of(native), columns_of(python))


@pytest.mark.parametrize("mapped", [False, True])
def test_some_of_the_stored_rows_are_packed(mapped: bool, tmp_path: Path) -> None:
    rows, k = 1300, 512
    raw = blocks("Q4_1", rows, k)
    if mapped:
        path = tmp_path / "rows"
        path.write_bytes(raw.tobytes())
        with path.open("rb") as file:
            raw = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    for order in (
        np.arange(3, rows, 3),
        np.arange(rows - 1, 5, -7),
    ):  # of some, pages are let go before others read them
        weight, expected = affine("Q4_1", len(order), k), affine("Q4_1", len(order), k)
        places = np.arange(len(order), dtype=np.int32)
        pack_stored([PackingJob(weight, "Q4_1", raw, order, places, mapped)] * 2, 3)
        codes, scales, minimums = unpacked(BLOCK_FORMATS["Q4_1"], raw, rows)
        expected.pack_affine(places, codes[order], scales[order], None if minimums is None else minimums[order])
        assert_same(columns_of(weight), columns_of(expected))


def uneven_rows(k: int) -> Array:
    """Rows as models have them, and of all that rounding treats in a way of its own."""
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((40, k)).astype(np.float32) * rng.uniform(1e-3, 2, (40, 1)).astype(np.float32)
    rows[0] = 0
    rows[1] = -0.25
    rows[2] = np.where(np.arange(k) % 5, 0, 1e-7)  # scales that are subnormal as f16, or nothing
    rows[3] = rng.integers(-6, 6, k)  # on grids of fewer steps than the codes have
    rows[4] = 3 * rng.integers(0, 5, k) - 1000
    rows[5] = 5000 + rng.standard_normal(k)
    rows[6, ::32] *= 1000
    rows[7] = 1e-40
    rows[8:16] = rng.integers(0, np.arange(2, 18, 2)[:, None], (8, k)) * np.float32(0.013)
    return rows


def rounded(form: Form, columns: int, k: int, group: int, rotation: int) -> PackedWeight:
    minimum = form == Form.W4
    size = PackedWeight.bytes_needed(form, columns, k, group, minimum, True)
    return PackedWeight(Region(size + 192), form, columns, k, group, 0 if minimum else 128, minimum, True, rotation)


@pytest.mark.parametrize(
    ("form", "k", "group", "rotation"),
    [
        (Form.W8, 96, 32, 32),
        (Form.W8, 48, 16, 0),
        (Form.W8, 384, 192, 64),
        (Form.W8, 256, 128, 64),
        (Form.W8, 64, 64, 64),
        (Form.W4, 96, 32, 0),
        (Form.W4, 1088, 32, 0),
        (Form.W4, 48, 16, 0),
        (Form.W4, 192, 64, 0),
        (Form.W4, 256, 128, 0),
    ],
)
@pytest.mark.parametrize("kind", DENSE)
def test_dense_rows_are_rounded_to_the_same_bits_as_in_python(
    kind: str, form: Form, k: int, group: int, rotation: int
) -> None:
    values = uneven_rows(k)
    stored = f32_to_bf16(values) if kind == "BF16" else values.astype(DENSE[kind])
    exact = bf16_to_f32(stored) if kind == "BF16" else stored.astype(np.float32)
    codes, scales, minimums = quantize_rows(
        rotate_rows(exact, rotation) if rotation else exact, 8 if form == Form.W8 else 4, group
    )
    target = np.random.default_rng(1).permutation(len(values)).astype(np.int32)
    python = rounded(form, len(values), k, group, rotation)
    python.pack_affine(target, codes, scales, minimums)
    expected = columns_of(python)
    for level in available_levels():
        native = rounded(form, len(values), k, group, rotation)
        raw = np.frombuffer(stored.tobytes(), np.uint8)
        pack_stored([PackingJob(native, kind, raw, None, target, False)], 2, level)
        np.testing.assert_array_equal(columns_of(native), expected)


@pytest.mark.parametrize("form", [Form.W8, Form.W4])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -65536.0])
def test_weights_that_cannot_be_rounded_are_refused(form: Form, value: float) -> None:
    rows = np.ones((20, 64), np.float32)
    rows[17, 40] = value
    job = PackingJob(
        rounded(form, 20, 64, 32, 0), "F32", rows.reshape(-1).view(np.uint8), None, np.arange(20, dtype=np.int32), False
    )
    for level in available_levels():
        with pytest.raises(OverflowError, match="cannot be rounded"):
            pack_stored([job], 2, level)


def test_dense_rows_are_not_rounded_to_groups_rounding_does_not_make() -> None:
    raw, places = np.zeros(32 * 64 * 4, np.uint8), np.arange(32, dtype=np.int32)

    def weight(form: Form, group: int, zero: int, minimum: bool, halves: bool) -> PackedWeight:
        size = PackedWeight.bytes_needed(form, 32, 64, group, minimum, halves)
        return PackedWeight(Region(size + 192), form, 32, 64, group, zero, minimum, halves)

    for wrong in (
        (Form.W8, 32, 127, False, True),
        (Form.W8, 32, 0, True, True),
        (Form.W8, 32, 128, False, False),
        (Form.W4, 32, 8, False, True),
        (Form.W4, 96, 0, True, True),
    ):
        job = PackingJob(weight(*wrong), "F32", raw, None, places, False)
        with pytest.raises(ValueError, match="dense rows are not rounded"):
            pack_stored([job], 1)


def test_several_tensors_fill_one_weight() -> None:
    weight = affine("Q4_1", 64, 64)
    parts = [blocks("Q4_1", 32, 64), blocks("Q4_1", 64, 64)[32 * 40 :]]
    places = np.arange(64, dtype=np.int32)
    pack_stored(
        [PackingJob(weight, "Q4_1", part, None, places[32 * i : 32 * i + 32], False) for i, part in enumerate(parts)], 2
    )
    codes, scales, minimums = unpacked(BLOCK_FORMATS["Q4_1"], np.concatenate(parts), 64)
    expected = affine("Q4_1", 64, 64)
    expected.pack_affine(places, codes, scales, minimums)
    assert_same(columns_of(weight), columns_of(expected))


def test_pages_of_a_mapped_file_are_let_go(tmp_path: Path) -> None:
    rows, k = 4096, 1024
    path = tmp_path / "weights"
    path.write_bytes(np.ones(rows * k, np.uint16).tobytes())
    with path.open("rb") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def resident() -> int:
        address = f"{mapped.ctypes.data:x}-"
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        next(line for line in lines if line.startswith(address))
        return int(next(line for line in lines if line.startswith("Rss:")).split()[1])

    weight = dense(Form.BF16, rows, k)
    target = np.arange(rows, dtype=np.int32)
    assert mapped.sum() > 0
    assert resident() > 8000
    pack_stored([PackingJob(weight, "BF16", mapped, None, target, True)], 2)
    assert resident() < 100
    np.testing.assert_array_equal(weight.column(rows - 1), bf16_to_f32(np.ones(k, np.uint16)))


def test_rows_that_do_not_fit_the_weight_are_refused() -> None:
    raw, places = blocks("Q4_1", 32, 64), np.arange(32, dtype=np.int32)
    weight = affine("Q4_1", 32, 64)
    wrong: list[tuple[Any, str]] = [
        ((weight, "Q9", raw, None, places, False), "stored as Q9 are not known"),
        ((weight, "Q4_1", raw[:-1], None, places, False), "1279 bytes, the rows take 1280"),
        ((weight, "Q4_K", raw, None, places, False), "64 values are no whole number of Q4_K blocks"),
        ((weight, "Q4_1", raw, np.arange(31), places, False), "order and target differ"),
        ((weight, "Q4_1", raw[:-1], np.arange(32), places, False), "1279 bytes, the rows take 1240"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            PackingJob(*arguments)
    jobs: list[tuple[Any, type[Exception], str]] = [
        ((affine("Q4_0", 32, 64), "Q4_1", raw, None, places, False), ValueError, "group, zero point or minimum"),
        ((weight, "Q8_0", blocks("Q8_0", 32, 64), None, places, False), ValueError, "has wider codes"),
        ((dense(Form.BF16, 32, 64), "Q4_1", raw, None, places, False), ValueError, "not stored in the form"),
        ((weight, "Q4_1", raw, np.full(32, 32), places, False), IndexError, "stored row 32"),
        ((weight, "Q4_1", raw, None, places + 1000, False), IndexError, "packed column 1000"),
    ]
    for arguments, kind, message in jobs:
        with pytest.raises(kind, match=message):
            pack_stored([PackingJob(*arguments)], 2)
    with pytest.raises(ValueError, match="threads"):
        pack_stored([], 0)
    pack_stored([], 1)


def spelled(*texts: bytes) -> Array:
    return np.frombuffer(b"".join(struct.pack("<Q", len(text)) + text for text in texts), np.uint8)


def test_strings_are_read_until_one_is_wrong() -> None:
    good = spelled(b"a", "é漢".encode(), b"")
    assert read_strings(good, 0, 3, 16) == (["a", "é漢", ""], good.size)
    assert read_strings(good, 9, 1, 16) == (["é漢"], 22)
    assert read_strings(good, 0, 0, 16) == ([], 0)
    assert read_strings(good, 0, 9, 16) == (["a", "é漢", ""], good.size)
    assert read_strings(good, 0, 3, 4) == (["a"], 9)
    assert read_strings(good[:-1], 0, 3, 16) == (["a", "é漢"], 22)
    assert read_strings(spelled(b"a", b"\xff"), 0, 2, 16) == (["a"], 9)
    assert read_strings(spelled(b"a", b"\xed\xa0\x80"), 0, 2, 16) == (["a"], 9)  # a lone surrogate
    huge = np.frombuffer(struct.pack("<Q", (1 << 64) - 1) + b"abc", np.uint8)
    assert read_strings(huge, 0, 1, (1 << 64) - 1) == ([], 0)
    assert read_strings(good, 1 << 40, 1, 16) == ([], 1 << 40)
