"""The simulated load: every request is answered, a bound on a step holds, and what it costs is seen where it should."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import octavo.engine.core

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, imported from where it is run."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = ("http_client", "load_generator", "step_policy")
    found = {name: __import__(name) for name in names}
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return found["step_policy"]


def _figures(policy: Any, bound: float | None, *more: str) -> dict[str, float]:
    options = policy.parse(["--clients", "8", "--requests", "24", "--output-len", "16", *more])
    rate, times = policy.simulate(options, bound)
    assert [len(request.tokens) for request in times] == [16] * 24
    found: dict[str, float] = policy.figures(rate, times)
    return found


def test_a_bound_shortens_pauses_and_changes_little_else(policy: Any) -> None:
    free, bounded = _figures(policy, None), _figures(policy, 0.1)
    assert bounded["ITL max"] < 125 < free["ITL max"]
    assert bounded["req/s"] == pytest.approx(free["req/s"], rel=0.05)
    assert bounded["TTFT p99"] < 1.3 * free["TTFT p99"]


def test_time_goes_by_as_the_costs_say(policy: Any) -> None:
    fast, slow = (_figures(policy, 0.1, "--prompt-us", cost, "--decode-us", cost) for cost in ("100", "200"))
    assert fast["req/s"] > 1.5 * slow["req/s"]


def test_requests_can_come_at_random_instead(policy: Any) -> None:
    assert _figures(policy, 0.1, "--rate", "2")["TTFT p99"] < _figures(policy, 0.1)["TTFT p99"]


def test_the_engine_has_its_own_clock_back(policy: Any) -> None:
    clock = octavo.engine.core.perf_counter
    _figures(policy, None)
    assert octavo.engine.core.perf_counter is clock
