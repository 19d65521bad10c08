"""Drives a load against a server: requests at their times, no more in flight than allowed, steps after their steps."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.benchmarking.client import Client, Exchange

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Counts", "Shot", "drive"]

# Answers are read when the run is over, or when what waits to be read is this much.
_MOST_UNREAD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Shot:
    """A request made up and ready: its body, when it is due (seconds), and the number of the one it waits for."""

    body: bytes
    due: float = 0.0
    after: int | None = None
    request_id: str = ""


@dataclass(slots=True)
class Counts:
    """How far a run is; a progress view reads it."""

    total: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0
    events: int = 0
    began: float = field(default_factory=time.perf_counter)

    def count_events(self, number: int) -> None:
        self.events += number


async def drive(
    client: Client,
    path: str,
    shots: Sequence[Shot],
    *,
    take: Callable[[int, Exchange, float], None],
    max_concurrency: int | None = None,
    timeout: float = 21_600.0,
    counts: Counts | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Send every shot; the seconds from the first being due to the last answer's end.

    ``take`` gets each shot's number, its exchange and the seconds it waited for a place among those in flight, mostly
    after the run, so that reading answers does not disturb the times of others.
    """
    counts = counts if counts is not None else Counts()
    counts.total = len(shots)
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    ended: list[asyncio.Event | None] = [None] * len(shots)
    for shot in shots:
        if shot.after is not None:
            ended[shot.after] = asyncio.Event()
    inbox = _Inbox(take)

    async def fire(number: int, shot: Shot) -> None:
        if shot.after is not None:
            before = ended[shot.after]
            assert before is not None
            await before.wait()
        ready = clock()
        if places is not None:
            await places.acquire()
        counts.running += 1
        try:
            queued = clock() - ready
            headers = (f"X-Request-Id: {shot.request_id}",) if shot.request_id else ()
            exchange = await client.call("POST", path, shot.body, headers=headers, timeout=timeout)
        finally:
            counts.running -= 1
            if places is not None:
                places.release()
            mine = ended[number]
            if mine is not None:
                mine.set()
        counts.done += 1
        counts.failed += not exchange.ok
        inbox.put(number, exchange, queued)

    with _undisturbed():
        began = clock()
        counts.began = began
        async with asyncio.TaskGroup() as group:
            for number, shot in enumerate(shots):
                wait = began + shot.due - clock()
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(fire(number, shot))
        seconds = clock() - began
    inbox.flush()
    return seconds


class _Inbox:
    """Answers that wait to be read."""

    def __init__(self, take: Callable[[int, Exchange, float], None]) -> None:
        self._take = take
        self._waiting: list[tuple[int, Exchange, float]] = []
        self._bytes = 0

    def put(self, number: int, exchange: Exchange, queued: float) -> None:
        self._waiting.append((number, exchange, queued))
        self._bytes += sum(len(piece) for _, piece in exchange.pieces)
        if self._bytes > _MOST_UNREAD_BYTES:
            self.flush()

    def flush(self) -> None:
        for number, exchange, queued in self._waiting:
            self._take(number, exchange, queued)
        self._waiting.clear()
        self._bytes = 0


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection meanwhile: a run makes no cycles worth its pauses."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
