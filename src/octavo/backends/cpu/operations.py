"""The profile of the native operations, apart for steps of prompts, of decodes, and of both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

__all__ = ["OperationProfile"]

_MEASURED = ("calls", "seconds", "bytes", "operations")


class _Profiled(Protocol):
    def set_profiling(self, on: bool) -> None: ...
    def profile(self) -> list[dict[str, Any]]: ...


class OperationProfile:
    """Takes from a plan what it measured whenever the kind of step changes, which is seldom.

    ``arithmetic`` says which operations multiply, and in which type.
    """

    def __init__(self, plan: _Profiled, arithmetic: Mapping[str, str]) -> None:
        self.on = False
        self._plan = plan
        self._arithmetic = dict(arithmetic)
        self._kind = ""
        self._taken: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)

    def switch(self, on: bool) -> None:
        """Measure from now on, or stop; clears what was measured."""
        self.on = on
        self._taken.clear()
        self._plan.set_profiling(on)

    def enter(self, kind: str) -> None:
        """Say of which kind the next step is."""
        if kind != self._kind:
            self._take()
            self._kind = kind

    def _take(self) -> None:
        if not self.on:
            return
        taken = self._taken[self._kind]
        for entry in self._plan.profile():
            sums = taken.setdefault(entry["op"], dict.fromkeys(_MEASURED, 0))
            for name in _MEASURED:
                sums[name] += entry[name]
        self._plan.set_profiling(True)  # from zero

    def rows(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Time, share and rates per kind of operation, most expensive first; of all steps, or of those of one kind."""
        self._take()
        kinds: Iterable[str] = list(self._taken) if kind is None else (kind,)
        sums: dict[str, dict[str, float]] = {}
        for each in kinds:
            for op, measured in self._taken.get(each, {}).items():
                total = sums.setdefault(op, dict.fromkeys(_MEASURED, 0))
                for name in _MEASURED:
                    total[name] += measured[name]
        whole = sum(entry["seconds"] for entry in sums.values()) or 1.0
        return [
            {
                "op": op,
                "calls": int(entry["calls"]),
                "time_ms": entry["seconds"] * 1e3,
                "share": entry["seconds"] / whole,
                "GBps": entry["bytes"] / entry["seconds"] / 1e9 if entry["seconds"] else 0.0,
                "GOPS": entry["operations"] / entry["seconds"] / 1e9 if entry["seconds"] else 0.0,
                "arithmetic": self._arithmetic.get(op),
            }
            for op, entry in sorted(sums.items(), key=lambda item: -item[1]["seconds"])
        ]
