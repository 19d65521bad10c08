"""AWQ (arXiv 2306.00978): large inputs get finer weights, by a scale that is taken out of whatever makes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.ptq.grid import Float32Array, GridSpec, fit_grid, round_to_grid

__all__ = ["scale_search"]

_STEPS = 20


def scale_search(
    weights: Sequence[Float32Array],
    moments: Float32Array,
    mean_abs: Float32Array,
    spec: GridSpec,
    *,
    heads: tuple[int, int, int] | None = None,
) -> Float32Array:
    """The factors [k] that the inputs of ``weights`` [rows, k], which share them, are best divided by.

    Tried are the powers 0 to 0.95 of the mean magnitudes ``mean_abs`` [k]; what is least is the squared error of the
    outputs over the calibration inputs, tr(E M E') with ``moments`` M = mean of x x' [k, k]. ``heads`` (query heads, kv
    heads, head_dim) makes the factors of query heads that share a kv head the same.
    """
    typical = np.maximum(mean_abs.astype(np.float64), 1e-8)
    if heads is not None:
        q_heads, kv_heads, head_dim = heads
        shared = typical.reshape(kv_heads, q_heads // kv_heads, head_dim).mean(axis=1, keepdims=True)
        typical = np.broadcast_to(shared, (kv_heads, q_heads // kv_heads, head_dim)).reshape(-1)
    stacked = np.concatenate(weights) if len(weights) > 1 else weights[0]
    best, least = np.ones(len(typical), np.float32), np.inf
    for step in range(_STEPS):
        powers = typical ** (step / _STEPS)
        factors = (powers / np.sqrt(powers.max() * powers.min())).astype(np.float32)
        scaled = stacked * factors
        error = round_to_grid(scaled, fit_grid(scaled, spec)).dequantized()
        error /= factors
        error -= stacked
        loss = float(np.vdot(error @ moments, error))
        if loss < least:
            best, least = factors, loss
    return best
