"""One HTTP connection with bounds: on the size and time of a head, on pipelining, on what waits for a slow reader."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.server.endpoints import NestedDialect
from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    import uvicorn
    from uvicorn._types import ASGISendEvent
    from uvicorn.server import ServerState

__all__ = ["WRITE", "ConnectionLimits", "GuardedProtocol"]

WRITE = "octavo.write"  # in the scope of a request: writes pieces of its answer (`_PieceWriter`)

_log = logging.getLogger(__name__)

# Requests sent before the answers to those before them; more than a client has use for, less than hurts.
_MAX_PIPELINED = 8
# What a field of a head counts beside its bytes, as in HTTP/2: many short ones take more memory than they have bytes.
_FIELD_BYTES = 32
_READ_BYTES = 256 << 10  # most that comes in one piece
# Connections above the limit that are told so; the others are closed without a word.
_MOST_REFUSED_AT_ONCE = 256
# After an answer the client did not expect yet, its bytes are read and dropped for a while: a connection closed with
# bytes unread is reset, and the answer may be lost with it.
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 16 << 20
# What may follow of a request that was answered before it was complete, without the connection being closed.
_REST_BYTES = 4 << 20


@dataclass(slots=True)
class ConnectionLimits:
    """What one connection may do, and how many of them there may be; ``refused`` counts those that did more."""

    max_connections: int
    max_header_bytes: int
    header_timeout: float
    idle_timeout: float
    write_timeout: float
    write_buffer_bytes: int
    refused: int = 0
    second: int = 0  # the one the Date header of answers is for


class _Refused(Exception):
    """Raised in a callback of the parser, to stop it."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol on httptools, with bounds. Each wait has a timer; none ticks while nothing happens."""

    def __init__(
        self,
        limits: ConnectionLimits,
        config: uvicorn.Config,
        server_state: ServerState,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, {}, loop)
        self._limits = limits
        self._active: RequestResponseCycle | None = None  # uvicorn's cycle is the latest, which may still have to wait
        self._in_head = False
        self._in_message = False
        self._head_bytes = 0
        self._raw_bytes = 0
        self._refusal: Failure | None = None
        self._discarding = False
        self._discarded = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    # -- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        surplus = len(self.connections) - self._limits.max_connections
        if surplus > _MOST_REFUSED_AT_ONCE:
            self._limits.refused += 1
            self.close_now()
            return
        if surplus > 0:
            message = f"{self._limits.max_connections} connections are open already: try again later."
            self._refuse(Failure(Kind.unavailable, message, code="connections", retry_after=1))
            return
        self._wait_for_request()

    def _wait_for_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self._limits.idle_timeout, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over, whoever ended it."""
        for timer in (self._head_timer, self._end_timer, self._stall_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        if self._active is not None and self._answering():
            self._active.disconnected = True
            self._active.message_event.set()
        super().connection_lost(exc)

    def close(self) -> None:
        """Close after what is written has gone out; a client that does not read it is cut off."""
        self.transport.close()
        if self._end_timer is None:
            self._end_timer = self.loop.call_later(self._limits.write_timeout, self.transport.abort)

    def linger(self) -> None:
        """Close the sending side, drop what still comes for a short while, then close."""
        if self._discarding or self.transport.is_closing():
            return
        self._discarding = True
        self._discarded = 0
        self._stop_head_timer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._end_timer = self.loop.call_later(_LINGER_SECONDS, self.close_now)

    def close_now(self) -> None:
        """Close at once."""
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """No request came for the idle time."""
        if not self.transport.is_closing():
            self.close()

    # -- what comes in

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._discarding:
            self._discarded += len(data)
            if self._discarded > _LINGER_BYTES:
                self.close_now()
            return
        self._unset_keepalive_if_required()
        if self._in_rest():
            self._discarded += len(data)
            if self._discarded > _REST_BYTES:
                self.linger()
                return
        if self._in_head:
            self._raw_bytes += len(data)  # the parser reports a field when it is complete, which it may never be
        try:
            if self._in_head and self._raw_bytes > self._limits.max_header_bytes + _READ_BYTES:
                raise self._head_too_large()
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                if self._answering():
                    self._refuse(
                        Failure(Kind.invalid, "An upgrade has to wait for the answers before it.", code="http")
                    )
                    return
                self._stop_head_timer()
                self._unset_keepalive_if_required()
                self.handle_websocket_upgrade()
                return
            if self.cycle is not None:
                self.cycle.keep_alive = False  # the parser reads no further, so this answer is the last
        except (httptools.HttpParserError, _Refused):
            _log.debug("not HTTP", exc_info=True)
            self._refuse(self._refusal or Failure(Kind.invalid, "This is not HTTP.", code="http"))
            return
        if self._head_timer is None and not self._answering() and (self._in_head or not self._in_message):
            self._head_timer = self.loop.call_later(self._limits.header_timeout, self._head_timed_out)

    def eof_received(self) -> None:
        """The client sends no more: it is taken to be gone, as one that closed cannot be told from it."""

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._head_bytes = self._raw_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the request line's target."""
        super().on_url(url)
        if len(self.url) > self._limits.max_header_bytes:
            raise self._head_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One field of the head."""
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + _FIELD_BYTES
        if self._head_bytes > self._limits.max_header_bytes:
            raise self._head_too_large()

    def on_headers_complete(self) -> None:
        """The head is complete: the request starts, or waits for those before it."""
        self._in_head = False
        self._stop_head_timer()
        self._set_date()
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._refusal = Failure(Kind.invalid, "Too many requests are sent ahead.", code="http")
            raise _Refused
        if self._discarding:
            raise _Refused
        self._check_coding()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.transport = _Ending(self)  # type: ignore[assignment]
            self.scope[WRITE] = _PieceWriter(self.cycle)  # type: ignore[literal-required]
            if self.scope["http_version"] == "1.0":
                self.cycle.send = _Unchunked(self.cycle)  # type: ignore[method-assign]
        if not self.pipeline:
            self._active = self.cycle
        else:
            # There is a bound on how many may wait, and only who reads notices that the client leaves.
            self.flow.resume_reading()

    def _check_coding(self) -> None:
        """Refuse a body in a coding other than chunks: the parser waits for its end, which nothing marks."""
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if not codings:
            return
        coding = b",".join(codings).decode("latin-1").strip()
        if coding.lower() == "chunked":
            return
        known_end = coding.lower().rpartition(",")[2].strip() == "chunked"
        message = f"The body must come as it is or in chunks, not in the transfer coding {coding[:100]}."
        self._refusal = Failure(Kind.invalid, message, code="http", status=501 if known_end else 400)
        raise _Refused

    def _set_date(self) -> None:
        """The Date header of the answers from now on; made anew when the second has changed."""
        now = int(time.time())
        if now != self._limits.second:
            self._limits.second = now
            self.server_state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]

    def on_message_complete(self) -> None:
        """The request is complete."""
        rest, self._in_message = self._in_rest(), False
        super().on_message_complete()
        if rest:
            self._stop_head_timer()
            self._wait_for_request()

    def _answering(self) -> bool:
        return self._active is not None and not self._active.response_complete

    def _head_too_large(self) -> _Refused:
        message = f"The head of the request is larger than {self._limits.max_header_bytes} bytes."
        self._refusal = Failure(Kind.too_large, message, code="http", status=431)
        return _Refused()

    def _head_timed_out(self) -> None:
        self._head_timer = None
        message = f"The head of the request did not come within {self._limits.header_timeout:g} seconds."
        self._refuse(Failure(Kind.timeout, message, code="http", status=408))

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # -- what goes out

    def on_response_complete(self) -> None:
        """An answer is complete. When its request is not, what is left of it may come for a while and is dropped."""
        upcoming = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if upcoming is not None:
            self._active = upcoming
        if self._in_rest() and not self.transport.is_closing():
            self._discarded = 0
            self._head_timer = self.loop.call_later(self._limits.header_timeout, self.linger)

    def _in_rest(self) -> bool:
        """Whether what comes is the body of a request that has been answered already."""
        return self._in_message and not self._in_head and not self.pipeline and not self._answering()

    def _refuse(self, failure: Failure) -> None:
        """Answer what is not a request and close, but not into the middle of another answer."""
        self._limits.refused += 1
        if self.transport.is_closing():
            return
        if self._active is not None and self._answering():
            self.pipeline.clear()
            self._active.keep_alive = False
            self._discarding = True
            return
        response = NestedDialect().failure_response(failure, None)
        head = [f"HTTP/1.1 {failure.status} {_PHRASES.get(failure.status, 'Error')}\r\n".encode()]
        head.extend(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
        self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", bytes(response.body)]))
        self.linger()

    def pause_writing(self) -> None:
        """The client does not keep up with what is written to it."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _watch_reader(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._limits.write_timeout, self._stalled)

    def _stalled(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch_reader()
        else:
            self.close_now()


class _PieceWriter:
    """Writes a piece of an answer at once, without the steps of ASGI's ``send``: under load, thousands a second.

    False when nothing was written, because it has to go the usual way: the client is behind, or the answer has no
    chunks.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def __call__(self, body: bytes) -> bool:
        cycle = self._cycle
        if not body or not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True


class _Unchunked:
    """Sends an answer to a client of HTTP/1.0, which knows no chunks: one without a length ends with the connection."""

    __slots__ = ("_cycle", "_send", "_sized")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._sized = True

    async def __call__(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            self._sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._sized:
                self._cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and not self._sized:
            # uvicorn counts down to the last piece; before that, any piece is short enough.
            more = message.get("more_body", False)
            self._cycle.expected_content_length = sys.maxsize if more else len(message.get("body", b""))
        await self._send(message)


class _Ending:
    """The transport as an answer sees it: closing it spares a client that has not sent all of its request."""

    __slots__ = ("_protocol", "is_closing", "write")

    def __init__(self, protocol: GuardedProtocol) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        protocol = self._protocol
        if protocol._in_message or protocol._discarding or protocol.flow.read_paused:
            protocol._discarding = False
            protocol.linger()
        else:
            protocol.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.transport, name)


_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    503: "Service Unavailable",
}
