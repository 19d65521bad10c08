"""When requests are sent: evenly, at random, in bursts or at a growing rate, drawn ahead of the measurement."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from octavo.benchmarking.datasets import Work
from octavo.benchmarking.options import BenchOptions

__all__ = ["arrival_times", "rate_of"]


def arrival_times(options: BenchOptions, work: Sequence[Work]) -> list[float]:
    """Seconds after the start at which each request is due.

    Gaps are drawn from a gamma distribution of shape ``burstiness`` with the rate's mean. At a constant rate they are
    stretched so that the last request is due after exactly N / rate seconds: seeds then differ in pattern only.
    """
    if options.self_timed:
        return [one.at or 0.0 for one in work]
    count = len(work)
    rates = [rate_of(options, index, count) for index in range(count)]
    if all(math.isinf(rate) for rate in rates):
        return [0.0] * count
    means = np.array([1.0 / rate for rate in rates])
    if math.isinf(options.burstiness):
        gaps = means
    else:
        gaps = np.random.default_rng(options.seed).gamma(options.burstiness, means / options.burstiness)
    due = np.cumsum(gaps)
    if options.ramp_up_strategy is None and due[-1] > 0:
        due *= count / options.request_rate / due[-1]
    return [float(time) for time in due]


def rate_of(options: BenchOptions, index: int, count: int) -> float:
    """Requests a second when request ``index`` of ``count`` is sent."""
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.ramp_up_strategy is None or start is None or end is None:
        return options.request_rate
    progress = index / max(count - 1, 1)
    if options.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return float(start * (end / start) ** progress)
