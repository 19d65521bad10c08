"""What is gathered of the inputs of linears over the calibration: second moments, mean and largest magnitudes."""

from __future__ import annotations

import numpy as np

from octavo.ptq.grid import Float32Array

__all__ = ["InputStatistics"]


class InputStatistics:
    """Of one value of width k: a [k, k] and two [k] arrays, whatever the number of tokens."""

    def __init__(self, k: int, *, moments: bool = True) -> None:
        self.tokens = 0
        self._products = np.zeros((k, k), np.float32) if moments else None
        self._sum = np.zeros(k, np.float64)
        self.max_abs = np.zeros(k, np.float32)

    def add(self, x: Float32Array) -> None:
        """Some more inputs [tokens, k]."""
        if self._products is not None:
            self._products += x.T @ x
        magnitudes = np.abs(x)
        self._sum += magnitudes.sum(axis=0, dtype=np.float64)
        self.max_abs = np.maximum(self.max_abs, magnitudes.max(axis=0))
        self.tokens += len(x)

    @property
    def moments(self) -> Float32Array:
        """The mean of x x' [k, k]."""
        assert self._products is not None
        return self._products / np.float32(max(1, self.tokens))

    @property
    def mean_abs(self) -> Float32Array:
        """The mean magnitude of each input [k]."""
        return (self._sum / max(1, self.tokens)).astype(np.float32)
