"""The GGUF tensor types octavo reads, and the unpacking of those that are plain affine: codes, scales and minima.

The types that look their values up are in `gguf_codebooks`. The commonest are unpacked natively as well
(native/stored_rows.cpp), to the same bits.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from octavo.weights.gguf_block_format import BlockFormat, LowestBits, half_floats, lanes, store_nibbles
from octavo.weights.gguf_codebooks import CODEBOOK_FORMATS
from octavo.weights.tensors import Float32Array, Uint8Array

__all__ = ["BLOCK_FORMATS", "DENSE_BYTES", "DENSE_TYPES", "TYPE_NAMES", "BlockFormat"]

# ggml's numbers, kept to refuse by name what is not supported.
TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip

# F64 is rounded to f32 as it is read.
DENSE_TYPES: dict[str, Literal["f32", "f16", "bf16"]] = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F64": "f32"}
DENSE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}

FLIP_SIGNS = np.uint64(0x8080808080808080)


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
        bit = (fifth_bits >> np.uint64(run)) & LowestBits.ONE
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
        two = (high_bits >> np.uint64(2 * run)) & LowestBits.TWO
        halves[:, :, run] |= two << np.uint64(4)
    halves += np.uint64(0x6060606060606060)  # no carry between bytes: 63 + 96 < 256
    scales[:] = blocks[:, 192:208].view(np.int8)
    scales *= half_floats(blocks, 208)


def unpack_q2_k(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """256 values in groups of 16: a byte of scale (low nibble) and minimum each, 64 bytes of codes, two f16 factors.

    Each half of 128 values takes 32 bytes, two bits a value, the first 32 values the lowest.
    """
    packed = lanes(blocks, 16, 4).reshape(len(blocks), 2, 4)
    halves = codes.view(np.uint64).reshape(len(blocks), 2, 4, 4)
    for run in range(4):
        halves[:, :, run] = (packed >> np.uint64(2 * run)) & LowestBits.TWO
    scales[:] = blocks[:, :16] & 15
    minimums[:] = blocks[:, :16] >> 4
    scales *= half_floats(blocks, 80)
    minimums *= -half_floats(blocks, 82)


def unpack_q3_k(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """256 values in groups of 16: 32 bytes of third bits, 64 of low bits as Q2_K, 12 bytes of 6-bit scales, f16 factor.

    Bit i of byte j of the first is the third bit of value 32 * i + j; w = scale * (code - 4). The scales, offset by 32,
    have their low four bits in the nibbles of eight bytes (low nibbles first) and two high bits in four more.
    """
    third = lanes(blocks, 0, 2)
    packed = lanes(blocks, 32, 4).reshape(len(blocks), 2, 4)
    halves = codes.view(np.uint64).reshape(len(blocks), 2, 4, 4)
    for run in range(4):
        halves[:, :, run] = (packed >> np.uint64(2 * run)) & LowestBits.TWO
    runs = codes.view(np.uint64).reshape(len(blocks), 8, 4)
    for run in range(8):
        runs[:, run] |= ((third >> np.uint64(run)) & LowestBits.ONE) << np.uint64(2)
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    scales[:, :8] = low & 15
    scales[:, 8:] = low >> 4
    for run in range(4):
        scales[:, 4 * run : 4 * run + 4] += (high >> np.uint8(2 * run) & np.uint8(3)) << np.uint8(4)
    scales -= np.float32(32)
    scales *= half_floats(blocks, 108)


def unpack_tq1_0(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """256 values -1, 0 or 1: five to a byte in 32 and 16 bytes, four in 4 more, then the f16 scale.

    A byte is a number in base 3 scaled to 256, read from its top digit: the next one is at 3 times as much, modulo 256.
    """
    at = 0
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        rest = blocks[:, start:stop]
        for _ in range(digits):
            codes[:, at : at + stop - start] = rest.astype(np.uint16) * np.uint16(3) >> np.uint16(8)
            rest = rest * np.uint8(3)
            at += stop - start
    scales[:] = half_floats(blocks, 52)


def unpack_tq2_0(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """256 values -1 to 2: 64 bytes of two bits a value as Q2_K, then the f16 scale; w = scale * (code - 1)."""
    packed = lanes(blocks, 0, 4).reshape(len(blocks), 2, 4)
    halves = codes.view(np.uint64).reshape(len(blocks), 2, 4, 4)
    for run in range(4):
        halves[:, :, run] = (packed >> np.uint64(2 * run)) & LowestBits.TWO
    scales[:] = half_floats(blocks, 64)


BLOCK_FORMATS: dict[str, BlockFormat] = {
    block.name: block
    for block in (
        BlockFormat("Q4_0", 32, 18, 4, 32, 8, False, "f16", unpack_q4_0, native=True),
        BlockFormat("Q4_1", 32, 20, 4, 32, 0, True, "f16", unpack_q4_1, native=True),
        BlockFormat("Q5_0", 32, 22, 8, 32, 128, False, "f16", unpack_q5_0, native=True),
        BlockFormat("Q5_1", 32, 24, 8, 32, 0, True, "f16", unpack_q5_1, native=True),
        BlockFormat("Q8_0", 32, 34, 8, 32, 128, False, "f16", unpack_q8_0, native=True),
        BlockFormat("Q2_K", 256, 84, 4, 16, 0, True, "f32", unpack_q2_k, native=True),
        BlockFormat("Q3_K", 256, 110, 4, 16, 4, False, "f32", unpack_q3_k, native=True),
        BlockFormat("Q4_K", 256, 144, 4, 32, 0, True, "f32", unpack_q4_k, native=True),
        BlockFormat("Q5_K", 256, 176, 8, 32, 0, True, "f32", unpack_q5_k, native=True),
        BlockFormat("Q6_K", 256, 210, 8, 16, 128, False, "f32", unpack_q6_k, native=True),
        *CODEBOOK_FORMATS,
        BlockFormat("TQ1_0", 256, 54, 4, 256, 1, False, "f16", unpack_tq1_0),
        BlockFormat("TQ2_0", 256, 66, 4, 256, 1, False, "f16", unpack_tq2_0),
    )
}
