"""GGUF types whose codes are looked up: the 4-bit tables (IQ4, MXFP4, NVFP4) and the codebooks of IQ1, IQ2 and IQ3.

The values of a table or codebook are small integers, so each type is one exact affine form: codes of 8 bits around 128,
or of 4 bits where the integers are evenly spaced (IQ3_S: the odd ones from -15 to 15; IQ1_S: -1, 0 and 1).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.weights.gguf_block_format import BlockFormat, half_floats, lanes, store_nibbles
from octavo.weights.gguf_grids import codebook
from octavo.weights.tensors import Float32Array, Uint8Array

__all__ = ["CODEBOOK_FORMATS"]

UInt64Array = npt.NDArray[np.uint64]

W8_ZERO = 128
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of e2m1, so that they are integers; scales are halved instead.
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ4_CODES = np.array(IQ4_VALUES, dtype=np.int16).astype(np.uint8) + np.uint8(W8_ZERO)
E2M1_CODES = np.array(E2M1_VALUES, dtype=np.int16).astype(np.uint8) + np.uint8(W8_ZERO)

IQ2_MAGNITUDES = (8, 25, 43, 0)
IQ3_XXS_MAGNITUDES = (4, 12, 20, 28, 36, 44, 52, 62, 0, 0, 0, 0, 0, 0, 0, 0)
# The magnitudes of IQ3_S are the odd numbers 1 to 15; written as half of what follows each.
IQ3_S_HALVES = (1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0)
IQ1_VALUES = (0, 1, 2, 0)
IQ1_DELTA = np.float32(0.125)


def each_byte(value: int) -> np.uint64:
    """A word of eight equal bytes."""
    return np.uint64(value * 0x0101010101010101)


def sign_masks() -> UInt64Array:
    """For the signs of eight values (bit i set: value i is negative) a word with 0xFF in the bytes of those values."""
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    return np.ascontiguousarray(bits * 0xFF, dtype=np.uint8).view("<u8").reshape(-1)


def even_sign_masks() -> UInt64Array:
    """The same for signs stored in 7 bits: the eighth makes the number of negative values even."""
    index = np.arange(128)
    parity = ((index[:, None] >> np.arange(7)) & 1).sum(axis=1) & 1
    masks: UInt64Array = sign_masks()[index | parity << 7]
    return masks


SIGNS, EVEN_SIGNS = sign_masks(), even_sign_masks()


def store_signed(codes: Uint8Array, magnitudes: UInt64Array, negative: UInt64Array) -> None:
    """Write 128 plus or minus each magnitude; no byte carries into the next, magnitudes being below 128."""
    below = magnitudes & negative
    signed = each_byte(W8_ZERO) + (magnitudes ^ below) - below
    codes.view(np.uint64).reshape(signed.shape)[:] = signed


def words_of_8(name: str, magnitudes: tuple[int, ...], index: npt.NDArray[np.integer]) -> UInt64Array:
    """Entries of a codebook of eights, one word each."""
    entries: UInt64Array = codebook(name, magnitudes).view("<u8").reshape(-1)[index]
    return entries


def words_of_4(name: str, magnitudes: tuple[int, ...], index: npt.NDArray[np.integer]) -> UInt64Array:
    """Entries of a codebook of fours, two to a word: [..., n] indices give [..., n / 2] words."""
    return np.ascontiguousarray(codebook(name, magnitudes).view("<u4").reshape(-1)[index]).view(np.uint64)


def shorts(blocks: Uint8Array, offset: int, count: int) -> npt.NDArray[np.uint16]:
    """``count`` 16-bit numbers from byte ``offset`` of every block."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2 * count]).view("<u2")


def words(blocks: Uint8Array, offset: int, count: int) -> npt.NDArray[np.uint32]:
    """``count`` 32-bit numbers from byte ``offset`` of every block."""
    return np.ascontiguousarray(blocks[:, offset : offset + 4 * count]).view("<u4")


def split_bits(packed: npt.NDArray[np.integer], bits: int, per_item: int) -> npt.NDArray[np.integer]:
    """``per_item`` numbers of so many bits from each item, the lowest first: [n, m] gives [n, m * per_item]."""
    shifts = np.arange(0, bits * per_item, bits, dtype=packed.dtype)
    taken = (packed[:, :, None] >> shifts) & packed.dtype.type((1 << bits) - 1)
    return taken.reshape(len(packed), -1)


