"""Packing of small integers into 32-bit words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_stream", "pack_words"]


def pack_words(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Codes [..., n] in words [..., n / (32 / bits)], the first in the lowest bits; for bits that divide 32."""
    each = 32 // bits
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, each)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for place in range(each):
        words |= parts[..., place] << np.uint32(bits * place)
    return words.view(np.int32)


def pack_stream(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Codes [..., n] as one stream of bits, lowest first, in words [..., n * bits / 32]; codes may cross words."""
    if 32 % bits == 0:
        return pack_words(codes, bits)
    lead = codes.shape[:-1]
    flat = codes.astype(np.uint8).reshape(-1, codes.shape[-1])
    stream = (flat[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    packed = np.packbits(stream.reshape(len(flat), -1), axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<i4").astype(np.int32).reshape(*lead, -1)
