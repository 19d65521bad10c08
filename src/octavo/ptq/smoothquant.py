"""SmoothQuant (arXiv 2211.10438): part of the range of activations moved into the weights, and static scales."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.ptq.grid import Float32Array

__all__ = ["AbsHistogram", "smoothing_factors"]

_BINS = 2048
_CANDIDATES = 128
LARGEST = 127


def smoothing_factors(weights: Sequence[Float32Array], max_abs: Float32Array, strength: float) -> Float32Array:
    """The factors [k] to divide inputs by: max|x| ** strength / max|w| ** (1 - strength), for each of them."""
    reach = np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0)
    factors = np.maximum(max_abs, 1e-5) ** strength / np.maximum(reach, 1e-5) ** (1 - strength)
    bounded: Float32Array = np.maximum(factors, 1e-5).astype(np.float32)
    return bounded


class AbsHistogram:
    """The magnitudes of all numbers of a tensor over the calibration, in bins of a width that doubles when needed."""

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(_BINS, np.int64)
        self.limit = 0.0
        self.largest = 0.0

    def add(self, values: Float32Array) -> None:
        """Count some more."""
        magnitudes = np.abs(values).ravel()
        largest = float(magnitudes.max(initial=0.0))
        self.largest = max(self.largest, largest)
        if largest > 0 and self.limit == 0:
            # A power of two above all, so that the result does not depend on what comes first.
            self.limit = float(2.0 ** (np.floor(np.log2(largest)) + 1))
        while largest >= self.limit:
            merged = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.concatenate([merged, np.zeros(_BINS // 2, np.int64)])
            self.limit *= 2
        if self.limit:
            places = (magnitudes * np.float32(_BINS / self.limit)).astype(np.int64)
            self.counts += np.bincount(places, minlength=_BINS)

    def scale(self, kind: str, percentile: float = 99.99) -> float:
        """The scale of int8: of the largest number, of a percentile of all, or the one with the least squared error."""
        if not self.largest:
            return 1.0
        width = self.limit / _BINS
        if kind == "max":
            return self.largest / LARGEST
        if kind == "percentile":
            below = np.cumsum(self.counts) / self.counts.sum()
            place = int(np.searchsorted(below, percentile / 100))
            return min((place + 1) * width, self.largest) / LARGEST
        centres = (np.arange(_BINS) + 0.5) * width
        scales = self.largest / LARGEST * np.arange(1, _CANDIDATES + 1) / _CANDIDATES
        errors = [
            float((self.counts * np.square(centres - np.minimum(np.rint(centres / scale), LARGEST) * scale)).sum())
            for scale in scales
        ]
        return float(scales[int(np.argmin(errors))])
