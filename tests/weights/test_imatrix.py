"""Importance matrices of both kinds give mean squares; damaged ones are refused with what is wrong."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import WeightsError
from octavo.weights.imatrix import read_imatrix
from tests.weights.gguf_files import GgufFileSpec, TensorSpec

SUMS = np.array([[2.0, 4.0, 6.0, 0.0], [1.0, 1.0, 3.0, 5.0]], dtype="<f4")


def tensor(name: str, values: np.ndarray) -> TensorSpec:
    return TensorSpec(name, values.shape, "F32", np.ascontiguousarray(values, "<f4").tobytes())


def gguf_imatrix(**changes: Any) -> GgufFileSpec:
    """One dense weight and one stack of two experts, the second of which nothing went to."""
    keys = {
        "general.type": "imatrix",
        "imatrix.datasets": ["calibration.txt"],
        "imatrix.chunk_count": 7,
        "imatrix.chunk_size": 512,
    }
    tensors = [
        tensor("blk.0.attn_q.weight.in_sum2", SUMS[:1]),
        tensor("blk.0.attn_q.weight.counts", np.array([[2.0]])),
        tensor("blk.0.ffn_up_exps.weight.in_sum2", SUMS),
        tensor("blk.0.ffn_up_exps.weight.counts", np.array([[4.0], [0.0]])),
    ]
    return GgufFileSpec(keys | changes.get("keys", {}), changes.get("tensors", tensors))


def legacy(entries: dict[str, tuple[int, list[float]]], tail: bytes = b"") -> bytes:
    content = struct.pack("<i", len(entries))
    for name, (calls, values) in entries.items():
        content += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        content += struct.pack(f"<{len(values)}f", *values)
    return content + tail


def test_the_gguf_kind_gives_means_for_each_expert(tmp_path: Path) -> None:
    matrix = read_imatrix(gguf_imatrix().write(tmp_path / "imatrix.gguf"))
    assert (matrix.datasets, matrix.chunk_count, matrix.chunk_size) == (("calibration.txt",), 7, 512)
    dense, experts = matrix.entries["blk.0.attn_q.weight"], matrix.entries["blk.0.ffn_up_exps.weight"]
    np.testing.assert_array_equal(dense.mean_squares, [[1, 2, 3, 0]])
    assert dense.counts == (2,)
    # Of an expert nothing went to, every channel matters alike.
    np.testing.assert_array_equal(experts.mean_squares, [[0.5, 1, 1.5, 0], [1, 1, 1, 1]])
    assert experts.counts == (4, 0)


def test_the_older_kind_gives_the_same_means(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    tail = struct.pack("<ii", 7, 15) + b"calibration.txt"
    path.write_bytes(legacy({"blk.0.attn_q.weight": (2, [2, 4, 6, 0]), "output.weight": (0, [3, 1])}, tail))
    matrix = read_imatrix(path)
    assert (matrix.datasets, matrix.chunk_count) == (("calibration.txt",), 7)
    np.testing.assert_array_equal(matrix.entries["blk.0.attn_q.weight"].mean_squares, [[1, 2, 3, 0]])
    np.testing.assert_array_equal(matrix.entries["output.weight"].mean_squares, [[3, 1]])
    path.write_bytes(legacy({"output.weight": (1, [3, 1])}))
    assert read_imatrix(path).datasets == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": {"general.type": "model"}}, "of type 'model', not an importance matrix"),
        ({"tensors": []}, "without entries"),
        ({"tensors": [tensor("a.in_sum2", SUMS)]}, "'a.in_sum2' without its other half"),
        ({"tensors": [tensor("a.counts", SUMS)]}, "'a.counts' without its other half"),
        ({"tensors": [tensor("a.in_sum2", SUMS), tensor("a.counts", np.ones((3, 1)))]}, "8 values for 3 counts"),
        ({"tensors": [tensor("a.in_sum2", -SUMS), tensor("a.counts", np.ones((2, 1)))]}, "'a' has a sum or count"),
        ({"tensors": [tensor("a.in_sum2", SUMS), tensor("a.counts", np.full((2, 1), np.nan))]}, "negative or not"),
        ({"tensors": [tensor("a.in_sum2", SUMS), tensor("a.counts", np.full((2, 1), 1e30))]}, "has a count of"),
        ({"tensors": [TensorSpec("a.in_sum2", (2, 4), "F16", bytes(16))]}, "'a.in_sum2' is F16"),
    ],
)
def test_damaged_gguf_matrices_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(WeightsError) as caught:
        read_imatrix(gguf_imatrix(**changes).write(tmp_path / "imatrix.gguf"))
    assert reason in str(caught.value)


GOOD = legacy({"output.weight": (2, [3.0, 1.0])}, struct.pack("<ii", 1, 1) + b"x")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (struct.pack("<i", 0), "the number of entries is 0"),
        (struct.pack("<i", -3), "the number of entries is -3"),
        (struct.pack("<ii", 1, 1 << 30), "the length of the name of entry 0 is 1073741824"),
        (struct.pack("<iici", 1, 1, b"a", -1), "the runs of 'a' is -1"),
        (struct.pack("<iicii", 1, 1, b"a", 1, 1 << 30), "the number of values of 'a' is 1073741824"),
        (struct.pack("<iicii", 1, 1, b"a", 1, 1 << 20), "the 1048576 values of 'a' needs bytes"),
        (struct.pack("<iicii", 1, 1, b"\xff", 1, 1) + bytes(4), "is not UTF-8"),
        (legacy({"a": (1, [float("inf")])}), "entry 'a' has a sum or count"),
        (legacy({"a": (1, [1.0])})[:4] + legacy({"a": (1, [1.0])})[4:] * 2, "the name of the data set needs bytes"),
        (GOOD + b"more", "bytes after its end"),
    ],
)
def test_damaged_old_matrices_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        read_imatrix(path)
    assert reason in str(caught.value)


def test_an_entry_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    one = legacy({"a": (1, [1.0])})[4:]
    path.write_bytes(struct.pack("<i", 2) + one + one)
    with pytest.raises(WeightsError, match="'a' appears twice"):
        read_imatrix(path)


def test_cut_and_changed_matrices_are_read_or_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "imatrix"
    for content in (GOOD, gguf_imatrix().to_bytes()):
        for length in range(1, len(content), 7):
            changed = bytearray(content[:length] if length % 2 else content)
            changed[int(rng.integers(0, len(changed)))] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(changed)
            message = ""
            try:
                read_imatrix(path)
            except WeightsError as error:
                message = str(error)
            assert "\n" not in message
