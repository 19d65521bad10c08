"""Carries requests to an engine and its tokens back to their streams; replays them when the engine is lost.

One thread reads the frames of an engine link, turns them into the states of the requests and wakes their readers. The
streams it keeps are the journal: prompt, parameters and seed of each request with the tokens it has so far are all
that another engine needs to go on, and since tokens depend on nothing else, to go on with the same ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.engine.messages import Abort, Finish, Frame, Pause, Query, Resume
from octavo.errors import EngineCrashedError, EngineDeadError, OctavoError, ParameterError
from octavo.frontend.engine_link import EngineLink, EngineLostError
from octavo.frontend.observer import Observer
from octavo.frontend.output_processor import OutputProcessor

if TYPE_CHECKING:
    from octavo.engine.request import EngineRequest
    from octavo.frontend.output_processor import RequestState
    from octavo.frontend.tokenizer import Tokenizer

__all__ = ["Dispatcher", "Stream"]

_log = logging.getLogger(__name__)

MOST_CRASHES = 3  # a request that ran at so many crashes is given up
_MOST_STARTS = 3  # an engine that cannot be started again so many times in a row is given up
_PAUSED_BY_READER = "reader"
_PAUSED_BY_CALLER = "caller"


class Stream:
    """A request on its way and the reading end of it, which belongs to one event loop."""

    __slots__ = (
        "changed",
        "crashes",
        "failure",
        "loop",
        "paced",
        "pauses",
        "read",
        "request",
        "running",
        "state",
        "waiter",
    )

    def __init__(
        self, request: EngineRequest, state: RequestState, loop: asyncio.AbstractEventLoop, *, paced: bool
    ) -> None:
        self.request = request
        self.state = state
        self.loop = loop
        self.paced = paced  # whether its reader takes tokens as they come, so that falling behind means something
        self.read = 0  # tokens handed over to the reader
        self.pauses: set[str] = set()
        self.running = False  # in the present engine, in some step
        self.crashes = 0
        self.changed = False
        self.failure: BaseException | None = None
        self.waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until something has changed. Whoever reads lowers the flag before the state is read, so no change is lost."""
        while not self.changed:
            self.waiter = self.loop.create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None

    def fail(self, error: BaseException) -> None:
        """Have the reader get an error, in its event loop."""
        self.failure = error
        self.changed = True
        _wake([self])


def _wake(streams: list[Stream]) -> None:
    """Runs in the streams' event loop."""
    for stream in streams:
        if stream.waiter is not None and not stream.waiter.done():
            stream.waiter.set_result(None)


