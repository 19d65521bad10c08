"""Regions that are files: what is written is in the file, what is not a long enough file is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from octavo._native import Form, PackedWeight, Region


def make_file(path: Path, size: int) -> str:
    path.write_bytes(bytes(size))
    return str(path)


def test_a_weight_packed_into_a_file_is_read_back_from_it(tmp_path: Path) -> None:
    size = PackedWeight.bytes_needed(Form.BF16, 16, 32)
    path = make_file(tmp_path / "weights", size)
    values = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    region = Region.map_file(path, size, True)
    written = PackedWeight(region, Form.BF16, 16, 32)
    written.pack_f32(np.arange(16, dtype=np.int32), values)
    region.flush()
    columns = [written.column(i) for i in range(16)]
    mapped = Region.map_file(path, size, False)
    read = PackedWeight(mapped, Form.BF16, 16, 32)
    assert read.offset == 0
    assert all(np.array_equal(read.column(i), columns[i]) for i in range(16))
    assert bytes(mapped.bytes) == Path(path).read_bytes()
    assert mapped.bytes.flags.writeable is False


def test_a_mapped_file_is_shared_and_cannot_be_written(tmp_path: Path) -> None:
    path = make_file(tmp_path / "weights", 4096)
    region = Region.map_file(path, 4096, False)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
    assert [line[1] for line in lines] == ["r--s"]
    assert region.size == 4096


def test_a_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is 100 bytes long, 101 are needed"):
        Region.map_file(make_file(tmp_path / "short", 100), 101, False)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No such file"):
        Region.map_file(str(tmp_path / "absent"), 1, False)
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises((ValueError, RuntimeError)):
            Region.map_file(str(path), 1, False)


def test_only_files_are_flushed() -> None:
    with pytest.raises(RuntimeError, match="has no file"):
        Region(64).flush()
