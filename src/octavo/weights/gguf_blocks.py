"""The byte layout of the GGUF tensor types octavo reads, and their unpacking into codes, scales and minima.

This is the only module that knows how a block is laid out; a native unpacker would replace its unpack functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from octavo.weights.tensors import AffineRows, Float32Array, Uint8Array

__all__ = ["BLOCK_FORMATS", "DENSE_TYPES", "TYPE_NAMES", "BlockFormat"]

# ggml's numbers, kept to refuse by name what is not supported.
TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

DENSE_TYPES: dict[str, Literal["f32", "f16", "bf16"]] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

# unpack(blocks [n, block_bytes], codes [n, block_values], scales and minima [n, block_values / group]) fills the last
# three; minima are left alone by formats that have none.
UnpackFunction = Callable[[Uint8Array, Uint8Array, Float32Array, Float32Array], None]

# Blocks are unpacked in pieces of about this many codes, so that every intermediate stays in the cache.
PIECE_CODES = 1 << 17


@dataclass(frozen=True)
class BlockFormat:
    """One quantised type: its block, the affine form it equals, and how to get there."""

    name: str
    block_values: int
    block_bytes: int
    bits: Literal[4, 8]
    group: int
    zero: int
    has_minimum: bool
    scale_dtype: Literal["f16", "f32"]
    unpack: UnpackFunction

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
LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
FLIP_SIGNS = np.uint64(0x8080808080808080)


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
    high &= LOW_NIBBLES
    store_runs(codes, [packed & LOW_NIBBLES, high], lanes_each)


def unpack_q4_0(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 scale, then 16 bytes: values 0..15 in the low nibbles, 16..31 in the high ones; w = scale * (code - 8)."""
    store_nibbles(codes, lanes(blocks, 2, 1), 1)
    scales[:] = half_floats(blocks, 0)


def unpack_q4_1(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 scale and minimum, then the nibbles of Q4_0; w = scale * code + minimum."""
    store_nibbles(codes, lanes(blocks, 4, 1), 1)
    scales[:] = half_floats(blocks, 0)
    minimums[:] = half_floats(blocks, 2)


def add_fifth_bits(blocks: Uint8Array, offset: int, codes: Uint8Array) -> None:
    """Add 16 to the codes whose bit is set in the 32 bits at byte ``offset``."""
    bits = np.unpackbits(blocks[:, offset : offset + 4], axis=1, bitorder="little")
    bits <<= 4
    codes |= bits


def unpack_q5_0(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 scale, 32 fifth bits, the nibbles of Q4_0; w = scale * (code - 16), shifted to the zero 128 of all 8 bits."""
    store_nibbles(codes, lanes(blocks, 6, 1), 1)
    add_fifth_bits(blocks, 2, codes)
    codes += 128 - 16
    scales[:] = half_floats(blocks, 0)


def unpack_q5_1(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 scale and minimum, 32 fifth bits, the nibbles of Q4_0; w = scale * code + minimum."""
    store_nibbles(codes, lanes(blocks, 8, 1), 1)
    add_fifth_bits(blocks, 4, codes)
    scales[:] = half_floats(blocks, 0)
    minimums[:] = half_floats(blocks, 2)


def unpack_q8_0(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 scale, then 32 signed bytes; made unsigned by adding 128."""
    np.bitwise_xor(lanes(blocks, 2, 2), FLIP_SIGNS, out=codes.view(np.uint64))
    scales[:] = half_floats(blocks, 0)


def unpack_k_scales(blocks: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """The eight scales and minima of a Q4_K or Q5_K block: its two f16 factors times 6-bit integers, minima negated.

    Bytes 4..16 hold the integers: 0..3 the low six bits of scale 0..3, 4..7 of minimum 0..3, their two top bits being
    the top two of scale and minimum 4..7, whose low four bits are the nibbles of 8..11.
    """
    packed = blocks[:, 4:16]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales[:, :4] = first & 0x3F
    scales[:, 4:] = (third & 0x0F) | ((first >> 2) & 0x30)
    minimums[:, :4] = second & 0x3F
    minimums[:, 4:] = (third >> 4) | ((second >> 2) & 0x30)
    scales *= half_floats(blocks, 0)
    minimums *= -half_floats(blocks, 2)


def unpack_q4_k(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """256 values: f16 factors of scales and minima, 12 bytes of 6-bit integers, then 4 runs of 32 bytes of nibbles."""
    store_nibbles(codes, lanes(blocks, 16, 8), 2)
    unpack_k_scales(blocks, scales, minimums)


def unpack_q5_k(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """As Q4_K with 32 bytes before the nibbles: bit i of byte j is the fifth bit of value 32 * i + j."""
    store_nibbles(codes, lanes(blocks, 48, 8), 2)
    fifth_bits = lanes(blocks, 16, 2)
    runs = codes.view(np.uint64).reshape(len(blocks), 8, 4)
    for run in range(8):
        bit = (fifth_bits >> np.uint64(run)) & np.uint64(0x0101010101010101)
        runs[:, run] |= bit << np.uint64(4)
    unpack_k_scales(blocks, scales, minimums)


def unpack_q6_k(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """256 values in groups of 16: 128 bytes of low nibbles, 64 of two high bits, 16 signed scales, their f16 factor.

    Each half of 128 values takes 64 bytes of nibbles (low ones first) and 32 of high bits (two per run of 32 values).
    A code is 0..63 for w = scale * (code - 32); shifted by 96 it has the zero 128 of all 8-bit codes.
    """
    store_nibbles(codes, lanes(blocks, 0, 8), 4)
    high_bits = lanes(blocks, 128, 4).reshape(len(blocks), 2, 4)
    halves = codes.view(np.uint64).reshape(len(blocks), 2, 4, 4)
    for run in range(4):
        two = (high_bits >> np.uint64(2 * run)) & np.uint64(0x0303030303030303)
        halves[:, :, run] |= two << np.uint64(4)
    halves += np.uint64(0x6060606060606060)  # no carry between bytes: 63 + 96 < 256
    scales[:] = blocks[:, 192:208].view(np.int8)
    scales *= half_floats(blocks, 208)


BLOCK_FORMATS: dict[str, BlockFormat] = {
    block.name: block
    for block in (
        BlockFormat("Q4_0", 32, 18, 4, 32, 8, False, "f16", unpack_q4_0),
        BlockFormat("Q4_1", 32, 20, 4, 32, 0, True, "f16", unpack_q4_1),
        BlockFormat("Q5_0", 32, 22, 8, 32, 128, False, "f16", unpack_q5_0),
        BlockFormat("Q5_1", 32, 24, 8, 32, 0, True, "f16", unpack_q5_1),
        BlockFormat("Q8_0", 32, 34, 8, 32, 128, False, "f16", unpack_q8_0),
        BlockFormat("Q4_K", 256, 144, 4, 32, 0, True, "f32", unpack_q4_k),
        BlockFormat("Q5_K", 256, 176, 8, 32, 0, True, "f32", unpack_q5_k),
        BlockFormat("Q6_K", 256, 210, 8, 16, 128, False, "f32", unpack_q6_k),
    )
}
