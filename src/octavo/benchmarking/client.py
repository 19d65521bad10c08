"""An HTTP/1.1 client that only notes what came when: everything that can wait is read after the measurement.

A piece of a body costs one callback and one entry in a list. Times are seconds of ``clock``, taken once for each
delivery of the system; server-sent events are cut out of the pieces later (``sse``).
"""

from __future__ import annotations

import asyncio
import json
import ssl as tls
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools

from octavo.errors import ConfigError

__all__ = ["Client", "Exchange", "Target"]

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server is: scheme, host, port and the path all its routes are below."""

    scheme: str
    host: str
    port: int
    base: str = ""

    @classmethod
    def of(cls, url: str) -> Self:
        """Read a URL; ConfigError where it is none for HTTP."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL: {error}") from error
        if parts.scheme not in _PORTS or not host or parts.query or parts.fragment:
            raise ConfigError(f"a server's URL must be http://HOST:PORT or https://HOST, got {url!r}")
        return cls(parts.scheme, host, port or _PORTS[parts.scheme], parts.path.rstrip("/"))

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base}"

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(slots=True)
class Exchange:
    """One request and what came back: ``pieces`` of the body as they arrived, each with its time."""

    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def ok(self) -> bool:
        return self.error is None and self.status == 200

    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def fault(self) -> str | None:
        """What is wrong with the answer as a whole, None when nothing is."""
        if self.error is not None or self.status == 200:
            return self.error
        return f"HTTP {self.status} {' '.join(self.body[:300].decode(errors='replace').split())}".strip()


class _Connection(asyncio.Protocol):
    """One connection; ``exchange`` is the one whose answer it waits for."""

    def __init__(self, clock: Callable[[], float], on_event: Callable[[int], None] | None) -> None:
        self._clock = clock
        self._on_event = on_event
        self._now = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self.closed = False

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except Exception as error:  # the parser's own and, wrapped, whatever its callbacks meet
            self._finish(f"not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._now = self._clock()
        if self._exchange is None:
            return
        headers = self._exchange.headers
        framed = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "")
        whole = self._exchange.status != 0 and not framed and error is None
        self._finish(None if whole else f"the connection was closed before the answer's end{_because(error)}")

    # -- what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None:
            self._exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.pieces.append((self._now, body))
            if self._on_event is not None:
                self._on_event(body.count(b"data:"))

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._exchange.status >= 200:
            if not self._parser.should_keep_alive():
                self.close()
            self._finish(None)

    # -- what the client calls

    def start(self, exchange: Exchange, request: bytes) -> asyncio.Future[None]:
        """Send a request; the future is done when its answer is complete, or will not become so."""
        assert self._transport is not None
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def _finish(self, error: str | None) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.ended = self._now
        exchange.error = error
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Client:
    """Sends requests to one server.

    ``headers`` are whole lines without their ends, sent with every request. With ``keep_alive`` connections are used
    again, and a request on one that the server had just closed is sent once more; else each request has its own.
    ``on_event`` is told how many events each piece of an answer starts (for a progress view). ``insecure`` leaves
    certificates unchecked.
    """

    def __init__(
        self,
        target: Target,
        *,
        headers: Iterable[str] = (),
        keep_alive: bool = True,
        insecure: bool = False,
        on_event: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self.on_event = on_event
        self._clock = clock
        self._keep_alive = keep_alive
        self._idle: list[_Connection] = []
        self._tls: tls.SSLContext | None = None
        if target.scheme == "https":
            self._tls = tls.create_default_context()
            if insecure:
                self._tls.check_hostname = False
                self._tls.verify_mode = tls.CERT_NONE
        lines = [f"Host: {target.authority}", "Accept-Encoding: identity", "User-Agent: octavo-bench", *headers]
        if not keep_alive:
            lines.append("Connection: close")
        self._common = "".join(f"{line}\r\n" for line in lines)

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Iterable[str] = (),
        timeout: float = 21_600.0,
    ) -> Exchange:
        """One request and its answer, read to its end. Never raises for what the server or the network does."""
        lines = [f"{method} {self.target.base}{path} HTTP/1.1\r\n{self._common}", *(f"{line}\r\n" for line in headers)]
        if body is not None:
            lines.append(f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n")
        request = "".join(lines).encode("latin-1") + b"\r\n" + (body or b"")
        exchange = Exchange(sent=self._clock())
        try:
            async with asyncio.timeout(timeout):
                await self._exchange(exchange, request)
        except TimeoutError:
            exchange.error = f"no answer within {timeout:g} s"
        except OSError as error:
            exchange.error = f"cannot connect to {self.target.url}: {error.strerror or error}"
        if exchange.ended == 0.0:
            exchange.ended = self._clock()
        return exchange

    async def _exchange(self, exchange: Exchange, request: bytes) -> None:
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect()
            if connection.closed:
                continue
            try:
                await connection.start(exchange, request)
            except BaseException:
                connection.close()
                raise
            if reused and exchange.status == 0 and exchange.error is not None:
                exchange.error = None  # it was closed while it was idle: nothing has been answered yet
                continue
            if self._keep_alive and not connection.closed:
                self._idle.append(connection)
            return

    async def _connect(self) -> _Connection:
        def make() -> _Connection:
            return _Connection(self._clock, self._tell)

        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(make, self.target.host, self.target.port, ssl=self._tls)
        return connection

    def _tell(self, events: int) -> None:
        if self.on_event is not None:
            self.on_event(events)

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _because(error: Exception | None) -> str:
    return "" if error is None else f" ({error})"
