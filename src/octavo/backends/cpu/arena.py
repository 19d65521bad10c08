"""The memory plan of a step: intermediate values in one arena, sharing bytes where their lives do not overlap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo._native import Act, Activation

__all__ = ["Buffer", "place"]

_ALIGNMENT = 64
_ELEMENT_BYTES = {Act.F32: 4, Act.BF16: 2, Act.I8: 1}


@dataclass(eq=False)
class Buffer:
    """An intermediate value: `rows` rows of `width` elements, alive from operation `first` to operation `last`."""

    form: Act
    width: int
    rows: int
    group: int = 32
    rotation: int = 0
    first: int = -1
    last: int = -1
    offset: int = -1

    def touch(self, operation: int) -> None:
        """Note that an operation reads or writes the value."""
        self.first = operation if self.first < 0 else self.first
        self.last = operation

    @property
    def _parts(self) -> tuple[int, int]:
        """Bytes of the elements, and of each of the three arrays that go with int8."""
        elements = self.rows * self.width * _ELEMENT_BYTES[self.form]
        groups = self.rows * (self.width // self.group) * 4 if self.form == Act.I8 else 0
        return _aligned(elements), _aligned(groups)

    @property
    def nbytes(self) -> int:
        elements, groups = self._parts
        return elements + 3 * groups

    def activation(self) -> Activation:
        """The value as the native library sees it, once placed."""
        elements, groups = self._parts
        start = self.offset + elements
        return Activation(
            self.form, self.width, self.offset, self.group, start, start + groups, start + 2 * groups, self.rotation
        )


def place(buffers: Iterable[Buffer]) -> int:
    """Give every buffer an offset, large ones first, each in the lowest gap free during its life; returns the size."""
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda each: -each.nbytes):
        offset = 0
        for other in sorted(placed, key=lambda each: each.offset):
            if other.first <= buffer.last and buffer.first <= other.last:
                if offset + buffer.nbytes <= other.offset:
                    break
                offset = max(offset, other.offset + other.nbytes)
        buffer.offset = offset
        placed.append(buffer)
    return max((buffer.offset + buffer.nbytes for buffer in placed), default=0)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
