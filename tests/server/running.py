"""A real server with the real model on a free port of the loopback, for tests; one per module is enough.

The fixture `server` is known to every module below tests/server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import httpx
import pytest
import uvloop

from octavo.frontend.async_llm import AsyncLLM
from octavo.server.listening import bind
from octavo.server.options import ServerOptions
from octavo.server.runner import RunningApp, make_serving
from octavo.server.serving import Serving

__all__ = ["RunningServer", "server"]

T = TypeVar("T")

SMALL: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 2048, "num_gpu_blocks_override": 512}


class RunningServer:
    """The server's application in a thread of this process, so that tests can look into it.

    Keyword arguments are those of ``ServerOptions.from_kwargs`` (engine and server options together). The engine runs
    in a thread of this process unless ``separate_process`` is set; with ``llm`` an engine that runs already is served,
    and is left running at the end. ``code`` is the exit code, once closed.
    """

    def __init__(self, llm: AsyncLLM | None = None, *, separate_process: bool = False, **options: Any) -> None:
        engine = {} if llm is not None else SMALL
        self.options = ServerOptions.from_kwargs(**{"port": 0, **engine, **options})
        self._own = llm is None
        self._sockets = bind(self.options)
        try:
            self.serving: Serving = make_serving(self.options, llm, separate_process=separate_process)
        except BaseException:
            for bound in self._sockets:
                bound.close()
            raise
        self.running: RunningApp
        self.loop: asyncio.AbstractEventLoop
        self.code: int | None = None
        self._error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        assert self._started.wait(60)
        if self._error is not None:
            raise self._error
        self.port: int = self.running.http.port or 0
        self.url = self.running.http.url

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self.running = RunningApp(self.serving, self._sockets)
            self.code = await self.running.run(self._started.set)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    def signal(self, number: int) -> None:
        """Have the server do what it does when its process gets this signal."""
        self.loop.call_soon_threadsafe(self.running.signalled, number)

    def wait(self) -> int | None:
        """Wait for the server to end; its exit code."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self.code

    def close(self) -> None:
        """Stop serving, and the engine unless it was given."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # its loop may just have ended
                self.loop.call_soon_threadsafe(self.running.signalled, 2)
        self.wait()
        if self._own:
            self.serving.service.shutdown()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def client(self, **options: Any) -> httpx.Client:
        """An httpx client of the server."""
        return httpx.Client(base_url=self.url, **{"timeout": 60, **options})

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine function in the server's event loop and give its result."""

        async def run() -> T:
            return await function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to become true in the server, looking again and again."""
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, "it did not become true"
            time.sleep(0.003)

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        """A raw connection to the server, with a receive buffer of that many bytes."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def raw(self, data: bytes) -> bytes:
        """Send bytes on a connection of their own and give everything that comes back until it is closed."""
        with self.connect() as connection:
            connection.sendall(data)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """Everything a connection gives until it is closed or reset."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server with default options and the default model."""
    with RunningServer() as running:
        yield running
