"""A real server with the real model on a free port of the loopback, for tests; one per module is enough.

The fixture `server` is known to every module below tests/server.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import httpx
import pytest
import uvicorn

from octavo.frontend.async_llm import AsyncLLM
from octavo.server.options import ServerOptions
from octavo.server.runner import make_serving, uvicorn_config
from octavo.server.serving import Serving

__all__ = ["RunningServer", "server"]

T = TypeVar("T")

SMALL: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 2048, "num_gpu_blocks_override": 512}


class RunningServer:
    """The server's application in a thread of this process, so that tests can look into it.

    Keyword arguments are those of ``ServerOptions.from_kwargs`` (engine and server options together). With ``llm`` an
    engine that runs already is served, and is left running at the end.
    """

    def __init__(self, llm: AsyncLLM | None = None, **options: Any) -> None:
        engine = {} if llm is not None else SMALL
        self.options = ServerOptions.from_kwargs(**{"port": 0, **engine, **options})
        self._own = llm is None
        self.serving: Serving = make_serving(self.options, llm)
        self._server = uvicorn.Server(uvicorn_config(self.serving))
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(1024)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self.loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            task = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not task.done():
                await asyncio.sleep(0.01)
            self._started.set()
            await task

        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(main())

    def close(self) -> None:
        """Stop serving, and the engine unless it was given."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self._own:
            self.serving.llm.shutdown()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def client(self, **options: Any) -> httpx.Client:
        """An httpx client of the server."""
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine function in the server's event loop and give its result."""

        async def run() -> T:
            return await function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

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
            pieces = []
            while piece := connection.recv(65536):
                pieces.append(piece)
            return b"".join(pieces)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server with default options and the default model."""
    with RunningServer() as running:
        yield running
