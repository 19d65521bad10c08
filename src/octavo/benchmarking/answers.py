"""What became of one request, as its client saw it: the times behind TTFT, ITL, TPOT and E2EL.

The definitions are those of ``vllm bench serve`` but for two of them, unless they are asked for as they are there:

- ITL is per token, not per event: an event of k tokens that comes g after the one before counts as k times g / k;
- an event of a chat stream that only names the role is no first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Answer", "Mark", "TokenCounter", "apportion"]


@dataclass(slots=True)
class Mark:
    """An event that carried tokens; ``tokens`` is None where the server does not say how many."""

    time: float
    text: str = ""
    tokens: int | None = None


class TokenCounter(Protocol):
    """Counts the tokens of a text."""

    def length(self, text: str) -> int: ...


@dataclass(slots=True)
class Answer:
    """One request's answer. All times are seconds of one clock.

    ``input_tokens`` is the length of the prompt as the work has it, ``server_input_tokens`` as the server counted it.
    ``queued`` is how long the request waited in the client for a place among those in flight.
    """

    sent: float
    ended: float
    input_tokens: int = 0
    marks: list[Mark] = field(default_factory=list)
    server_input_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    queued: float = 0.0
    cached_tokens: int | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def text(self) -> str:
        return "".join(mark.text for mark in self.marks)

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first event with tokens."""
        return self.marks[0].time - self.sent if self.marks else 0.0

    @property
    def latency(self) -> float:
        """Seconds from sending to the last event (E2EL)."""
        return self.ended - self.sent

    @property
    def tokens(self) -> int:
        """Output tokens; ``settle`` has set them."""
        return self.output_tokens or 0

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for an answer of one token or none."""
        return (self.latency - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    def settle(self, counter: TokenCounter | None) -> None:
        """Decide how many tokens the answer and each event had.

        The server's total rules; without one, the events' own counts, or the text is counted. What an event had is
        what it says, or else its share by the tokens (or characters) of its text.
        """
        if not self.marks:
            self.output_tokens = self.output_tokens or 0
            return
        counts = [mark.tokens for mark in self.marks]
        known = [count for count in counts if count is not None]
        if self.output_tokens is None:
            if len(known) == len(counts):
                self.output_tokens = sum(known)
            else:
                self.output_tokens = counter.length(self.text) if counter is not None else len(self.marks)
        if len(known) == len(counts) and sum(known) == self.output_tokens:
            return
        weights = [counter.length(mark.text) if counter else len(mark.text) for mark in self.marks]
        if sum(weights) == self.output_tokens:
            shares = weights
        elif self.output_tokens == len(self.marks):
            shares = [1] * len(self.marks)
        else:
            shares = apportion(self.output_tokens, weights)
        for mark, share in zip(self.marks, shares, strict=True):
            mark.tokens = share

    def gaps(self, *, per_token: bool) -> list[float]:
        """Seconds between tokens (each of an event's tokens has an equal part of the gap), or between events."""
        found: list[float] = []
        last = self.marks[0].time if self.marks else 0.0
        waited = 0.0
        for mark in self.marks[1:]:
            gap, last = mark.time - last, mark.time
            if not per_token:
                found.append(gap)
                continue
            waited += gap
            if mark.tokens:  # an event without a token of its own only lengthens the wait for the next
                found.extend([waited / mark.tokens] * mark.tokens)
                waited = 0.0
        return found


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers about in proportion to ``weights`` that add up to ``total``, by largest remainders.

    Where there is enough, whatever weighs anything gets at least 1.
    """
    if not weights:
        return []
    if sum(weights) <= 0:
        weights = [1.0] * len(weights)
    least = [1 if weight > 0 else 0 for weight in weights]
    if sum(least) > total:
        least = [0] * len(weights)
    above = [max(0.0, total * weight / sum(weights) - low) for weight, low in zip(weights, least, strict=True)]
    scale = (total - sum(least)) / sum(above) if sum(above) > 0 else 0.0
    exact = [value * scale for value in above]
    shares = [low + int(value) for low, value in zip(least, exact, strict=True)]
    order = sorted(range(len(weights)), key=lambda index: int(exact[index]) - exact[index])
    for place in range(total - sum(shares)):
        shares[order[place % len(order)]] += 1
    return shares
