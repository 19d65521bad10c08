"""The profile of operations is kept apart by kind of step, and adds up to that of all steps."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.backends.cpu.operations import OperationProfile


class FakePlan:
    """Counts what it is told to; `set_profiling` clears, as the native plan's does."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}

    def run(self, op: str, seconds: float, size: float, operations: float) -> None:
        entry = self.entries.setdefault(op, {"op": op, "calls": 0, "seconds": 0.0, "bytes": 0.0, "operations": 0.0})
        entry["calls"] += 1
        entry["seconds"] += seconds
        entry["bytes"] += size
        entry["operations"] += operations

    def profile(self) -> list[dict[str, Any]]:
        return list(self.entries.values())

    def set_profiling(self, on: bool) -> None:
        self.entries.clear()


def measured() -> OperationProfile:
    plan = FakePlan()
    profile = OperationProfile(plan, {"linear": "int8"})
    profile.switch(True)
    profile.enter("prefill")
    plan.run("linear", 2.0, 4e9, 100e9)
    plan.run("norm", 1.0, 1e9, 0.0)
    profile.enter("decode")
    plan.run("linear", 1.0, 8e9, 2e9)
    profile.enter("decode")
    plan.run("linear", 1.0, 8e9, 2e9)
    profile.enter("prefill")
    plan.run("linear", 2.0, 4e9, 100e9)
    return profile


def test_each_kind_of_step_has_its_own_rows() -> None:
    profile = measured()
    linear, norm = profile.rows("prefill")
    assert (linear["op"], linear["calls"], linear["time_ms"], linear["arithmetic"]) == ("linear", 2, 4000.0, "int8")
    assert (linear["GBps"], linear["GOPS"], linear["share"]) == (2.0, 50.0, pytest.approx(0.8))
    assert (norm["op"], norm["GBps"], norm["arithmetic"]) == ("norm", 1.0, None)
    (linear,) = profile.rows("decode")
    assert (linear["calls"], linear["GBps"], linear["share"]) == (2, 8.0, 1.0)
    assert profile.rows("mixed") == []


def test_the_rows_of_all_steps_are_the_sum() -> None:
    linear, norm = measured().rows()
    assert (linear["calls"], linear["time_ms"], norm["calls"]) == (4, 6000.0, 1)


def test_switching_clears_what_was_measured() -> None:
    profile = measured()
    profile.switch(True)
    assert profile.rows() == []
    profile.switch(False)
    profile.enter("decode")
    assert profile.rows() == []
