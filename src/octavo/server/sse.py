"""Server-sent events: the real status for early failures, keep-alive comments, and an end when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.failures import ClientGone, Failure

if TYPE_CHECKING:
    from octavo.server.call import Call

__all__ = ["data_event", "sse_response"]

_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_encoder = msgspec.json.Encoder()

OnFailure = Callable[[Failure], "bytes | Sequence[bytes]"]


def data_event(obj: Any) -> bytes:
    """One event whose data is ``obj`` as JSON."""
    return b"data: " + _encoder.encode(obj) + b"\n\n"


async def sse_response(
    call: Call, events: AsyncIterator[bytes], *, on_failure: OnFailure, headers: Mapping[str, str] | None = None
) -> Response:
    """Answer with a stream of complete events (``b"data: ...\\n\\n"``).

    The first event is awaited before the status line is sent, though no longer than the keep-alive time, so that a
    request that fails at once is answered with its real status: its exception comes out of here. A failure after that
    ends the stream with the frames ``on_failure`` makes of it. The iterator is closed when the client goes.
    """
    call.record.stream = True
    first = asyncio.ensure_future(_next(events))
    try:
        await call.until_gone(asyncio.wait({first}, timeout=call.serving.options.sse_keep_alive))
        if first.done():
            first.result()  # raises what the first event failed on
    except BaseException:
        await _close(first, events)
        raise
    return _EventStream(call, first, events, on_failure, {**_HEADERS, **(headers or {})})


def _not_at_once(body: bytes) -> bool:
    """Where ASGI's ``send`` is all there is."""
    return False


async def _next(events: AsyncIterator[bytes]) -> bytes | None:
    """The next event, None at the end: StopAsyncIteration cannot leave a task."""
    try:
        return await anext(events)
    except StopAsyncIteration:
        return None


async def _close(first: asyncio.Future[bytes | None], events: AsyncIterator[bytes]) -> None:
    if not first.done():
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
    elif not first.cancelled():
        first.exception()  # seen, or asyncio would complain that it was not
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


class _EventStream(Response):
    """The answer; one task runs it, and no further task is made for an event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        call: Call,
        first: asyncio.Future[bytes | None],
        events: AsyncIterator[bytes],
        on_failure: OnFailure,
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(headers)
        self._call = call
        self._first = first
        self._events = events
        self._on_failure = on_failure
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._call.until_gone(self._run(send))
        finally:
            await _close(self._first, self._events)

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        keep_alive = asyncio.ensure_future(self._keep_alive(send))
        try:
            await self._send_events(send)
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            frames = self._on_failure(self._call.failed(error))
            body = frames if isinstance(frames, bytes) else b"".join(frames)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            keep_alive.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        write: Callable[[bytes], bool] = getattr(send, "write", _not_at_once)
        self._sent_at = clock()
        event = await self._first
        if event is None:
            return
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._sent_at = clock()
        async for event in self._events:
            if not write(event):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            self._sent_at = clock()

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for the keep-alive time."""
        period = self._call.serving.options.sse_keep_alive
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + period - clock()))
            if clock() - self._sent_at >= period:
                self._sent_at = clock()
                await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
