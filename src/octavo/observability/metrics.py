"""Counts what happens: the observer of the front end, and what the HTTP layer reports. Rendered by `endpoint`."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, cast

from octavo.engine.messages import StepStats
from octavo.errors import CapacityError, EngineDeadError
from octavo.frontend.observer import Observer
from octavo.observability.http_metrics import HttpMetrics
from octavo.observability.numbers import Numbers, Snapshot, Totals

if TYPE_CHECKING:
    from octavo.engine.messages import EngineInfo
    from octavo.frontend.options import EngineOptions
    from octavo.frontend.output_processor import Processed, RequestState
    from octavo.observability.exposition import Family

__all__ = ["Metrics"]

_log = logging.getLogger(__name__)

P = ParamSpec("P")

# How an ended request is counted when its sequences ended differently: what went wrong first.
_PRECEDENCE = ("error", "abort", "length", "stop")

# Failures of requests that were accepted: they end as an abort or an error, and are no refusals.
_TIMEOUTS = {"queue_timeout": "queue", "timeout": "total"}
_FAILED_LATER = ("generation", "internal")


def _harmless(method: Callable[Concatenate[Metrics, P], None]) -> Callable[Concatenate[Metrics, P], None]:
    """Counting must never end what is counted: a fault is logged once and counted itself."""

    @functools.wraps(method)
    def guarded(self: Metrics, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.fault(method.__name__)

    return cast("Callable[Concatenate[Metrics, P], None]", guarded)


class Metrics(Observer):
    """The metrics of one server with one engine.

    ``model_name`` is the label of vLLM's series (the first name the model is served under), ``version`` that of
    ``octavo:build_info``, ``options`` those of the engine, for ``vllm:cache_config_info``. ``clock`` gives seconds of
    the monotonic clock that the times of requests are taken from.

    The calls of `Observer` come from one thread, the others from any; everything may be read at any time.
    """

    def __init__(
        self,
        model_name: str,
        *,
        version: str = "",
        options: EngineOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model_name = model_name
        self.version = version
        self.options = options
        self.numbers = Numbers()
        self.http = HttpMetrics()
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self.families: list[Family] | None = None  # what `endpoint` shows, to be made anew for a new engine
        self._clock = clock
        self._lock = threading.Lock()  # for what several threads count
        self._live: dict[int, RequestState] = {}
        self._paused: dict[int, int] = {}  # sequences of paused requests
        self._engine: EngineInfo | None = None
        self._up_since: float | None = None
        self._starts = 0
        self._past_uptime = 0.0
        self._stats = StepStats()
        self._past = Totals()
        self._logged = False

    # -- the front end

    @_harmless
    def accepted(self, state: RequestState) -> None:
        """A request was checked and tokenised and goes to the engine."""
        with self._lock:
            numbers = self.numbers
            self._live[id(state)] = state
            numbers.accepted += 1
            numbers.answers.observe(state.params.n)
            if state.params.max_tokens is not None:
                numbers.max_tokens.observe(state.params.max_tokens)
            numbers.preparation.observe(max(0.0, self._clock() - state.metrics.arrival_time))

    @_harmless
    def stepped(self, stats: StepStats, processed: Processed) -> None:
        """An engine frame: kept as it is, so that what the engine counts costs nothing until it is asked for."""
        last = self._stats
        if stats.steps < last.steps:  # another engine, should its start have gone unnoticed
            self._past = self._past.plus(last)
        self._stats = stats
        if self._up_since is None:
            self._up_since = self._clock()
        numbers = self.numbers
        if stats.steps != last.steps:
            prefill, decode = stats.prefill_tokens, stats.decode_tokens
            times = numbers.prefill_steps if prefill else numbers.decode_steps
            schedule, execute, process = stats.schedule_seconds, stats.execute_seconds, stats.process_seconds
            times.schedule.observe(schedule)
            times.execute.observe(execute)
            times.process.observe(process)
            times.whole.observe(schedule + execute + process)
            numbers.iteration_tokens.observe(prefill + decode)
            numbers.prefill_tokens += prefill
            numbers.decode_tokens += decode
            if prefill:
                numbers.batch_size.observe(stats.running)
                numbers.mixed_steps += decode > 0
        numbers.generated_tokens += processed.num_tokens
        if processed.intervals:
            numbers.inter_token.observe_all(processed.intervals)
        for state in processed.first_tokens:
            self._first_token(state)

    def _first_token(self, state: RequestState) -> None:
        numbers, times = self.numbers, state.metrics
        numbers.prompt_tokens += len(state.prompt_ids)
        numbers.cached_prompt_tokens += state.num_cached_tokens
        if times.first_token_time is not None:
            numbers.first_token.observe(max(0.0, times.first_token_time - times.arrival_time))

    @_harmless
    def finished(self, state: RequestState) -> None:
        """An accepted request ended; a second call for the same one is ignored."""
        with self._lock:
            known = self._live.pop(id(state), None)
            self._paused.pop(id(state), None)
        if known is None:
            return
        numbers, times = self.numbers, state.metrics
        reasons = {sequence.finish_reason for sequence in state.sequences}
        reason = next((reason for reason in _PRECEDENCE if reason in reasons), "error")
        numbers.finished[reason] += 1
        if reason == "error":
            if state.error is not None:  # such as logits that are not finite
                numbers.failed_alone += 1
            elif times.scheduled_time is None:
                numbers.refused_by_engine += 1
            else:
                numbers.broken_off += 1
        into = numbers.done if reason in ("stop", "length") else numbers.given_up
        arrival, scheduled = times.arrival_time, times.scheduled_time
        end = times.finished_time if times.finished_time is not None else self._clock()
        into.total.observe(max(0.0, end - arrival))
        into.queue.observe(max(0.0, (end if scheduled is None else scheduled) - arrival))
        if scheduled is None:
            scheduled = arrival
        lengths = [len(sequence.token_ids) for sequence in state.sequences]
        longest = max(lengths)
        first, last = times.first_token_time, times.last_token_time
        if first is not None and last is not None:
            into.prefill.observe(max(0.0, first - scheduled))
            into.decode.observe(max(0.0, last - first))
            into.inference.observe(max(0.0, last - scheduled))
            if longest > 1:
                into.per_token.observe(max(0.0, last - first) / (longest - 1))
        into.prompt_tokens.observe(len(state.prompt_ids))
        into.computed_prompt_tokens.observe(len(state.prompt_ids) - state.num_cached_tokens)
        into.generated_tokens.observe(sum(lengths))
        into.longest_sequence.observe(longest)

    @_harmless
    def paused(self, state: RequestState) -> None:
        """A request left the batch for a while."""
        with self._lock:
            if id(state) in self._live:
                self._paused[id(state)] = len(state.sequences)
                self.numbers.pauses += 1

    @_harmless
    def resumed(self, state: RequestState) -> None:
        """A paused request runs again."""
        with self._lock:
            self._paused.pop(id(state), None)

    @_harmless
    def engine_started(self, info: EngineInfo) -> None:
        """An engine is ready; its counters start at 0."""
        self._fold()
        self._engine, self.families = info, None
        self._starts += 1
        self._up_since = self._clock()

    @_harmless
    def engine_lost(self, reason: str, replayed: int, failed: int) -> None:
        """The engine is gone: what it had counted is kept, and it holds nothing any more.

        Its successor may have been reported before.
        """
        self.numbers.restarts += 1
        if self._starts <= self.numbers.restarts:
            self._fold()
        self.numbers.replayed += replayed
        self.numbers.lost += failed

    def _fold(self) -> None:
        self._past, self._stats = self._past.plus(self._stats), StepStats()
        if self._up_since is not None:
            self._past_uptime += self._clock() - self._up_since
            self._up_since = None

    # -- HTTP

    @_harmless
    def http_request(
        self,
        method: str,
        handler: str,
        status: int,
        seconds: float,
        request_bytes: int = 0,
        response_bytes: int = 0,
    ) -> None:
        """One HTTP request was answered, or its client left. ``handler`` is the route, "none" when there was none."""
        with self._lock:
            self.http.observe(method, handler, status, seconds, request_bytes, response_bytes)

    @_harmless
    def failed(self, failure: Exception, cause: BaseException | None = None) -> None:
        """A failure (with a ``kind``) is what a client got, at once or in the middle of its stream.

        ``cause`` is the exception it was made of: what the engine refused or lost had been accepted before, is counted
        among the ended requests (as "error"), and is no refusal.
        """
        kind = str(getattr(failure, "kind", "internal"))
        if getattr(failure, "code", None) == "template":
            kind = "template"
        of_engine = isinstance(cause, EngineDeadError) or (isinstance(cause, CapacityError) and cause.unit == "blocks")
        with self._lock:
            if kind in _TIMEOUTS:
                self.numbers.timeouts[_TIMEOUTS[kind]] += 1
            elif of_engine or kind in _FAILED_LATER:
                self.numbers.failures[kind] += 1
            else:
                self.numbers.refused[kind] += 1

    @_harmless
    def client_gone(self) -> None:
        """A client closed its connection before its answer was complete."""
        with self._lock:
            self.numbers.clients_gone += 1

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read at each scrape."""
        self.gauges[name] = (text, read)

    # -- reading

    @property
    def engine(self) -> EngineInfo | None:
        """The engine that runs, or the last one that did."""
        return self._engine

    def snapshot(self) -> Snapshot:
        """The state now.

        What the last frame said of running and waiting sequences may be old: an engine that has nothing to do sends no
        frames, and one that is stopped sends none either. So it is bounded by what the front end knows itself.
        """
        stats, past, up_since = self._stats, self._past, self._up_since
        totals = past.plus(stats)
        with self._lock:
            live = list(self._live.values())
            paused, paused_sequences = len(self._paused), sum(self._paused.values())
        up = up_since is not None
        uptime = self._past_uptime + (self._clock() - up_since if up_since is not None else 0.0)
        sequences = sum([state.running for state in live])
        unscheduled = sum([state.metrics.scheduled_time is None for state in live])
        active = max(0, sequences - paused_sequences)
        if not live or not up:
            cached = stats.cached_blocks + stats.referenced_blocks if up else 0
            stats = StepStats(num_blocks=stats.num_blocks, block_size=stats.block_size, cached_blocks=cached)
        return Snapshot(
            self.numbers,
            self._engine,
            up,
            live=len(live),
            running=min(stats.running, active),
            waiting=min(max(stats.waiting, unscheduled), active) if up else len(live),
            paused=paused,
            stats=stats,
            totals=totals,
            uptime=uptime,
        )

    def fault(self, where: str) -> None:
        """Called in an exception handler: counting ``where`` has failed, and serving goes on."""
        self.numbers.faults += 1
        if not self._logged:
            self._logged = True
            _log.exception("the metrics have a fault in %s: they may be wrong from here on, serving goes on", where)
