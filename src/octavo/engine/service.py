"""Runs an engine for a front end: takes commands, steps, and says in frames what happened. Knows no socket."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from octavo.engine.core import Engine
from octavo.engine.messages import (
    Abort,
    Add,
    Command,
    Finish,
    Frame,
    Pause,
    Query,
    Refusal,
    Reply,
    Resume,
    StepStats,
    WireRequest,
)
from octavo.engine.request import EngineRequest, SequenceOutput
from octavo.errors import OctavoError

__all__ = ["EngineService"]


class EngineService:
    """One thread calls everything: `apply` for each command, then `turn`, which steps the engine if it has work.

    ``announce`` is called before a step with the requests that it computes for the first time.
    """

    def __init__(self, engine: Engine, announce: Callable[[list[str]], None] | None = None) -> None:
        self.engine = engine
        self._announce = announce
        self._started = time.monotonic()
        self._refused: list[Refusal] = []
        self._replies: list[Reply] = []
        self._changed = False
        self._queries: dict[str, Callable[[Engine], Any]] = {
            "stats": lambda engine: engine.stats(),
            "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
            "check": lambda engine: engine.check(),
        }

    def has_work(self) -> bool:
        """Whether `turn` has something to do or to say."""
        return self._changed or self.engine.has_work()

    def add(self, request: EngineRequest) -> None:
        """Queue a request; when the engine refuses it the next frame says so."""
        self._changed = True
        try:
            self.engine.add(request)
        except OctavoError as error:  # this request's own fault, such as one that can never fit: the others go on
            self._refused.append(Refusal.of(request.request_id, error))

    def apply(self, command: Command) -> None:
        """Do what the front end asks for."""
        self._changed = True
        engine = self.engine
        match command:
            case Add(request=WireRequest() as wire):
                try:
                    request = wire.restore()
                except OctavoError as error:
                    self._refused.append(Refusal.of(wire.request_id, error))
                else:
                    self.add(request)
            case Abort(request_id=request_id):
                engine.abort(request_id)
            case Finish(request_id=request_id, index=index, reason=reason):
                engine.finish(request_id, index, reason)
            case Pause(request_id=request_id):
                engine.pause(request_id)
            case Resume(request_id=request_id):
                engine.resume(request_id)
            case Query(number=number, name=name):
                self._replies.append(Reply(number, self._queries[name](engine)))

    def turn(self) -> Frame:
        """Step if there is work, and report."""
        began = time.monotonic()
        engine = self.engine
        outputs: list[SequenceOutput] = []
        started: list[str] = []
        stepped = engine.has_work()
        if stepped:
            outputs = engine.step(self._announce)
            started = engine.started
        refused, self._refused = self._refused, []
        replies, self._replies = self._replies, []
        self._changed = False
        return Frame(began, stepped, outputs, started, refused, replies, self._stats())

    def _stats(self) -> StepStats:
        stats = self.engine.stats()
        counters = stats.counters
        return StepStats(
            running=stats.running,
            waiting=stats.waiting,
            paused=stats.paused,
            num_blocks=stats.num_blocks,
            block_size=stats.block_size,
            referenced_blocks=stats.referenced_blocks,
            cached_blocks=stats.cached_blocks,
            allocated_slots=stats.allocated_slots,
            used_slots=stats.used_slots,
            prefill_tokens=stats.step_prefill_tokens,
            decode_tokens=stats.step_decode_tokens,
            steps=counters.steps,
            computed_tokens=counters.computed_tokens,
            prompt_tokens_computed=counters.prefill_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            preemptions=counters.preemptions,
            evictions=stats.evictions,
            schedule_seconds=stats.schedule_seconds,
            execute_seconds=stats.execute_seconds,
            process_seconds=stats.process_seconds,
            busy_seconds=counters.busy_seconds,
            uptime_seconds=time.monotonic() - self._started,
            finished=dict(counters.finished),
        )
