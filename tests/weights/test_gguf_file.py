"""The GGUF container: what a well-formed file gives, and that a damaged one is refused with its numbers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import WeightsError
from octavo.weights.gguf_blocks import BLOCK_FORMATS, DENSE_BYTES
from octavo.weights.gguf_file import GgufFile
from tests.weights.gguf_files import BLOCKS, GgufFileSpec, TensorSpec, Typed, random_blocks

SCALARS: list[tuple[int, Any]] = [
    (0, 200), (1, -100), (2, 60000), (3, -30000), (4, 4_000_000_000), (5, -2_000_000_000), (6, 0.5), (7, True),
    (8, "naïve"), (10, 1 << 60), (11, -(1 << 60)), (12, 1e300),
]  # fmt: skip


def f32(name: str, *shape: int, **settings: Any) -> TensorSpec:
    count = 1
    for size in shape:
        count *= size
    return TensorSpec(name, shape, "F32", struct.pack(f"<{count}f", *range(count)), **settings)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(("kind", "value"), SCALARS)
def test_every_scalar_type_is_read(tmp_path: Path, version: int, kind: int, value: Any) -> None:
    file = GgufFile(GgufFileSpec({"k": Typed(kind, value)}, version=version).write(tmp_path / "a.gguf"))
    assert file.metadata == {"k": value}
    assert type(file.metadata["k"]) is type(value)


@pytest.mark.parametrize(("kind", "value"), SCALARS)
def test_arrays_of_every_type_are_read(tmp_path: Path, kind: int, value: Any) -> None:
    spec = GgufFileSpec({"k": Typed(9, [value, value], kind), "empty": Typed(9, [], kind), "after": 7})
    assert GgufFile(spec.write(tmp_path / "a.gguf")).metadata == {"k": [value, value], "empty": [], "after": 7}


def test_arrays_of_arrays_are_read(tmp_path: Path) -> None:
    nested = Typed(9, [Typed(9, [1, 2], 4), Typed(9, [], 4)], 9)
    assert GgufFile(GgufFileSpec({"k": nested}).write(tmp_path / "a.gguf")).metadata == {"k": [[1, 2], []]}


def test_tensors_are_found_at_their_aligned_places(tmp_path: Path) -> None:
    spec = GgufFileSpec({"general.alignment": 64}, [f32("a", 3), f32("b", 2, 5)], alignment=64)
    path = spec.write(tmp_path / "a.gguf")
    tensors = GgufFile(path).tensors
    assert [(info.name, info.shape, info.type, info.size) for info in tensors.values()] == [
        ("a", (3,), "F32", 12),
        ("b", (2, 5), "F32", 40),
    ]
    raw = path.read_bytes()
    assert struct.unpack_from("<10f", raw, tensors["b"].start) == tuple(range(10))
    assert tensors["b"].start % 64 == 0


def deep_array(depth: int) -> Typed:
    value = Typed(9, [1], 4)
    for _ in range(depth - 1):
        value = Typed(9, [value], 9)
    return value


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "wrong magic": (GgufFileSpec(magic=b"GGJT").to_bytes(), "is not a GGUF file"),
    "version 1": (GgufFileSpec(version=1).to_bytes(), "version 1 is not supported"),
    "version 4": (GgufFileSpec(version=4).to_bytes(), "version 4 is not supported"),
    "big-endian": (GgufFileSpec(version=3 << 24).to_bytes(), "big-endian"),
    "header cut": (GgufFileSpec().to_bytes()[:17], "truncated"),
    "huge tensor count": (GgufFileSpec(tensor_count=1 << 62).to_bytes(), "claims 4611686018427387904 tensors"),
    "huge key count": (GgufFileSpec(key_count=1 << 62).to_bytes(), "metadata keys, the limit is"),
    "too many keys": (GgufFileSpec({"a": 1}, key_count=2).to_bytes()[:41], "truncated"),
    "key past the end": (GgufFileSpec(key_count=1).to_bytes()[:24] + struct.pack("<Q", 1000), "truncated"),
    "huge key": (GgufFileSpec(key_count=1).to_bytes()[:24] + struct.pack("<Q", 1 << 40), "the limit is 65535"),
    "huge string": (
        GgufFileSpec(key_count=1).to_bytes()[:24] + struct.pack("<Qc", 1, b"k") + struct.pack("<IQ", 8, 1 << 63),
        "claims 9223372036854775808 bytes",
    ),
    "huge array": (
        GgufFileSpec(key_count=1).to_bytes()[:24] + struct.pack("<QcIIQ", 1, b"k", 9, 0, 1 << 63),
        "claims 9223372036854775808 items",
    ),
    "array past the end": (
        GgufFileSpec(key_count=1).to_bytes()[:24] + struct.pack("<QcIIQ", 1, b"k", 9, 10, 1_000_000),
        "truncated",
    ),
    "strings past the end": (
        GgufFileSpec(key_count=1).to_bytes()[:24] + struct.pack("<QcIIQ", 1, b"k", 9, 8, 1_000_000) + bytes(64),
        "truncated: 'k' claims 1000000 strings",
    ),
    "huge string in an array": (
        GgufFileSpec(key_count=1).to_bytes()[:24] + struct.pack("<QcIIQQ", 1, b"k", 9, 8, 1, (1 << 64) - 1),
        "item 0 of 'k' claims",
    ),
    "deep array": (GgufFileSpec({"k": deep_array(6)}).to_bytes(), "nests arrays more than 4 deep"),
    "unknown type": (
        GgufFileSpec(key_count=1).to_bytes()[:24] + struct.pack("<QcI", 1, b"k", 13),
        "unknown value type 13",
    ),
    "unknown item type": (
        GgufFileSpec(key_count=1).to_bytes()[:24] + struct.pack("<QcIIQ", 1, b"k", 9, 99, 0),
        "unknown item type 99",
    ),
    "boolean 2": (GgufFileSpec({"k": Typed(7, 2)}).to_bytes(), "neither 0 nor 1"),
    "boolean 2 in an array": (GgufFileSpec({"k": Typed(9, [1, 2], 7)}).to_bytes(), "neither 0 nor 1"),
    "string not UTF-8": (GgufFileSpec({"k": Typed(8, b"\xff\xfe")}).to_bytes(), "not UTF-8"),
    "item not UTF-8": (GgufFileSpec({"k": Typed(9, [b"a", b"\xff"], 8)}).to_bytes(), "item 1 of 'k' is not UTF-8"),
    "alignment 0": (GgufFileSpec({"general.alignment": 0}).to_bytes(), "general.alignment is 0"),
    "alignment 48": (GgufFileSpec({"general.alignment": 48}).to_bytes(), "not a power of two"),
    "alignment text": (GgufFileSpec({"general.alignment": "32"}).to_bytes(), "not a power of two"),
    "alignment huge": (GgufFileSpec({"general.alignment": 1 << 31}).to_bytes(), "not a power of two"),
    "no dimensions": (GgufFileSpec(tensors=[f32("a", dimensions=0)]).to_bytes(), "has 0 dimensions"),
    "five dimensions": (GgufFileSpec(tensors=[f32("a", 1, 1, 1, 1, 1)]).to_bytes(), "has 5 dimensions"),
    "empty dimension": (GgufFileSpec(tensors=[f32("a", 4, 0)]).to_bytes(), "empty dimension"),
    "huge dimensions": (
        GgufFileSpec(tensors=[TensorSpec("a", (1 << 63, 1 << 63, 1 << 63, 1 << 63), "F32", b"")]).to_bytes(),
        "truncated: tensor 'a' needs",
    ),
    "two of a name": (GgufFileSpec(tensors=[f32("a", 1), f32("a", 1)]).to_bytes(), "'a': appears twice"),
    "long name": (GgufFileSpec(tensors=[f32("a" * 200, 1)]).to_bytes(), "the limit is 127"),
    "unknown tensor type": (GgufFileSpec(tensors=[f32("a", 1, kind_number=77)]).to_bytes(), "type number 77"),
    "Q8_K": (
        GgufFileSpec(tensors=[TensorSpec("a", (256,), "Q8_K", bytes(292))]).to_bytes(),
        "has type Q8_K, which is not supported; supported are F32, F16, BF16, F64, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K",
    ),
    "I32": (GgufFileSpec(tensors=[f32("a", 8, kind_number=26)]).to_bytes(), "has type I32, which is not supported"),
    "broken rows": (
        GgufFileSpec(tensors=[TensorSpec("a", (2, 48), "Q4_1", bytes(60))]).to_bytes(),
        "rows of 48 values do not divide into Q4_1 blocks of 32",
    ),
    "unaligned offset": (GgufFileSpec(tensors=[f32("a", 1, offset=4)]).to_bytes(), "not a multiple of the alignment"),
    "offset past the end": (GgufFileSpec(tensors=[f32("a", 1, offset=1 << 40)]).to_bytes(), "truncated: tensor 'a'"),
    "offset overflow": (GgufFileSpec(tensors=[f32("a", 8, offset=(1 << 64) - 32)]).to_bytes(), "truncated: tensor 'a'"),
    "overlap": (GgufFileSpec(tensors=[f32("a", 16), f32("b", 8, offset=32)]).to_bytes(), "overlaps 'a'"),
    "same place": (GgufFileSpec(tensors=[f32("a", 8), f32("b", 8, offset=0)]).to_bytes(), "overlaps"),
    "data cut": (GgufFileSpec(tensors=[f32("a", 8)]).to_bytes()[:-1], "truncated: tensor 'a' needs bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_file_is_refused_with_its_name_and_reason(tmp_path: Path, case: str) -> None:
    content, reason = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        GgufFile(path)
    message = str(caught.value)
    assert reason in message
    assert str(path) in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", [*BLOCK_FORMATS, *DENSE_BYTES])
def test_data_of_every_type_cut_short_is_refused_by_the_tensor_s_name(tmp_path: Path, kind: str) -> None:
    values, size = BLOCKS[kind]
    shape = (2, 3 * values)
    tensors = [TensorSpec(name, shape, kind, random_blocks(np.random.default_rng(1), kind, shape)) for name in "ab"]
    content, path = GgufFileSpec(tensors=tensors).to_bytes(), tmp_path / "a.gguf"
    for missing in {1, size - 1, size, 6 * size} - {0}:
        path.write_bytes(content[:-missing])
        with pytest.raises(WeightsError, match="truncated: tensor 'b' needs bytes"):
            GgufFile(path)
    path.write_bytes(content)
    assert GgufFile(path).tensors["b"].size == 6 * size
    if values > 1:
        path.write_bytes(GgufFileSpec(tensors=[TensorSpec("c", (1, values // 2), kind, bytes(size))]).to_bytes())
        with pytest.raises(WeightsError, match=f"'c': its rows of {values // 2} values do not divide into {kind}"):
            GgufFile(path)


def test_a_key_that_appears_twice_is_refused(tmp_path: Path) -> None:
    one = GgufFileSpec({"k": 1}).to_bytes()
    path = tmp_path / "a.gguf"
    path.write_bytes(one[:16] + struct.pack("<Q", 2) + one[24:41] + one[24:41] + bytes(32))
    with pytest.raises(WeightsError, match="'k' appears twice"):
        GgufFile(path)


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be opened"):
        GgufFile(tmp_path / "missing.gguf")
    with pytest.raises(WeightsError, match="not a regular file"):
        GgufFile(tmp_path)
