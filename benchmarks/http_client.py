"""A small HTTP/1.1 client on asyncio: one connection a request, answers as they come, cheap beside what it measures."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

__all__ = ["Address", "Answer", "Connection", "ProtocolError", "call", "events"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PIECE = 1 << 16


class ProtocolError(Exception):
    """The server's answer is not HTTP, or ended early."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: on this machine only."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if self.host not in _LOOPBACK:
            raise ValueError(f"{self.host} is not this machine: only loopback addresses are loaded")

    @classmethod
    def of(cls, url: str) -> Self:
        parts = urlsplit(url)
        return cls(parts.hostname or "", parts.port or 80)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection that carries one request and its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: Address) -> None:
        self.reader, self.writer, self.address = reader, writer, address
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def open(cls, address: Address, *, receive_buffer: int | None = None, limit: int = 1 << 20) -> Self:
        """Connect; ``receive_buffer`` bytes in the kernel and ``limit`` in the reader make a slow reader felt early."""
        if receive_buffer is None:
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=limit)
        else:
            raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_connect(raw, (address.host, address.port))
            reader, writer = await asyncio.open_connection(sock=raw, limit=limit)
        return cls(reader, writer, address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def send(self, method: str, path: str, body: bytes | None = None, headers: Iterable[str] = ()) -> None:
        """Send a request; ``headers`` are whole lines without their ends."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.address.host}:{self.address.port}", "Connection: close"]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        self.writer.write("\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + (body or b""))
        await self.writer.drain()

    async def head(self) -> int:
        """Read status line and headers; the status."""
        try:
            block = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise ProtocolError(f"no head of an answer: {error}") from error
        first, *rest = block[:-4].decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise ProtocolError(f"no status line: {first[:80]!r}")
        self.status = int(words[1])
        for line in rest:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        return self.status

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives, without its framing; ProtocolError when it ends before its end."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            async for piece in self._chunks():
                yield piece
            return
        left = int(self.headers["content-length"]) if "content-length" in self.headers else None
        while left is None or left > 0:
            piece = await self.reader.read(_PIECE if left is None else min(left, _PIECE))
            if not piece:
                if left is None:
                    return
                raise ProtocolError(f"the connection closed {left} bytes before the end of the body")
            left = None if left is None else left - len(piece)
            yield piece

    async def _chunks(self) -> AsyncIterator[bytes]:
        """Decode what has arrived in one go: many small chunks are often in one packet."""
        pending = b""
        while True:
            data = await self.reader.read(_PIECE)
            if not data:
                raise ProtocolError("the connection closed inside a chunked body")
            pending += data
            whole: list[bytes] = []
            start = 0
            while (line_end := pending.find(b"\r\n", start)) >= 0:
                size = int(pending[start:line_end].partition(b";")[0], 16)
                end = line_end + 2 + size
                if len(pending) < end + 2:
                    break
                if size == 0:
                    if whole:
                        yield b"".join(whole)
                    return
                whole.append(pending[line_end + 2 : end])
                start = end + 2
            pending = pending[start:]
            if whole:
                yield b"".join(whole)

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    def reset(self) -> None:
        """Cut the connection at once, as a client does that dies."""
        self.writer.transport.abort()


async def events(connection: Connection) -> AsyncIterator[bytes]:
    """The data of each server-sent event; comments are left out."""
    pending = b""
    async for piece in connection.pieces():
        *whole, pending = (pending + piece).split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


async def call(
    address: Address, method: str, path: str, body: Any = None, *, headers: Iterable[str] = (), timeout: float = 600.0
) -> Answer:
    """One request and its whole answer; ``body`` is sent as JSON unless it is bytes."""
    encoded = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    async with asyncio.timeout(timeout), await Connection.open(address) as connection:
        await connection.send(method, path, encoded, headers)
        await connection.head()
        return Answer(connection.status, connection.headers, await connection.body())
