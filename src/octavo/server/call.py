"""One HTTP request on its way: its body, its deadlines, the generations it starts, and whether its client is there."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, HTTPConnection, Request

from octavo.server.failures import ClientGone, Failure, Kind, failure_of

if TYPE_CHECKING:
    from octavo.frontend.generation import Generation
    from octavo.frontend.input_processor import Prompt
    from octavo.frontend.output_processor import OutputKind
    from octavo.frontend.outputs import RequestMetrics, RequestOutput
    from octavo.sampling.params import SamplingParams
    from octavo.server.serving import Serving

__all__ = ["Call", "CallRecord"]

T = TypeVar("T")

_SANE_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


@dataclass(slots=True)
class CallRecord:
    """What is known of a call for the log: its tokens, and times and parameters of the generation it started last."""

    model: str | None = None
    stream: bool = False
    body_bytes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    generations: int = 0
    finish_reasons: set[str] = field(default_factory=set)
    times: RequestMetrics | None = None
    params: SamplingParams | None = None
    failure: Failure | None = None


@lru_cache(maxsize=256)
def _decoder(type_: Any) -> msgspec.json.Decoder[Any]:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(type_)
    return decoder


class Call:
    """One HTTP request.

    ``request_id`` is the client's ``X-Request-Id`` when it is at most 128 letters, digits and ``._:@/+=-``, else a
    fresh one; ``tenant`` the name of the API key it came with; ``arrival`` the time it came in, of ``time.monotonic``;
    ``gone`` whether its client closed the connection before it was ``answered``. ``request`` may be a WebSocket, which
    has no body.
    """

    def __init__(self, serving: Serving, request: HTTPConnection, *, tenant: str | None = None) -> None:
        self.serving = serving
        self.request = request
        self.tenant = tenant
        self.arrival = time.monotonic()
        given = request.headers.get("x-request-id", "")
        self.request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        self.record = CallRecord()
        self.gone = False
        self.answered = False
        self._body: bytes | None = None
        self._generations: dict[str, _Deadline] = {}  # by the engine's id of each
        self._interrupted: Failure | None = None
        self._count = 0
        self._watcher: asyncio.Task[None] | None = None
        self._watched: asyncio.Task[Any] | None = None

    # -- the body

    async def read(self, type_: type[T]) -> T:
        """The JSON body as ``type_``; a Failure when it is too long, too slow, compressed or no JSON of that type."""
        content_type = self.request.headers.get("content-type")
        if content_type is not None:
            media_type = content_type.partition(";")[0].strip().lower()
            if media_type != "application/json" and not media_type.endswith("+json"):
                message = f"The body must be application/json, got {media_type[:100]}."
                raise Failure(Kind.unsupported_media, message)
        coding = self.request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            message = f"The body must come as it is, not in the coding {coding[:100]}."
            raise Failure(Kind.unsupported_media, message, headers={"Accept-Encoding": "identity"})
        decoder: msgspec.json.Decoder[T] = _decoder(type_)  # type: ignore[arg-type]  # types can be hashed
        body = await self.body()
        try:
            return decoder.decode(body)
        except RecursionError:
            raise Failure(Kind.invalid, "The body is nested too deeply.", code="json") from None

    async def body(self) -> bytes:
        """The body as it came; a Failure when it is larger than ``max_body_bytes`` or takes too long to come."""
        if self._body is not None:
            return self._body
        assert isinstance(self.request, Request)
        options = self.serving.options
        limit = options.max_body_bytes
        with suppress(ValueError):
            if int(self.request.headers.get("content-length", "0")) > limit:
                raise _too_large(limit)
        pieces, size = [], 0
        try:
            async with asyncio.timeout(options.body_timeout):
                async for piece in self.request.stream():
                    size += len(piece)
                    if size > limit:
                        raise _too_large(limit)
                    pieces.append(piece)
        except ClientDisconnect:
            self.gone = True
            raise ClientGone from None
        except TimeoutError:
            message = f"The body did not come within {options.body_timeout:g} seconds."
            raise Failure(Kind.timeout, message, status=408, headers={"Connection": "close"}) from None
        self.record.body_bytes = size
        self._body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return self._body

    # -- generation

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int | None = None,
        add_special_tokens: bool = True,
        kind: OutputKind = "delta",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt as ``AsyncLLM.generate`` does, within the deadlines of the server.

        A request that does not start within ``queue_timeout`` is a Failure of kind queue_timeout, one whose call is
        not answered within ``request_timeout`` of kind timeout; one more than ``max_queued_requests`` waiting is
        overloaded. ``request_id`` may name the generation (an id of the dialect); the cancel route takes either it or
        the id of the call.
        """
        llm, options = self.serving.llm, self.serving.options
        if self._interrupted is not None:
            raise self._interrupted.again()
        self._check_queue()
        engine_id = self._engine_id(request_id)
        self.serving.engine_ids.add(engine_id)
        deadline = _Deadline(self, engine_id, options.request_timeout, options.queue_timeout)
        self._generations[engine_id] = deadline
        record = self.record
        record.model = record.model or self.serving.model_names[0]
        record.generations += 1
        record.params = params
        try:
            generation = deadline.generation = await llm.open(
                prompt,
                params,
                engine_id,
                priority=priority,
                output_kind=kind,
                add_special_tokens=add_special_tokens,
                tenant=self.tenant,
            )
            first = True
            generated = 0
            while True:
                if deadline.expired is not None:
                    raise deadline.expired.again()
                output = await generation.next()
                if output is None:
                    return
                if first:
                    first = False
                    record.prompt_tokens += len(output.prompt_token_ids)
                    record.cached_tokens += output.num_cached_tokens
                record.times = output.metrics
                count = 0
                for completion in output.outputs:
                    count += len(completion.token_ids)
                    if completion.finish_reason is not None:
                        record.finish_reasons.add(completion.finish_reason)
                # Deltas add up; what is cumulative counts for what it has more than before.
                record.generated_tokens += count if kind == "delta" else count - generated
                generated = count
                yield output
        finally:
            deadline.close()
            del self._generations[engine_id]
            self.serving.engine_ids.discard(engine_id)

    @property
    def engine_ids(self) -> list[str]:
        """The engine's ids of what is being generated for this call."""
        return list(self._generations)

    def interrupt(self, failure: Failure) -> None:
        """End what is being generated for this call, and what it would start, with ``failure``."""
        self._interrupted = failure
        for deadline in list(self._generations.values()):
            deadline.expire(failure)

    def wake(self) -> None:
        """A generation was ended from outside: a reader that waits for something else should read on, to notice."""

    def _engine_id(self, wanted: str | None) -> str:
        """An id no running request has, whatever ids other clients chose for theirs."""
        if wanted is None:
            wanted = self.request_id if self._count == 0 else f"{self.request_id}-{self._count}"
        self._count += 1
        serving = self.serving
        # One whose client left a moment ago may still be in the engine, the longer when that is being replaced.
        if wanted in serving.engine_ids or serving.llm.is_running(wanted):
            return f"{wanted}-{uuid.uuid4().hex[:8]}"
        return wanted

    def _check_queue(self) -> None:
        bound = self.serving.options.max_queued_requests
        if bound is None:
            return
        waiting = self.serving.llm.num_waiting
        if waiting >= bound:
            message = f"Model is overloaded: {waiting} requests wait, and at most {bound} may. Try again later."
            raise Failure(Kind.overloaded, message, code="queue_full", retry_after=1)

    def failed(self, error: BaseException) -> Failure:
        """The failure ``error`` stands for, remembered for the log and the metrics."""
        failure = failure_of(error)
        if self.record.failure is None:
            self.record.failure = failure
            observer = self.serving.observer
            if observer is not None:
                observer.failed(failure, cause=error)
        return failure

    # -- the client

    async def until_gone(self, work: Awaitable[T]) -> T:
        """Await ``work``; when the client disconnects first, cancel it and raise ClientGone."""
        if self.gone:
            if isinstance(work, Coroutine):
                work.close()
            raise ClientGone
        if self._watcher is None:
            assert isinstance(self.request, Request)
            self._watcher = asyncio.ensure_future(self._watch(self.request))
        task = asyncio.current_task()
        assert task is not None
        before, outer = task.cancelling(), self._watched
        self._watched = task
        try:
            return await work
        except asyncio.CancelledError:
            if self.gone and outer is None and task.uncancel() <= before:
                raise ClientGone from None
            raise
        finally:
            self._watched = outer

    async def _watch(self, request: Request) -> None:
        """Wait for the disconnect: what comes on the connection before it is the rest of a body nobody wants."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        if self.answered:
            return  # the connection has no more to say of this request
        self.gone = True
        if self._watched is not None:
            self._watched.cancel()

    def close(self) -> None:
        """The call is answered: nobody has to watch its client any more."""
        if self._watcher is not None:
            self._watcher.cancel()


def _too_large(limit: int) -> Failure:
    message = f"The body is larger than {limit} bytes."
    return Failure(Kind.too_large, message, code="body_too_large", headers={"Connection": "close"})


class _Deadline:
    """Ends a generation when its time is up or it is told to: one timer each, however many outputs there are."""

    def __init__(self, call: Call, engine_id: str, total: float | None, queue: float | None) -> None:
        self._call = call
        self._llm = call.serving.llm
        self._engine_id = engine_id
        self.generation: Generation | None = None  # once it has been started
        self.expired: Failure | None = None
        self._total_timer: asyncio.TimerHandle | None = None
        self._queue_timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        if total is not None:
            left = call.arrival + total - time.monotonic()
            failure = Failure(Kind.timeout, f"The request took longer than {total:g} seconds.", code="request_timeout")
            self._total_timer = loop.call_later(max(0.0, left), self.expire, failure)
        if queue is not None:
            message = f"The request waited longer than {queue:g} seconds to start."
            failure = Failure(Kind.queue_timeout, message, code="queue_timeout", retry_after=queue)
            left = call.arrival + queue - time.monotonic()
            self._queue_timer = loop.call_later(max(0.0, left), self._expire_in_queue, failure)

    def expire(self, failure: Failure) -> None:
        """End the generation with ``failure``, now when its reader waits for it, else when it reads on."""
        if self.expired is not None:
            return
        self.expired = failure
        if self.generation is not None:
            self.generation.fail(failure.again())
        # The reader may be held up by its client for long; what it would read is not worth computing.
        self._call.wake()

    def _expire_in_queue(self, failure: Failure) -> None:
        if not self._llm.has_started(self._engine_id):
            self.expire(failure)

    def close(self) -> None:
        """Stop the timers, and the generation if it has not ended."""
        for timer in (self._total_timer, self._queue_timer):
            if timer is not None:
                timer.cancel()
        if self.generation is not None:
            self.generation.close()