def unpack_iq4_nl(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 scale, then 16 bytes of nibbles as Q4_0 has them; w = scale * table[nibble]."""
    store_nibbles(codes, lanes(blocks, 2, 1), 1)
    codes[:] = IQ4_CODES[codes]
    scales[:] = half_floats(blocks, 0)


def unpack_iq4_xs(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """256 values: f16 factor, 8 times two high bits and 8 nibbles of scales offset by 32, then 8 runs of 16 bytes."""
    store_nibbles(codes, lanes(blocks, 8, 8), 1)
    codes[:] = IQ4_CODES[codes]
    high, low = split_bits(shorts(blocks, 2, 1), 2, 8), split_bits(blocks[:, 4:8], 4, 2)
    scales[:] = (low | high << 4).astype(np.int16) - 32
    scales *= half_floats(blocks, 0)


def unpack_mxfp4(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """An e8m0 exponent (OCP Microscaling 1.0), then 16 bytes of e2m1 nibbles, low ones first; scales are halved."""
    store_nibbles(codes, lanes(blocks, 1, 1), 1)
    codes[:] = E2M1_CODES[codes]
    exponent = blocks[:, :1].astype(np.uint32)
    # Half of 2 ** (exponent - 127); the two smallest are subnormal.
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - np.uint32(1)) << np.uint32(23))
    scales[:] = bits.astype(np.uint32).view(np.float32)


def unpack_nvfp4(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """64 values in groups of 16: 4 scales in unsigned e4m3, then 8 bytes of e2m1 nibbles a group, low ones first."""
    packed = np.ascontiguousarray(blocks[:, 4:36]).view(np.uint64)
    runs = codes.view(np.uint64).reshape(len(blocks), 4, 2)
    runs[:, :, 0] = packed & each_byte(15)
    runs[:, :, 1] = (packed >> np.uint64(4)) & each_byte(15)
    codes[:] = E2M1_CODES[codes]
    scales[:] = E4M3_HALVES[blocks[:, :4]]


def e4m3_halves() -> Float32Array:
    """Half the value of each byte as unsigned e4m3 (bias 7, the top bit unused); 0x7F stands for nothing: 0."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, (byte & 7).astype(np.float32)
    normal = np.ldexp(np.float32(1) + mantissa / np.float32(8), exponent - 8)
    values = np.where(exponent == 0, np.ldexp(mantissa, -10), normal).astype(np.float32)
    values[0x7F] = 0
    return values


E4M3_HALVES = e4m3_halves()


def unpack_iq2_xxs(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 factor; for each group of 32 four indices of 8 bits, then four times 7 signs and a scale of 4 bits."""
    pairs = words(blocks, 2, 16).reshape(len(blocks), 8, 2)
    entries = words_of_8("IQ2_XXS", IQ2_MAGNITUDES, np.ascontiguousarray(pairs[:, :, 0]).view(np.uint8))
    store_signed(codes, entries, EVEN_SIGNS[split_bits(pairs[:, :, 1], 7, 4)])
    scales[:] = np.float32(0.5) + (pairs[:, :, 1] >> 28).astype(np.float32)
    scales *= half_floats(blocks, 0)
    scales *= np.float32(0.25)


def unpack_iq2_xs(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 factor, 32 times 9 bits of index and 7 signs, 16 scales of 4 bits for groups of 16."""
    indices = shorts(blocks, 2, 32)
    store_signed(codes, words_of_8("IQ2_XS", IQ2_MAGNITUDES, indices & 511), EVEN_SIGNS[indices >> 9])
    scales[:] = np.float32(0.5) + split_bits(blocks[:, 66:74], 4, 2).astype(np.float32)
    scales *= half_floats(blocks, 0)
    scales *= np.float32(0.25)


def unpack_iq2_s(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 factor, 32 low bytes of indices, 32 bytes of signs, 32 times two high bits, 16 scales of 4 bits."""
    indices = blocks[:, 2:34] | split_bits(blocks[:, 66:74], 2, 4).astype(np.uint16) << 8
    store_signed(codes, words_of_8("IQ2_S", IQ2_MAGNITUDES, indices), SIGNS[blocks[:, 34:66]])
    scales[:] = np.float32(0.5) + split_bits(blocks[:, 74:82], 4, 2).astype(np.float32)
    scales *= half_floats(blocks, 0)
    scales *= np.float32(0.25)


def unpack_iq3_xxs(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 factor, 64 indices of 8 bits, then for each group of 32 four times 7 signs and a scale of 4 bits."""
    signs = words(blocks, 66, 8)
    entries = words_of_4("IQ3_XXS", IQ3_XXS_MAGNITUDES, blocks[:, 2:66])
    store_signed(codes, entries, EVEN_SIGNS[split_bits(signs, 7, 4)])
    scales[:] = np.float32(0.5) + (signs >> 28).astype(np.float32)
    scales *= half_floats(blocks, 0)
    scales *= np.float32(0.5)


def unpack_iq3_s(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 factor, 64 low bytes of indices, their 64 high bits, 32 bytes of signs, 8 scales of 4 bits.

    The values are the odd numbers -15 to 15 times a scale: 2 * scale * code - 15 * scale for codes of 4 bits.
    """
    indices = blocks[:, 2:66] | split_bits(blocks[:, 66:74], 1, 8).astype(np.uint16) << 8
    halves, negative = words_of_4("IQ3_S", IQ3_S_HALVES, indices), SIGNS[blocks[:, 74:106]]
    below = halves & negative
    codes.view(np.uint64).reshape(halves.shape)[:] = each_byte(7) + (halves ^ below) - below + (negative & each_byte(1))
    scales[:] = 1 + 2 * split_bits(blocks[:, 106:110], 4, 2).astype(np.float32)
    scales *= half_floats(blocks, 0)
    np.multiply(scales, np.float32(-15), out=minimums)
    scales *= np.float32(2)


def unpack_iq1_s(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """f16 factor, 32 low bytes of indices, then for each group of 32 four times three high bits, a scale and a sign.

    A value is scale * (-1, 0 or 1, plus or minus an eighth by the sign).
    """
    high = shorts(blocks, 34, 8)
    indices = blocks[:, 2:34] | split_bits(high, 3, 4) << 8
    codes.view(np.uint64)[:] = words_of_8("IQ1_S", IQ1_VALUES, indices)
    scales[:] = 1 + 2 * (high >> 12 & 7).astype(np.float32)
    scales *= half_floats(blocks, 0)
    np.multiply(scales, np.where(high & 0x8000, -1 - IQ1_DELTA, IQ1_DELTA - 1), out=minimums)


def unpack_iq1_m(blocks: Uint8Array, codes: Uint8Array, scales: Float32Array, minimums: Float32Array) -> None:
    """32 low bytes of indices, 32 nibbles of three high bits and a sign, 16 scales of 3 bits for groups of 16.

    The f16 factor is in the four bits above each four scales. Values are those of IQ1_S with a sign for every eight,
    so they are written as eighths: 8 times -1, 0 or 1, plus or minus one.
    """
    packed, high = shorts(blocks, 48, 4), split_bits(blocks[:, 32:48], 4, 2)
    entries = words_of_8("IQ1_S", IQ1_VALUES, blocks[:, :32] | (high & 7).astype(np.uint16) << 8)
    eighth = np.where(high & 8, each_byte(W8_ZERO - 8 - 1), each_byte(W8_ZERO - 8 + 1))
    codes.view(np.uint64)[:] = (entries << np.uint64(3)) + eighth
    top = packed >> 12
    factor = (top[:, 0] | top[:, 1] << 4 | top[:, 2] << 8 | top[:, 3] << 12).astype("<u2").view(np.float16)
    scales[:] = 1 + 2 * split_bits(packed, 3, 4).astype(np.float32)
    scales *= factor.astype(np.float32)[:, None]
    scales *= IQ1_DELTA


CODEBOOK_FORMATS = (
    BlockFormat("IQ4_NL", 32, 18, 8, 32, 128, False, "f16", unpack_iq4_nl),
    BlockFormat("IQ4_XS", 256, 136, 8, 32, 128, False, "f32", unpack_iq4_xs),
    BlockFormat("MXFP4", 32, 17, 8, 32, 128, False, "f32", unpack_mxfp4),
    BlockFormat("NVFP4", 64, 36, 8, 16, 128, False, "f16", unpack_nvfp4),
    BlockFormat("IQ2_XXS", 256, 66, 8, 32, 128, False, "f32", unpack_iq2_xxs),
    BlockFormat("IQ2_XS", 256, 74, 8, 16, 128, False, "f32", unpack_iq2_xs),
    BlockFormat("IQ2_S", 256, 82, 8, 16, 128, False, "f32", unpack_iq2_s),
    BlockFormat("IQ3_XXS", 256, 98, 8, 32, 128, False, "f32", unpack_iq3_xxs),
    BlockFormat("IQ3_S", 256, 110, 4, 32, 0, True, "f32", unpack_iq3_s),
    BlockFormat("IQ1_S", 256, 50, 4, 32, 0, True, "f32", unpack_iq1_s),
    BlockFormat("IQ1_M", 256, 56, 8, 16, 128, False, "f32", unpack_iq1_m),
)
