"""Written safetensors files are read by the format's own library and by octavo."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from octavo.errors import WeightsError
from octavo.weights.safetensors_files import SafetensorsFile
from octavo.weights.safetensors_writing import OutgoingTensor, write_safetensors, write_sharded


def outgoing(name: str, dtype: str, values: np.ndarray) -> OutgoingTensor:
    return OutgoingTensor(name, dtype, values.shape, lambda: [row.tobytes() for row in values])


TENSORS = {
    "a": ("I8", np.arange(7, dtype=np.int8)),
    "b": ("F32", np.arange(6, dtype=np.float32).reshape(2, 3)),
    "c": ("I64", np.array([3, 4])),
    "d": ("F16", np.zeros((3, 0), np.float16)),
}


def test_a_file_is_read_back(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", [outgoing(name, *each) for name, each in TENSORS.items()])
    found = load_file(tmp_path / "x.safetensors")
    for name, (_, values) in TENSORS.items():
        np.testing.assert_array_equal(found[name], values)
        assert found[name].dtype == values.dtype
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert all((file.data_start + entry.start) % 8 == 0 for name, entry in file.entries.items() if name in "bc")
    assert not list(tmp_path.glob("*.partial"))


def test_large_checkpoints_are_written_as_shards(tmp_path: Path) -> None:
    tensors = [outgoing(f"t{number}", "F32", np.full(25, number, np.float32)) for number in range(5)]
    paths = write_sharded(tmp_path, tensors, shard_bytes=200)
    assert [path.name for path in paths] == [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 500
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / file)[name][0] == int(name[1:])


def test_a_tensor_that_gives_too_few_bytes_leaves_no_file(tmp_path: Path) -> None:
    short = OutgoingTensor("s", "F32", (4,), lambda: [b"\0" * 12])
    with pytest.raises(WeightsError, match="tensor s: gave 12 bytes, 16 were announced"):
        write_safetensors(tmp_path / "x.safetensors", [short])
    assert not (tmp_path / "x.safetensors").exists()
