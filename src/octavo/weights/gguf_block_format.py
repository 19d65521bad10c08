"""What a quantised GGUF type is to octavo, and the numpy helpers its unpack functions are written with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from octavo.weights.tensors import AffineRows, Float32Array, Uint8Array

__all__ = ["BlockFormat", "LowestBits", "half_floats", "lanes", "store_nibbles", "store_runs"]

# unpack(blocks [n, block_bytes], codes [n, block_values], scales and minima [n, block_values / group]) fills the last
# three; minima are left alone by formats that have none.
UnpackFunction = Callable[[Uint8Array, Uint8Array, Float32Array, Float32Array], None]

# Blocks are unpacked in pieces of about this many codes, so that every intermediate stays in the cache.
PIECE_CODES = 1 << 17


@dataclass(frozen=True)
class BlockFormat:
    """One quantised type: its block, the affine form it equals, and how to get there.

    ``native`` says that the native library unpacks it too, to the same bits.
    """

    name: str
    block_values: int
    block_bytes: int
    bits: Literal[4, 8]
    group: int
    zero: int
    has_minimum: bool
    scale_dtype: Literal["f16", "f32"]
    unpack: UnpackFunction
    native: bool = False

    def unpack_rows(self, raw: Uint8Array) -> AffineRows:
        """Rows of blocks [rows, bytes per row] as codes [rows, k] with scales and minima [rows, k / group]."""
        rows = raw.shape[0]
        blocks = raw.reshape(-1, self.block_bytes)
        count, groups = len(blocks), self.block_values // self.group
        codes = np.empty((count, self.block_values), dtype=np.uint8)
        scales = np.empty((count, groups), dtype=np.float32)
        minimums = np.empty((count if self.has_minimum else 0, groups), dtype=np.float32)
        step = PIECE_CODES // self.block_values
        with np.errstate(invalid="ignore"):  # a damaged factor may be infinite: 0 * inf is the NaN the format defines
            for at in range(0, count, step):
                piece = slice(at, at + step)
                self.unpack(blocks[piece], codes[piece], scales[piece], minimums[piece])
        k = raw.shape[1] // self.block_bytes * self.block_values
        shape = (rows, k // self.group)
        return AffineRows(
            codes.reshape(rows, k), scales.reshape(shape), minimums.reshape(shape) if self.has_minimum else None
        )


# Copying 16 opaque bytes at a time is far faster in numpy than an inner loop over 16 of them.
LANE = np.dtype("V16")


class LowestBits:
    """The lowest bits of each of the eight bytes of a word, by how many."""

    ONE = np.uint64(0x0101010101010101)
    TWO = np.uint64(0x0303030303030303)
    FOUR = np.uint64(0x0F0F0F0F0F0F0F0F)


def lanes(blocks: Uint8Array, offset: int, count: int) -> npt.NDArray[np.uint64]:
    """Bytes [offset, offset + 16 * count) of every block, contiguous, as uint64 [blocks, 2 * count]; may be a view."""
    record = np.dtype(
        {"names": ["lanes"], "formats": [(LANE, (count,))], "offsets": [offset], "itemsize": blocks.shape[1]}
    )
    taken = np.ascontiguousarray(blocks.view(record)["lanes"].reshape(len(blocks), count))
    return taken.view(np.uint64)


def half_floats(blocks: Uint8Array, offset: int) -> Float32Array:
    """The f16 at byte ``offset`` of every block, as float32 [blocks, 1]."""
    record = np.dtype({"names": ["half"], "formats": ["<f2"], "offsets": [offset], "itemsize": blocks.shape[1]})
    halves: Float32Array = blocks.view(record)["half"].astype(np.float32).reshape(-1, 1)
    return halves


def store_runs(codes: Uint8Array, runs: list[npt.NDArray[np.uint64]], lanes_each: int) -> None:
    """Write the runs of codes in turn: 16 * lanes_each bytes of the first, as many of the second, and so on again."""
    target = codes.view(LANE).reshape(len(codes), -1, len(runs), lanes_each)
    for index, run in enumerate(runs):
        target[:, :, index, :] = run.view(LANE).reshape(len(codes), -1, lanes_each)


def store_nibbles(codes: Uint8Array, packed: npt.NDArray[np.uint64], lanes_each: int) -> None:
    """Write low nibbles, then high ones, of every 16 * lanes_each packed bytes."""
    high = packed >> np.uint64(4)
    high &= LowestBits.FOUR
    store_runs(codes, [packed & LowestBits.FOUR, high], lanes_each)
