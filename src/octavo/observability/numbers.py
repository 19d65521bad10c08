"""The numbers behind every metric name: one counter or histogram for each thing that is counted, however it is called.

`Numbers` is written as things happen; `Snapshot` is what one scrape reads, taken at one moment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.engine.messages import StepStats
from octavo.observability.buckets import (
    COUNTS,
    E2E,
    INTER_TOKEN,
    ITERATION_TOKENS,
    LENGTHS,
    STEP,
    TGI_BATCH,
    TGI_DURATION,
    TTFT,
)
from octavo.observability.instruments import Histogram, merged

if TYPE_CHECKING:
    from octavo.engine.messages import EngineInfo

__all__ = ["REASONS", "Numbers", "RequestTimes", "Snapshot", "StepTimes", "Totals"]

# Why a request can have ended; "repetition" is vLLM's and does not occur here.
REASONS = ("stop", "length", "abort", "error", "repetition")

_REQUEST = merged(E2E, TGI_DURATION)
_PER_TOKEN = merged(INTER_TOKEN, TGI_DURATION)
_STEP = merged(STEP, TGI_DURATION)


class RequestTimes:
    """Where the time of requests went, in seconds, and how long they were, in tokens. One observation a request each.

    A request that was never scheduled has no inference time, one without a token no prefill and decode time, one with a
    single token no time per output token.
    """

    def __init__(self) -> None:
        self.total = Histogram(_REQUEST)
        self.queue = Histogram(_REQUEST)
        self.inference = Histogram(_REQUEST)
        self.prefill = Histogram(_REQUEST)
        self.decode = Histogram(_REQUEST)
        self.per_token = Histogram(_PER_TOKEN)
        self.prompt_tokens = Histogram(LENGTHS)
        self.computed_prompt_tokens = Histogram(LENGTHS)
        self.generated_tokens = Histogram(LENGTHS)
        self.longest_sequence = Histogram(LENGTHS)


class StepTimes:
    """Where the time of steps went, in seconds."""

    def __init__(self) -> None:
        self.whole = Histogram(_STEP)
        self.schedule = Histogram(_STEP)
        self.execute = Histogram(_STEP)
        self.process = Histogram(_STEP)


@dataclass(slots=True)
class Totals:
    """What the engine itself counts, over all engine processes there were: each of them starts at 0 again."""

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    evictions: int = 0
    busy_seconds: float = 0.0

    def plus(self, stats: StepStats) -> Totals:
        """These and what one engine process has counted."""
        return Totals(
            self.steps + stats.steps,
            self.computed_tokens + stats.computed_tokens,
            self.generated_tokens + stats.generated_tokens,
            self.prefix_queries + stats.prefix_queries,
            self.prefix_hits + stats.prefix_hits,
            self.preemptions + stats.preemptions,
            self.evictions + stats.evictions,
            self.busy_seconds + stats.busy_seconds,
        )


class Numbers:
    """Everything that is counted since the start of the server."""

    def __init__(self) -> None:
        self.done = RequestTimes()  # of requests that ended with "stop" or "length"
        self.given_up = RequestTimes()  # of requests that ended with "abort" or "error"
        self.first_token = Histogram(merged(TTFT, TGI_DURATION))
        self.inter_token = Histogram(INTER_TOKEN)
        self.preparation = Histogram(merged(STEP, TGI_DURATION))
        self.max_tokens = Histogram(LENGTHS)
        self.answers = Histogram(COUNTS)
        self.iteration_tokens = Histogram(ITERATION_TOKENS)
        self.batch_size = Histogram(TGI_BATCH)
        self.prefill_steps = StepTimes()  # steps with prompt tokens, whatever else was in them
        self.decode_steps = StepTimes()
        self.skipped_tokens = Histogram(TGI_BATCH)
        self.finished = dict.fromkeys(REASONS, 0)
        # Those that ended with "error", by what was wrong: the engine refused them, was lost, or they failed.
        self.refused_by_engine = 0
        self.broken_off = 0
        self.failed_alone = 0
        self.refused: Counter[str] = Counter()
        self.timeouts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.accepted = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generated_tokens = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.mixed_steps = 0
        self.pauses = 0
        self.restarts = 0
        self.replayed = 0
        self.lost = 0
        self.clients_gone = 0
        self.faults = 0


@dataclass(slots=True)
class Snapshot:
    """What a scrape sees: the numbers, and the state of the engine and of the queue now."""

    numbers: Numbers
    engine: EngineInfo | None
    up: bool
    live: int  # requests accepted and not ended
    running: int
    waiting: int
    paused: int
    stats: StepStats = field(default_factory=StepStats)  # zeros when nothing runs
    totals: Totals = field(default_factory=Totals)
    uptime: float = 0.0  # seconds, of all engine processes together

    @property
    def usage(self) -> float:
        """Share of the KV cache that requests hold, 0 to 1."""
        return self.stats.usage

    @property
    def idle(self) -> float:
        """Share of the time since the start in which an engine was up and had nothing to do, 0 to 1."""
        return max(0.0, 1.0 - self.totals.busy_seconds / self.uptime) if self.uptime > 0 else 0.0
