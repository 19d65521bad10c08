"""Quantised weights written to the published layouts, value by value, from codes, scales and zero points.

The loops follow the formats' descriptions and share nothing with octavo's readers. Codes are [n, k], scales and zero
points [n, groups].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

Array = NDArray[Any]
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each column of eight


def as_int32(words: Array) -> Array:
    return words.astype(np.uint64).astype(np.uint32).view(np.int32)


def stream(codes: Array, bits: int) -> Array:
    """Each column of codes [count, n] as a stream of bits in 32-bit words [count * bits / 32, n], lowest first."""
    count, n = codes.shape
    words = np.zeros((count * bits // 32, n), np.uint64)
    for i in range(count):
        for bit in range(bits):
            place = i * bits + bit
            words[place // 32] |= (codes[i].astype(np.uint64) >> np.uint64(bit) & np.uint64(1)) << np.uint64(place % 32)
    return as_int32(words)


def awq(base: str, codes: Array, scales: Array, zeros: Array) -> dict[str, Array]:
    """AutoAWQ's gemm layout."""

    def packed(matrix: Array) -> Array:
        rows, columns = matrix.shape
        words = np.zeros((rows, columns // 8), np.uint64)
        for column in range(columns):
            shift = np.uint64(4 * AWQ_NIBBLES[column % 8])
            words[:, column // 8] |= matrix[:, column].astype(np.uint64) << shift
        return as_int32(words)

    return {
        f"{base}.qweight": packed(codes.T),
        f"{base}.qzeros": packed(zeros.T),
        f"{base}.scales": np.ascontiguousarray(scales.T.astype(np.float16)),
    }


def gptq(
    base: str, codes: Array, scales: Array, zeros: Array, bits: int, *, index: Array | None, version: int = 1
) -> dict[str, Array]:
    """AutoGPTQ's layout; `index` is the group of each input."""
    stored = zeros.T.astype(np.int64) - (1 if version == 1 else 0)
    tensors = {
        f"{base}.qweight": stream(codes.T, bits),
        f"{base}.qzeros": np.ascontiguousarray(stream((stored & ((1 << bits) - 1)).T, bits).T),
        f"{base}.scales": np.ascontiguousarray(scales.T.astype(np.float16)),
    }
    return tensors if index is None else {**tensors, f"{base}.g_idx": index.astype(np.int32)}


def packed_words(codes: Array, bits: int) -> Array:
    """Rows of codes in 32-bit words that each hold 32 // bits of them, as compressed-tensors has it."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // per_word)), np.uint64)
    for i in range(codes.shape[1]):
        words[:, i // per_word] |= codes[:, i].astype(np.uint64) << np.uint64(bits * (i % per_word))
    return as_int32(words)


def pack_quantized(
    base: str, codes: Array, scales: Array, zeros: Array | None, bits: int, index: Array | None = None
) -> dict[str, Array]:
    """compressed-tensors' pack-quantized layout; codes and zeros are unsigned, as they are stored."""
    tensors = {
        f"{base}.weight_packed": packed_words(codes, bits),
        f"{base}.weight_scale": scales.astype(np.float16),
        f"{base}.weight_shape": np.asarray(codes.shape, np.int64),
    }
    if zeros is not None:
        tensors[f"{base}.weight_zero_point"] = np.ascontiguousarray(packed_words(zeros.T, bits).T)
    if index is not None:
        tensors[f"{base}.weight_g_idx"] = index.astype(np.int32)
    return tensors


def eetq(base: str, weights: Array, scales: Array) -> dict[str, Array]:
    """EETQ's layout of int8 weights [n, k]: k permuted, columns in tiles of 64 by turns, plus 128, bytes swapped."""
    n, k = weights.shape
    permuted = np.empty((k, n), np.int8)
    for base_row in range(0, k, 16):
        for row in range(16):
            permuted[base_row + row] = weights[:, base_row + 8 * (row % 4 // 2) + row % 2 + 2 * (row // 4)]
    words = np.ascontiguousarray(permuted.T).reshape(n, k // 4, 4)
    tiled = np.zeros((n // 2, k // 2, 4), np.int8)
    for column in range(n):
        for word in range(k // 4):
            tiled[column // 2, 2 * (word // 16 * 16) + 16 * (column % 2) + word % 16] = words[column, word]
    stored = (tiled.reshape(-1, 4).astype(np.int32) + 128).astype(np.uint8)[:, [0, 2, 1, 3]]
    return {f"{base}.weight": stored.view(np.int8).reshape(k, n), f"{base}.weight_scales": scales.astype(np.float16)}


def write_model(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Path:
    """A model directory of these tensors (numpy or torch)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    as_torch = {
        name: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value, order="C"))
        for name, value in tensors.items()
    }
    save_file({name: value.contiguous() for name, value in as_torch.items()}, folder / "model.safetensors")
    return folder
