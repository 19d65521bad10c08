"""Requests come at the rate, in the pattern and with the growth that was asked for, and the same again with a seed."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any

import pytest

from octavo.benchmarking.arrivals import arrival_times, rate_of
from octavo.benchmarking.datasets import Work
from octavo.benchmarking.options import BenchOptions
from octavo.errors import ConfigError

WORK = [Work("x", 1, 1) for _ in range(4000)]


def times(**options: Any) -> list[float]:
    return arrival_times(BenchOptions(**options), WORK)


def variation(due: list[float]) -> float:
    """Standard deviation of the gaps over their mean: 1 for a Poisson process, 1 / sqrt(shape) for a gamma one."""
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *due])]
    return statistics.pstdev(gaps) / statistics.fmean(gaps)


def test_without_a_rate_all_are_sent_at_once() -> None:
    assert set(times()) == {0.0}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, 100.0])
def test_burstiness_is_the_shape_of_the_gaps_and_leaves_the_rate(burstiness: float) -> None:
    due = times(request_rate=50.0, burstiness=burstiness)
    assert due[-1] == pytest.approx(len(WORK) / 50.0)
    assert due == sorted(due)
    assert variation(due) == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_infinite_burstiness_is_even() -> None:
    assert times(request_rate=10.0, burstiness=math.inf)[:3] == pytest.approx([0.1, 0.2, 0.3])


def test_a_seed_repeats_the_pattern() -> None:
    assert times(request_rate=5.0, seed=3) == times(request_rate=5.0, seed=3)
    assert times(request_rate=5.0, seed=3) != times(request_rate=5.0, seed=4)


def test_a_ramp_goes_from_its_first_rate_to_its_last() -> None:
    linear = BenchOptions(ramp_up_strategy="linear", ramp_up_start_rps=2, ramp_up_end_rps=10)
    growing = BenchOptions(ramp_up_strategy="exponential", ramp_up_start_rps=2, ramp_up_end_rps=8)
    assert [rate_of(linear, index, 5) for index in range(5)] == [2, 4, 6, 8, 10]
    assert [rate_of(growing, index, 3) for index in range(3)] == pytest.approx([2, 4, 8])
    due = arrival_times(linear, WORK)
    assert due[-1] - due[-100] < (due[99] - due[0]) / 2


def test_a_trace_says_itself_when() -> None:
    traced = [Work("x", 1, 1, at=0.0), Work("x", 1, 1, at=2.5)]
    options = BenchOptions(self_timed=True, dataset_name="timed_trace")
    assert arrival_times(options, traced) == [0.0, 2.5]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"request_rate": 0.0}, "request_rate"),
        ({"burstiness": -1.0}, "burstiness"),
        ({"ramp_up_strategy": "linear"}, "ramp_up_start_rps"),
        ({"ramp_up_strategy": "cubic"}, "ramp_up_strategy"),
        ({"ramp_up_start_rps": 1.0}, "ramp_up_strategy"),
        ({"self_timed": True}, "self_timed"),
        ({"num_prompts": 0}, "num_prompts"),
        ({"goodput": ("itl:5",)}, "goodput"),
        ({"goodput": ("ttft:soon",)}, "goodput"),
        ({"metric_percentiles": "101"}, "metric_percentiles"),
        ({"percentile_metrics": "ttft,speed"}, "percentile_metrics"),
        ({"metadata": ("novalue",)}, "metadata"),
        ({"header": ("A=b\r\nC: d",)}, "header"),
        ({"random_range_ratio": 1.0}, "random_range_ratio"),
        ({"custom_output_len": 0}, "custom_output_len"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        BenchOptions(**options)
