"""Perplexity and divergence, gathered position by position from logits; sums in float64.

Perplexity is exp of the mean negative log-likelihood of the text's tokens, its error that of the mean (one standard
error, carried through exp). Divergence is KL(reference || model) of next-token distributions, in nats.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Divergence", "Likelihood", "log_softmax"]

Float64Array: TypeAlias = NDArray[np.float64]


def log_softmax(logits: NDArray[np.float32]) -> Float64Array:
    """Logits [rows, vocabulary] as log-probabilities in float64."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return rows


def standard_error(values: Float64Array) -> float:
    """Of the mean of ``values``; 0 for fewer than two."""
    return float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else 0.0


class Likelihood:
    """The likelihood of a text's tokens."""

    def __init__(self) -> None:
        self._parts: list[Float64Array] = []

    def add(self, log_probabilities: Float64Array, targets: NDArray[np.int64]) -> None:
        """Rows [n, vocabulary] and the token [n] that came after each."""
        self._parts.append(-log_probabilities[np.arange(len(targets)), targets])

    @property
    def losses(self) -> Float64Array:
        """The negative log-likelihood of every token so far, in nats."""
        return np.concatenate([np.zeros(0), *self._parts])

    def summary(self) -> dict[str, Any]:
        """Perplexity and its standard error, over how many tokens."""
        losses = self.losses
        mean = float(losses.mean())
        perplexity = math.exp(mean) if mean < 700 else math.inf
        return {
            "tokens": int(losses.size),
            "mean_nll": mean,
            "perplexity": perplexity,
            "perplexity_error": perplexity * standard_error(losses),
        }


class Divergence:
    """How far a model's distributions are from a reference's."""

    def __init__(self) -> None:
        self._divergence: list[Float64Array] = []
        self._agrees: list[NDArray[np.bool_]] = []

    def add(self, expected: Float64Array, got: Float64Array) -> None:
        """Log-probabilities [n, vocabulary] of the reference and of the model at the same positions."""
        self._divergence.append((np.exp(expected) * (expected - got)).sum(axis=-1))
        self._agrees.append(expected.argmax(axis=-1) == got.argmax(axis=-1))

    @property
    def divergence(self) -> Float64Array:
        """KL(reference || model) at every position so far."""
        return np.concatenate([np.zeros(0), *self._divergence])

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """Whether both find the same token the likeliest, at every position so far."""
        return np.concatenate([np.zeros(0, np.bool_), *self._agrees])

    def summary(self) -> dict[str, Any]:
        """The figures to keep."""
        values, agrees = self.divergence, self.agrees
        return {
            "positions": int(values.size),
            "mean_kl": float(values.mean()),
            "mean_kl_error": standard_error(values),
            "median_kl": float(np.median(values)),
            "p99_kl": float(np.percentile(values, 99)),
            "max_kl": float(values.max()),
            "top1": float(agrees.mean()),
            "top1_error": standard_error(agrees.astype(np.float64)),
        }
