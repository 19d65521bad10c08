"""Where the time of steps goes: seconds by phase, apart for steps of prompts, of decodes, and of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.backends.interface import step_kind

__all__ = ["PHASES", "PhaseProfile"]

PHASES = (
    "scheduling",  # choosing the work of the step
    "block tables",  # tokens, positions and block tables written where the native call reads them
    "binding",  # sampling parameters written into the records of the sampled rows
    "native",  # the native call, which samples too
    "sampling",  # reading what was sampled; in a profile with operations also the native sampling
    "bookkeeping",  # tokens given to their sequences, full blocks to the prefix index, what has ended taken out
    "detokenising",  # tokens given to their requests, and made text where somebody reads it
    "framing",  # an engine in a process of its own: what happened, encoded and sent
)


class _Kind:
    """What was measured of one kind of step."""

    __slots__ = ("seconds", "sequences", "steps", "tokens")

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.sequences = 0
        self.seconds = dict.fromkeys(PHASES, 0.0)


class PhaseProfile:
    """Adds up the seconds of each phase. One thread writes it: the one that steps the engine."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._last = _Kind()

    def step(self, decodes: int, sequences: int, tokens: int, seconds: Mapping[str, float]) -> None:
        """Take note of a step that computed ``tokens`` positions of ``sequences`` sequences."""
        last = self._last = self._kinds.setdefault(step_kind(decodes, sequences), _Kind())
        last.steps += 1
        last.tokens += tokens
        last.sequences += sequences
        for phase, value in seconds.items():
            last.seconds[phase] += value

    def add(self, phase: str, seconds: float) -> None:
        """Add what was done for the last step after it."""
        self._last.seconds[phase] += seconds

    def clear(self) -> None:
        """Forget what was measured."""
        self._kinds.clear()
        self._last = _Kind()

    def report(self) -> list[dict[str, Any]]:
        """For each kind of step how many there were, their tokens and sequences, and their milliseconds by phase."""
        found = []
        for kind in ("prefill", "mixed", "decode"):
            if kind in self._kinds:
                noted = self._kinds[kind]
                found.append(
                    {
                        "step": kind,
                        "steps": noted.steps,
                        "tokens": noted.tokens,
                        "sequences": noted.sequences,
                        "phases_ms": {phase: noted.seconds[phase] * 1e3 for phase in PHASES},
                    }
                )
        return found
