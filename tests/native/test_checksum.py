"""The checksum of built models: the documented sum, and no single change goes unseen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo._native import checksum64

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15


def _step(lane: int, word: int) -> int:
    product = (lane ^ word) * _FACTOR & _MASK
    return (product << 29 | product >> 35) & _MASK


def reference(data: bytes) -> int:
    lanes = [_FACTOR * (i + 1) & _MASK for i in range(8)]
    for index in range(0, len(data), 8):
        place = index // 8 % 8
        lanes[place] = _step(lanes[place], int.from_bytes(data[index : index + 8].ljust(8, b"\0"), "little"))
    total = len(data)
    for lane in lanes:
        total = _step(total, lane)
    return total ^ total >> 32


def native(data: bytes) -> int:
    return checksum64(np.frombuffer(data, np.uint8))


@given(st.binary(max_size=300))
def test_the_sum_is_the_documented_one(data: bytes) -> None:
    assert native(data) == reference(data)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_changed_byte_changes_the_sum(data: bytes, draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    changed[place] ^= draw.draw(st.integers(1, 255))
    assert native(bytes(changed)) != native(data)


@pytest.mark.parametrize("size", [0, 7, 8, 63, 64, 65, 1000])
def test_zeros_of_different_lengths_differ(size: int) -> None:
    assert native(bytes(size)) != native(bytes(size + 1))
