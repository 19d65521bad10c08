"""Histograms cheap enough for every token, and the views several names have of one of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

__all__ = ["Histogram", "decades", "merged", "project"]


class Histogram:
    """Counts of observations by upper bound, and their sum.

    One thread observes, others may read at any time: what they see is at most one observation behind. Several names
    with different buckets can show one histogram as long as its bounds hold all of theirs (`merged`, `project`).
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        if self.bounds != sorted(set(self.bounds)):
            raise ValueError("the bounds of a histogram must rise")
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value; like Prometheus, a bound includes the values equal to it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count several values."""
        counts, bounds = self.counts, self.bounds
        total = 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.total += total

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


def merged(*bounds: Sequence[float]) -> list[float]:
    """The bounds a histogram needs so that each of these can be shown exactly."""
    return sorted({bound for some in bounds for bound in some})


def decades(steps: Sequence[int], largest: int) -> list[float]:
    """Bounds such as 1, 2, 5, 10, 20, 50, ... up to ``largest``."""
    found: list[float] = []
    scale = 1
    while True:
        for step in steps:
            if step * scale > largest:
                return found
            found.append(float(step * scale))
        scale *= 10


def project(histograms: Sequence[Histogram], bounds: Sequence[float]) -> tuple[list[int], float]:
    """The cumulative counts of some histograms together at ``bounds`` (then of all values), and the sum of all values.

    Each histogram must have every bound.
    """
    cumulative = [0] * (len(bounds) + 1)
    total = 0.0
    for histogram in histograms:
        counts = histogram.counts.copy()
        total += histogram.total
        running, start = 0, 0
        for position, bound in enumerate(bounds):
            end = bisect_left(histogram.bounds, bound) + 1
            running += sum(counts[start:end])
            cumulative[position] += running
            start = end
        cumulative[-1] += running + sum(counts[start:])
    return cumulative, total
