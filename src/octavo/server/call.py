"""One HTTP request on its way: its body, its deadlines, the generations it starts, and whether its client is there."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from octavo.server.failures import ClientGone, Failure, Kind

if TYPE_CHECKING:
    from octavo.frontend.input_processor import Prompt
    from octavo.frontend.output_processor import OutputKind
    from octavo.frontend.outputs import RequestMetrics, RequestOutput
    from octavo.sampling.params import SamplingParams
    from octavo.server.serving import Serving

__all__ = ["Call", "CallRecord"]

T = TypeVar("T")

_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class CallRecord:
    """What the access log says about a call beside its status: numbers of tokens, and the times of its generations."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    generations: int = 0
    metrics: RequestMetrics | None = None  # of the generation that ended last
    failure: Failure | None = None


@lru_cache(maxsize=256)
def _decoder(type_: Any) -> msgspec.json.Decoder[Any]:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(type_)
    return decoder


class Call:
    """One HTTP request.

    ``request_id`` is the client's ``X-Request-Id`` when it is at most 128 printable characters, else a fresh one;
    ``tenant`` the name of the API key it came with; ``arrival`` the time it came in, of ``time.monotonic``.
    """

    def __init__(self, serving: Serving, request: Request, *, tenant: str | None = None) -> None:
        self.serving = serving
        self.request = request
        self.tenant = tenant
        self.arrival = time.monotonic()
        given = request.headers.get("x-request-id", "")
        self.request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        self.record = CallRecord()
        self.gone = False
        self.cancelled = False
        self._engine_ids: set[str] = set()
        self._count = 0
        self._watcher: asyncio.Task[None] | None = None
        self._watched: asyncio.Task[Any] | None = None

    # -- the body

    async def read(self, type_: type[T]) -> T:
        """The JSON body as ``type_``. A body that is too long, too slow, no JSON or not of the type is a Failure."""
        content_type = self.request.headers.get("content-type")
        if content_type is not None:
            media_type = content_type.partition(";")[0].strip().lower()
            if media_type != "application/json" and not media_type.endswith("+json"):
                message = f"The body must be application/json, got {media_type[:100]}."
                raise Failure(Kind.unsupported_media, message)
        decoder: msgspec.json.Decoder[T] = _decoder(type_)  # type: ignore[arg-type]  # types can be hashed

        return decoder.decode(await self.body())

    async def body(self) -> bytes:
        """The body as it came; a Failure when it is larger than ``max_body_bytes`` or takes too long to come."""
        limit = self.serving.options.max_body_bytes
        with suppress(ValueError):
            if int(self.request.headers.get("content-length", "0")) > limit:
                raise _too_large(limit)
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self.serving.options.body_timeout):
                async for piece in self.request.stream():
                    size += len(piece)
                    if size > limit:
                        raise _too_large(limit)
                    pieces.append(piece)
        except ClientDisconnect:
            self.gone = True
            raise ClientGone from None
        except TimeoutError:
            seconds = self.serving.options.body_timeout
            message = f"The body did not come within {seconds:g} seconds."
            raise Failure(Kind.timeout, message, status=408, headers={"Connection": "close"}) from None
        return b"".join(pieces)

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
        options = self.serving.options
        self._check_queue()
        if isinstance(prompt, str) and not add_special_tokens:
            prompt = {"prompt_token_ids": self.serving.llm.get_tokenizer().encode(prompt, add_special_tokens=False)}
        engine_id = self._engine_id(request_id)
        stream = self.serving.llm.generate(prompt, params, engine_id, priority=priority, output_kind=kind)
        self._engine_ids.add(engine_id)
        deadline = _Deadline(self, options.request_timeout, options.queue_timeout)
        output: RequestOutput | None = None
        try:
            while True:
                output = await deadline.next(stream)
                if output is None:
                    return
                self._note(output)
                yield output
        finally:
            deadline.close()
            self._engine_ids.discard(engine_id)
            await stream.aclose()

    def cancel(self) -> list[str]:
        """Mark the call cancelled; gives the engine's ids of what runs for it, which are to be aborted."""
        self.cancelled = True
        return sorted(self._engine_ids)

    def _engine_id(self, wanted: str | None) -> str:
        """An id no running request has, even when two clients give the same X-Request-Id."""
        if wanted is None:
            wanted = self.request_id if self._count == 0 else f"{self.request_id}-{self._count}"
        self._count += 1
        shared = self.serving.calls.get(self.request_id, ())
        taken = wanted in self._engine_ids or any(wanted in call._engine_ids for call in shared if call is not self)
        return f"{wanted}-{uuid.uuid4().hex[:8]}" if taken else wanted

    def _check_queue(self) -> None:
        bound = self.serving.options.max_queued_requests
        if bound is None:
            return
        waiting: int = getattr(self.serving.llm, "num_waiting", 0)
        if waiting >= bound:
            message = f"{waiting} requests wait already, and at most {bound} may: try again later."
            raise Failure(Kind.overloaded, message, code="queue_full", retry_after=1)

    def _note(self, output: RequestOutput) -> None:
        if not output.finished:
            return
        record = self.record
        record.generations += 1
        record.prompt_tokens += len(output.prompt_token_ids)
        record.cached_tokens += output.num_cached_tokens
        record.metrics = output.metrics

    def failed(self, failure: Failure) -> Failure:
        """Remember for the log what the call failed on."""
        self.record.failure = failure
        return failure

    # -- the client

    async def until_gone(self, work: Awaitable[T]) -> T:
        """Await ``work``; when the client disconnects first, cancel it and raise ClientGone."""
        if self.gone:
            if isinstance(work, Coroutine):
                work.close()
            raise ClientGone
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())
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

    async def _watch(self) -> None:
        """Wait for the disconnect: what comes on the connection before it is the rest of a body nobody wants."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._watched is not None:
            self._watched.cancel()

    def close(self) -> None:
        """The call is answered: nobody has to watch its client any more."""
        if self._watcher is not None:
            self._watcher.cancel()


def _too_large(limit: int) -> Failure:
    return Failure(Kind.too_large, f"The body is larger than {limit} bytes.", headers={"Connection": "close"})


class _Deadline:
    """Interrupts the wait for a generation's next output when its time is up: one timer, however many outputs."""

    def __init__(self, call: Call, total: float | None, queue: float | None) -> None:
        self._call = call
        self._waiting: asyncio.Task[Any] | None = None
        self._expired: Failure | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._queue_timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        if total is not None:
            left = call.arrival + total - time.monotonic()
            message = f"The request took longer than {total:g} seconds."
            failure = Failure(Kind.timeout, message, code="request_timeout")
            self._timers.append(loop.call_later(max(0.0, left), self._expire, failure))
        if queue is not None:
            message = f"The request waited longer than {queue:g} seconds to start."
            failure = Failure(Kind.queue_timeout, message, code="queue_timeout", retry_after=max(1.0, queue))
            self._queue_timer = loop.call_later(queue, self._expire, failure)
            self._timers.append(self._queue_timer)

    def _expire(self, failure: Failure) -> None:
        if self._expired is None:
            self._expired = failure
            if self._waiting is not None:
                self._waiting.cancel()

    async def next(self, stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
        """The next output, None at the end."""
        if self._expired is not None:
            raise self._expired
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._waiting = task
        try:
            output = await anext(stream, None)
        except asyncio.CancelledError:
            if self._expired is not None and task.uncancel() <= before:
                raise self._expired from None
            raise
        finally:
            self._waiting = None
        if self._queue_timer is not None:
            self._queue_timer.cancel()
            self._queue_timer = None
        return output

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
