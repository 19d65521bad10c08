"""Messages over a stream socket between two processes of one machine: a length, then msgpack.

Sending never blocks the caller for long on the front end's side: what the socket does not take at once is kept and
flushed by whoever reads (`receive`), so two processes that both have much to say cannot wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

__all__ = ["Channel", "ChannelClosedError"]

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 18
_LARGEST = (1 << 32) - 1

Incoming = TypeVar("Incoming")


class ChannelClosedError(Exception):
    """The other process has closed its end or died."""


class Channel(Generic[Incoming]):
    """One end. Any thread may `send`; one thread calls `receive`."""

    def __init__(self, end: socket.socket, incoming: Any) -> None:
        end.setblocking(False)
        with contextlib.suppress(OSError):  # as large as the system allows: fewer switches for large frames
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._socket = end
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closed = False
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        self._wants_write = False

    def send(self, message: Any) -> None:
        """Send a message, or keep what the socket does not take for the reading thread to flush."""
        body = self._encoder.encode(message)
        if len(body) > _LARGEST:
            raise ValueError(f"a message of {len(body)} bytes is larger than the {_LARGEST} a channel carries")
        data = _LENGTH.pack(len(body)) + body
        with self._lock:
            if self._closed:
                raise ChannelClosedError
            if self._outgoing:
                self._outgoing += data
                return
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ChannelClosedError from error
            if sent < len(data):
                self._outgoing += data[sent:]
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"w")

    def send_all(self, message: Any) -> None:
        """Send a message and wait until the socket has taken all of it, reading what comes meanwhile."""
        self.send(message)
        while self._outgoing:
            self._pump(None)

    def receive(self, timeout: float | None) -> Incoming | None:
        """The next message; None when there is none within ``timeout`` seconds (None: wait for ever)."""
        message = self._next()
        if message is None:
            self._pump(timeout)
            message = self._next()
        return message

    @property
    def backlog(self) -> int:
        """Bytes the other end has not taken yet."""
        return len(self._outgoing)

    def wake(self) -> None:
        """Have a waiting `receive` return."""
        with self._lock:
            if not self._closed:  # the number of a closed descriptor may be another file's by now
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"w")

    def close(self) -> None:
        """Close this end; the other one reads an end of file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._socket.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _next(self) -> Incoming | None:
        buffer = self._incoming
        if len(buffer) < 4:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        end = 4 + length
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            message = self._decoder.decode(view[4:end])
        del buffer[:end]
        return message

    def _pump(self, timeout: float | None) -> None:
        """Wait until something can be read or written (or somebody wakes us) and do it."""
        with self._lock:
            wants_write = bool(self._outgoing)
        if wants_write != self._wants_write:
            self._wants_write = wants_write
            self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if wants_write else 0))
        try:
            events = self._poll.poll(None if timeout is None else max(0, int(timeout * 1000 + 0.999)))
        except (OSError, ValueError) as error:
            raise ChannelClosedError from error
        for descriptor, event in events:
            if descriptor == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                continue
            if event & select.POLLOUT:
                self._flush()
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read()

    def _flush(self) -> None:
        with self._lock:
            try:
                sent = self._socket.send(self._outgoing[:_CHUNK])
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError from error
            del self._outgoing[:sent]

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError from error
            if not data:
                raise ChannelClosedError
            self._incoming += data
            if len(data) < _CHUNK:
                return
