"""What is known of one HTTP request when it has ended: for its line in the log and its trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.frontend.outputs import RequestMetrics
    from octavo.sampling.params import SamplingParams

__all__ = ["AccessRecord", "Spans"]


@dataclass(frozen=True, slots=True)
class Spans:
    """The parts of a generation as pairs of times, None where it did not get so far; seconds of ``time.monotonic``."""

    queue: tuple[float, float] | None = None
    prefill: tuple[float, float] | None = None
    decode: tuple[float, float] | None = None

    @classmethod
    def of(cls, times: RequestMetrics | None, end: float) -> Spans:
        """Split at the first step, the first token and the last; what was cut off lasts until ``end``."""
        if times is None:
            return cls()
        if times.finished_time is not None:
            end = times.finished_time
        scheduled, first, last = times.scheduled_time, times.first_token_time, times.last_token_time
        if scheduled is None:
            return cls(_span(times.arrival_time, end if first is None else first))
        queue = _span(times.arrival_time, scheduled)
        if first is None:
            return cls(queue, _span(scheduled, end))
        return cls(queue, _span(scheduled, first), _span(first, first if last is None else last))


def _span(start: float, end: float) -> tuple[float, float]:
    return (start, max(start, end))


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRecord:
    """One HTTP request; tokens are those of all its generations, ``times`` and ``params`` those of the last one.

    ``arrival`` and ``end`` are seconds of ``time.monotonic``. ``path`` comes without the query, which may hold secrets;
    ``route`` is the template it matched, "none" when there was none. ``status`` is 499 when the client left first.
    ``tenant`` is the name of the API key, never the key. ``failure`` is the kind of what went wrong.
    """

    request_id: str
    method: str
    path: str
    route: str
    status: int
    arrival: float
    end: float
    model: str | None = None
    tenant: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    generations: int = 0
    finish_reason: str | None = None
    failure: str | None = None
    response_bytes: int = 0
    times: RequestMetrics | None = None
    params: SamplingParams | None = None

    @property
    def seconds(self) -> float:
        """How long it took in all."""
        return self.end - self.arrival

    @property
    def spans(self) -> Spans:
        """Where the time of its generation went."""
        return Spans.of(self.times, self.end)