class Dispatcher:
    """Owns the link to an engine and the streams of the requests in it."""

    def __init__(
        self,
        link: EngineLink,
        tokenizer: Tokenizer,
        *,
        observer: Observer | None = None,
        most_unread: int | None = None,
    ) -> None:
        self.link = link
        self.outputs = OutputProcessor(tokenizer)
        self.failure: BaseException | None = None
        self.restarts = 0
        self._observer = observer if observer is not None else Observer()
        self._most_unread = most_unread
        # Guards the streams together with what is sent for them, so that a replay neither misses nor doubles one.
        self._lock = threading.RLock()
        self._streams: dict[str, Stream] = {}
        self._aborted: list[Stream] = []
        self._queries: dict[int, tuple[str, Future[Any]]] = {}
        self._numbers = itertools.count()
        self._closing = False
        self._faults: set[str] = set()  # observer methods that failed
        self._lost = False  # nothing is sent to an engine that is being replaced: it gets everything at once
        self._observe(self._observer.engine_started, link.info)
        self._thread = threading.Thread(target=self._run, name="octavo-dispatcher", daemon=True)
        self._thread.start()

    # -- called from any thread

    def add(self, stream: Stream) -> None:
        """Send a request to the engine, or keep it for the engine that is being started."""
        state = stream.state
        with self._lock:
            self.check()
            if state.request_id in self._streams:
                raise ParameterError("request_id", state.request_id, "unlike that of any running request")
            self._observe(self._observer.accepted, state)
            self._streams[state.request_id] = stream
            self.outputs.add(state)
            if not self._lost:
                self.link.add(stream.request)

    def abort(self, request_id: str, stream: Stream | None = None) -> bool:
        """End a request; with ``stream`` only if it is that one, not a later request of the same id."""
        with self._lock:
            running = self._streams.get(request_id)
            if running is None or (stream is not None and running is not stream):
                return False
            self._aborted.append(running)
        self.link.wake()
        return True

    def query(self, name: str) -> Future[Any]:
        """Ask the engine something between two steps."""
        future: Future[Any] = Future()
        with self._lock:
            self.check()
            number = next(self._numbers)
            self._queries[number] = (name, future)
            self.link.send(Query(number, name))
        return future

    def pause(self, request_id: str) -> bool:
        """Take a request out of the batch until `resume`; false when no such request runs."""
        return self._pause(self._streams.get(request_id), _PAUSED_BY_CALLER)

    def resume(self, request_id: str) -> bool:
        """Let a request that was paused run again; false when no such request runs."""
        return self._resume(self._streams.get(request_id), _PAUSED_BY_CALLER)

    def note_read(self, stream: Stream) -> None:
        """The reader has everything the state holds now."""
        stream.read = stream.state.num_tokens
        if stream.pauses:
            self._resume(stream, _PAUSED_BY_READER)

    def running(self) -> int:
        """Requests that have been accepted and have not ended."""
        return len(self._streams)

    def waiting(self) -> int:
        """Of those, requests for which no engine has computed anything yet."""
        with self._lock:
            return sum(1 for stream in self._streams.values() if stream.state.metrics.scheduled_time is None)

    def is_running(self, request_id: str) -> bool:
        """Whether a request of this id was accepted and has not ended."""
        return request_id in self._streams

    def has_started(self, request_id: str) -> bool:
        """Whether something was computed for a request; true also when it has ended or is unknown."""
        stream = self._streams.get(request_id)
        return stream is None or stream.state.metrics.scheduled_time is not None

    def check(self) -> None:
        """Raise when nothing can be sent any more."""
        if self.failure is not None:
            raise _dead(self.failure)
        if self._closing:
            raise EngineDeadError("this AsyncLLM is closed: make a new one")

    def close(self) -> None:
        """Stop; requests that still run fail."""
        self._closing = True
        self.link.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the dispatcher's thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._end_aborted()
                try:
                    frame = self.link.receive()
                except EngineLostError as lost:
                    if not self._closing:
                        self._replace(str(lost))
                    continue
                if isinstance(frame, Frame):
                    self._take(frame)
                elif frame is not None:
                    self._mark_running(frame.request_ids)
        except BaseException as error:
            _log.error("the engine stopped: %s", error, exc_info=not isinstance(error, OctavoError))
            self.failure = error
            self._observe(self._observer.engine_lost, str(error), 0, len(self._streams))
        with self._lock:
            self._closing = True
            streams = list(self._streams.values())
            queries = list(self._queries.values())
            self._queries.clear()
        for _, future in queries:
            if not future.cancelled():
                future.set_exception(_dead(self.failure))
        for stream in streams:
            # One exception each: raising the same one in several tasks would mix up their tracebacks.
            self._fail(stream, _dead(self.failure))
        self._notify(streams)
        self.link.close()

    def _mark_running(self, request_ids: list[str]) -> None:
        """These may be the cause if the engine crashes now."""
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.running = True

    def _take(self, frame: Frame) -> None:
        """Give what a frame says to the requests."""
        changed: list[Stream] = []
        streams = self._streams
        for refusal in frame.refused:
            refused = streams.get(refusal.request_id)
            if refused is not None:
                self._fail(refused, refusal.restore())
                changed.append(refused)
        for request_id in frame.started:
            begun = streams.get(request_id)
            if begun is not None and begun.state.metrics.scheduled_time is None:
                begun.state.metrics.scheduled_time = frame.time
        processed = self.outputs.process(frame.outputs)
        for request_id, index, reason in processed.stops:
            self.link.send(Finish(request_id, index, reason))
        limit = self._most_unread
        for state in processed.changed:
            stream = streams.get(state.request_id)
            if stream is None:
                continue
            changed.append(stream)
            if limit is not None and stream.paced and state.num_tokens - stream.read > limit and state.running:
                self._pause(stream, _PAUSED_BY_READER)
        self._observe(self._observer.stepped, frame.stats, processed)
        for state in processed.finished:
            self._forget(state)
        for reply in frame.replies:
            _, future = self._queries.pop(reply.number, ("", None))
            if future is not None and not future.cancelled():
                future.set_result(reply.value)
        self._notify(changed)

    def _end_aborted(self) -> None:
        if not self._aborted:
            return
        with self._lock:
            aborted, self._aborted = self._aborted, []
        changed = []
        for stream in aborted:
            request_id = stream.state.request_id
            if self._streams.get(request_id) is stream:  # else it ended before the command was read
                self.link.send(Abort(request_id))
                self.outputs.remove(request_id)
                stream.state.end("abort")
                self._forget(stream.state)
                changed.append(stream)
        self._notify(changed)

    def _fail(self, stream: Stream, error: BaseException) -> None:
        self.outputs.remove(stream.state.request_id)
        stream.failure = error
        stream.state.end("error")
        self._forget(stream.state)

    def _forget(self, state: RequestState) -> None:
        with self._lock:
            stream = self._streams.pop(state.request_id, None)
        if stream is not None:
            self._observe(self._observer.finished, state)

    # -- slow readers

    def _pause(self, stream: Stream | None, by: str) -> bool:
        with self._lock:
            if stream is None or self._streams.get(stream.state.request_id) is not stream:
                return False
            if not stream.pauses:
                self.link.send(Pause(stream.state.request_id))
                self._observe(self._observer.paused, stream.state)
            stream.pauses.add(by)
            if by is _PAUSED_BY_READER and stream.read == stream.state.num_tokens:
                self._resume(stream, by)  # the reader caught up meanwhile
        return True

    def _resume(self, stream: Stream | None, by: str) -> bool:
        with self._lock:
            if stream is None or self._streams.get(stream.state.request_id) is not stream:
                return False
            if by in stream.pauses:
                stream.pauses.discard(by)
                if not stream.pauses:
                    self.link.send(Resume(stream.state.request_id))
                    self._observe(self._observer.resumed, stream.state)
        return True

    # -- a lost engine

    def _replace(self, reason: str) -> None:
        """Start another engine and give it every request; raises when none can be started."""
        _log.error("%s; %d requests will be replayed", reason, len(self._streams))
        failed: list[Stream] = []
        with self._lock:
            self._lost = True
            for stream in list(self._streams.values()):
                if stream.running and not stream.pauses:
                    stream.crashes += 1
                # One that has tokens ran before and will run first; the others are announced when their turn comes.
                stream.running = stream.state.num_tokens > 0
                if stream.crashes >= MOST_CRASHES:
                    request_id = stream.state.request_id
                    message = f"request {request_id} ran at {stream.crashes} crashes of the engine and is given up"
                    self._fail(stream, EngineCrashedError(f"{message}; the last: {reason}"))
                    failed.append(stream)
        self._notify(failed)
        self._observe(self._observer.engine_lost, reason, len(self._streams), len(failed))
        self._start_again(reason)
        self._end_aborted()
        with self._lock:
            self._lost = False
            replayed = list(self._streams.values())
            for stream in replayed:
                self.link.add(replace(stream.request, produced=stream.state.produced()))
                if stream.pauses:
                    self.link.send(Pause(stream.state.request_id))
            for number, (name, _) in self._queries.items():
                self.link.send(Query(number, name))
        self.restarts += 1
        _log.warning("the engine runs again; %d requests replayed, %d given up", len(replayed), len(failed))

    def _start_again(self, reason: str) -> None:
        for attempt in range(1, _MOST_STARTS + 1):
            try:
                info = self.link.restart()
            except OctavoError as error:
                _log.error("attempt %d of %d to start the engine again failed: %s", attempt, _MOST_STARTS, error)
                if attempt == _MOST_STARTS or self._closing:
                    raise EngineDeadError(f"{reason}, and it could not be started again: {error}") from error
                time.sleep(0.5 * attempt)
            else:
                self._observe(self._observer.engine_started, info)
                return

    # -- telling others

    def _observe(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception:
            name = getattr(method, "__name__", str(method))
            if name not in self._faults:  # said once: it may well happen at every step
                self._faults.add(name)
                _log.exception("an observer failed in %s; further faults there are not logged", name)

    def _notify(self, streams: Sequence[Stream]) -> None:
        """Wake the consumers of these streams, each event loop once."""
        loops: dict[asyncio.AbstractEventLoop, list[Stream]] = {}
        for stream in streams:
            if not stream.changed:
                stream.changed = True
                loops.setdefault(stream.loop, []).append(stream)
        for loop, woken in loops.items():
            try:
                loop.call_soon_threadsafe(_wake, woken)
            except RuntimeError:  # that loop is closed: nobody reads these streams any more
                for stream in woken:
                    with contextlib.suppress(OctavoError):
                        self.abort(stream.state.request_id, stream)


def _dead(cause: BaseException | None) -> EngineDeadError:
    if cause is None:
        return EngineDeadError("the engine was closed while the request ran")
    error = EngineDeadError(
        f"the engine stopped on an error: {cause!r}" if not isinstance(cause, OctavoError) else str(cause)
    )
    error.__cause__ = cause
    return error
