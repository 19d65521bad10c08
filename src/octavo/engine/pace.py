"""How many tokens a step may compute so that it takes about as long as wanted, from how long steps took."""

from __future__ import annotations

__all__ = ["StepPace"]

_LEAST_TOKENS = 64  # steps of fewer tokens are bound by memory and say little of what one more token costs
_WEIGHT = 0.3  # of the newest step in the average


class StepPace:
    """The token budget of steps that hold decodes, kept near a duration.

    While prompts are computed, sequences that are being decoded get one token a step, so the longest step is the
    longest pause in their streams. What the pace decides changes when positions are computed, never their values.
    """

    def __init__(self, seconds: float, most_tokens: int, least_tokens: int) -> None:
        self._seconds = seconds
        self._most = most_tokens
        self._least = min(least_tokens, most_tokens)
        self._per_token: float | None = None
        self.budget = most_tokens

    def note(self, tokens: int, seconds: float) -> None:
        """Learn from a step that computed ``tokens`` positions in ``seconds``."""
        if tokens < _LEAST_TOKENS:
            return
        cost = seconds / tokens
        self._per_token = cost if self._per_token is None else self._per_token + _WEIGHT * (cost - self._per_token)
        wanted = int(self._seconds / self._per_token) if self._per_token > 0 else self._most
        self.budget = max(self._least, min(self._most, wanted))
