"""Small integers out of the words that quantised checkpoints pack them in."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.weights.tensors import Uint8Array

__all__ = ["column_bytes", "split_nibbles", "unpack_stream", "unpack_words"]

Array = npt.NDArray[Any]


def column_bytes(words: Array, start: int, stop: int) -> Uint8Array:
    """Columns [start, stop) of 32-bit words [m, n] as rows of bytes [stop - start, 4 m], lowest byte first."""
    columns = np.ascontiguousarray(words[:, start:stop].T)
    return columns.view(np.uint8).reshape(stop - start, 4 * words.shape[0])


def split_nibbles(packed: Uint8Array, high_first: bool = False) -> Uint8Array:
    """Bytes [rows, m] as 4-bit codes [rows, 2 m]: the low half of a byte, then its high one, or the other way round."""
    codes = np.empty((packed.shape[0], packed.shape[1], 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 1 if high_first else 0])
    np.right_shift(packed, 4, out=codes[:, :, 0 if high_first else 1])
    return codes.reshape(packed.shape[0], 2 * packed.shape[1])


def unpack_stream(packed: Uint8Array, bits: int) -> Uint8Array:
    """Bytes [rows, m] as a stream of codes of 2, 3, 4 or 8 bits, lowest bit first, across byte borders."""
    if bits == 8:
        return packed
    if bits == 4:
        return split_nibbles(packed)
    rows = packed.shape[0]
    if bits == 3:  # eight codes in three bytes
        triples = packed.reshape(rows, packed.shape[1] // 3, 3).astype(np.uint32)
        whole = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
        codes = (whole[..., None] >> np.arange(0, 24, 3, dtype=np.uint32) & 7).astype(np.uint8)
        return codes.reshape(rows, packed.shape[1] // 3 * 8)
    parts: Uint8Array = packed[:, :, None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    return parts.reshape(rows, packed.shape[1] * 8 // bits)


def unpack_words(words: Array, bits: int, count: int) -> Uint8Array:
    """32-bit words [rows, m] that each hold 32 // bits codes, lowest bits first, as codes [rows, count]."""
    if bits in (2, 4, 8):
        stream = np.ascontiguousarray(words).view(np.uint8).reshape(words.shape[0], 4 * words.shape[1])
        return unpack_stream(stream, bits)[:, :count]
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(words.shape[0], words.shape[1] * (32 // bits))[:, :count]
