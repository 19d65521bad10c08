"""The layouts read back by the book: plain loops over bits, written apart from the code that packs them."""

from __future__ import annotations

import numpy as np


def bits_of(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """``count`` numbers of ``bits`` bits from a row of words, taken as one stream of bits."""
    stream = [int(word) >> bit & 1 for word in words.view(np.uint32) for bit in range(32)]
    return np.array([sum(stream[at * bits + bit] << bit for bit in range(bits)) for at in range(count)])


def gptq_weights(tensors: dict[str, np.ndarray], module: str, bits: int) -> np.ndarray:
    """Weights [out, k] of the GPTQ layout, version 1."""
    qweight, qzeros = tensors[f"{module}.qweight"], tensors[f"{module}.qzeros"]
    scales, g_idx = tensors[f"{module}.scales"].astype(np.float32), tensors[f"{module}.g_idx"]
    k, out = len(g_idx), qweight.shape[1]
    codes = np.stack([bits_of(np.ascontiguousarray(qweight[:, column]), bits, k) for column in range(out)])
    zeros = np.stack([bits_of(row, bits, out) for row in qzeros]) + 1
    return ((codes - zeros[g_idx].T) * scales[g_idx].T).astype(np.float32)


def awq_weights(tensors: dict[str, np.ndarray], module: str, group: int) -> np.ndarray:
    """Weights [out, k] of the AWQ gemm layout."""

    def columns(words: np.ndarray) -> np.ndarray:
        rows, count = words.shape
        found = np.zeros((rows, 8 * count), np.int64)
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found[:, column::8] = words.view(np.uint32) >> np.uint32(4 * place) & np.uint32(15)
        return found

    codes, zeros = columns(tensors[f"{module}.qweight"]), columns(tensors[f"{module}.qzeros"])
    scales = tensors[f"{module}.scales"].astype(np.float32)
    groups = np.arange(len(codes)) // group
    return ((codes - zeros[groups]) * scales[groups]).T.astype(np.float32)


def packed_weights(tensors: dict[str, np.ndarray], module: str, bits: int) -> np.ndarray:
    """Weights [out, k] of compressed-tensors' pack-quantized; scales must be float32 by now."""
    out, k = (int(size) for size in tensors[f"{module}.weight_shape"])
    codes = np.stack([bits_of(row, bits, k) for row in tensors[f"{module}.weight_packed"]])
    scales = tensors[f"{module}.weight_scale"]
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if f"{module}.weight_zero_point" in tensors:
        packed = tensors[f"{module}.weight_zero_point"]
        zeros = np.stack([bits_of(np.ascontiguousarray(column), bits, out) for column in packed.T], axis=1)
    each = k // scales.shape[1]
    return ((codes - np.repeat(zeros, each, 1)) * np.repeat(scales, each, 1)).astype(np.float32)
