"""numpy's view of what a KV cache of each type holds of keys and values."""

from __future__ import annotations

import numpy as np

from octavo._native import KvType
from tests.native.attention import Heads, query_form
from tests.native.harness import Act, Array, rotate, to_bf16

# Exponent and mantissa bits of the fp8 formats, and their largest finite numbers.
FLOAT8 = {
    KvType.E4M3: (4, 3, 448.0),
    KvType.E4M3Scaled: (4, 3, 448.0),
    KvType.E5M2: (5, 2, 57344.0),
}
# The positive levels of 4 bits.
LEVELS_4 = np.array([0.1279296875, 0.388671875, 0.65625, 0.94140625, 1.2578125, 1.6171875, 2.0625, 2.734375])


def to_levels(x: Array) -> Array:
    """Rows rotated, rounded to the levels of 4 bits with one scale each, and rotated back."""
    block = x.shape[-1] & -x.shape[-1]
    rotated = rotate(x, block)
    size = np.sqrt((rotated**2).mean(axis=-1, keepdims=True))
    y = np.divide(np.abs(rotated), size, out=np.zeros_like(rotated), where=size > 1e-18)
    levels = LEVELS_4[np.searchsorted((LEVELS_4[1:] + LEVELS_4[:-1]) / 2, y)]
    scales = size * (y * levels).sum(axis=-1, keepdims=True) / (levels**2).sum(axis=-1, keepdims=True)
    return rotate(np.copysign(levels, rotated) * to_bf16(scales) * (size > 1e-18), block).astype(np.float32)


def to_float8(x: Array, kv: KvType) -> Array:
    """The nearest number of the format (ties to even), the largest for what is beyond it."""
    exponent, mantissa, largest = FLOAT8[kv]
    bias = 2 ** (exponent - 1) - 1
    magnitude = np.minimum(np.abs(x.astype(np.float64)), largest)
    _, power = np.frexp(magnitude)
    quantum = 2.0 ** (np.maximum(power - 1, 1 - bias) - mantissa)
    return (np.sign(x) * np.rint(magnitude / quantum) * quantum).astype(np.float32)


def bf16_above(x: Array) -> Array:
    """The least bf16 that is not below each number."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def stored(x: Array, kv: KvType, scale: float = 1.0) -> Array:
    """What [..., head_dim] values are in the cache; a scaled type has a scale for each row, another has `scale`."""
    x = np.asarray(x, np.float32)
    if kv == KvType.F32:
        return x
    if kv == KvType.BF16:
        return to_bf16(x)
    if kv == KvType.F16:
        return x.astype(np.float16).astype(np.float32)
    if kv == KvType.I4:
        return to_levels(x)
    scales = np.full((*x.shape[:-1], 1), scale, np.float32)
    if kv in (KvType.I8, KvType.E4M3Scaled):
        largest = np.abs(x).max(axis=-1, keepdims=True)
        scales = bf16_above(largest / np.float32(127 if kv == KvType.I8 else 448)) * (largest > 1e-30)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    codes = x * inverse
    codes = np.rint(codes) if kv == KvType.I8 else to_float8(codes, kv)
    return (codes * scales).astype(np.float32)


def as_cached(heads: Heads, qkv: Array, kv: KvType, k_scale: float = 1.0, v_scale: float = 1.0) -> Array:
    """Rows of q, k and v as attention sees them."""
    q, k, v = heads.split(np.asarray(qkv, np.float32))
    q = q if query_form(kv) == Act.F32 else to_bf16(q)
    parts = (q, stored(k, kv, k_scale), stored(v, kv, v_scale))
    return np.concatenate([part.reshape(len(qkv), -1) for part in parts], axis=1)
