"""A server whose engine plays a script, step by step when wanted: what is tested is state, not time."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

from octavo.frontend.async_llm import AsyncLLM
from octavo.observability.metrics import Metrics
from tests.frontend.fakes import Script, ScriptBackend, load_fake, says
from tests.server.running import RunningServer, read_all

__all__ = ["Gate", "ScriptedServer", "alphabet", "body", "generate", "post", "status_of"]


def alphabet(known: Sequence[int], prompt: int) -> int:
    """Every answer is the lower-case alphabet again and again, so that a missing or doubled piece is seen."""
    return ord("a") + (len(known) - prompt) % 26


class Gate:
    """Holds the engine before each of its steps until it is let through; ``reached`` counts steps it came to."""

    def __init__(self, backend: ScriptBackend, *, open: bool) -> None:
        self._semaphore = threading.Semaphore(0)
        self._open = open
        self.reached = 0
        backend.before_step = self._wait

    def _wait(self, step: int) -> None:
        self.reached = step
        if not self._open:
            self._semaphore.acquire()

    def let(self, steps: int = 1) -> None:
        """Let so many steps happen."""
        for _ in range(steps):
            self._semaphore.release()

    def hold(self) -> None:
        """Let no more steps happen."""
        self._open = False

    def open(self) -> None:
        """Let all steps happen from now on."""
        self._open = True
        self._semaphore.release(1000)


class ScriptedServer(RunningServer):
    """Serves a script; with ``held`` no step happens before the gate lets it."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        held: bool = False,
        max_model_len: int = 256,
        num_blocks: int = 256,
        max_num_seqs: int = 16,
        most_unread: int | None = None,
        **options: Any,
    ) -> None:
        backend = ScriptBackend(script or says("hello"), num_blocks=num_blocks, max_model_len=max_model_len)
        self.gate = Gate(backend, open=not held)
        self.backend = backend
        self.metrics = Metrics("scripted")
        llm = AsyncLLM.from_loaded(
            load_fake(backend, max_num_seqs=max_num_seqs), observer=self.metrics, most_unread=most_unread
        )
        self._llm = llm
        super().__init__(llm, **options)

    def close(self) -> None:
        """Stop serving and the engine, wherever its gate has held it."""
        self.gate.open()
        super().close()
        self._llm.shutdown()

    def stats(self) -> Any:
        """The counters of the engine, which must not be held."""
        return asyncio.run_coroutine_threadsafe(self._llm.stats(), self.loop).result(30)

    def assert_idle(self) -> None:
        """Nothing runs, nothing is kept, and no block is in use."""
        self.until(lambda: not self.serving.calls and self._llm.num_running == 0)
        stats = self.stats()
        assert (stats.running, stats.waiting, stats.paused, stats.referenced_blocks) == (0, 0, 0, 0)
        assert asyncio.run_coroutine_threadsafe(self._llm.check(), self.loop).result(30) == []
        assert self.running.app.admission.active == 0


def body(tokens: int = 5, **parameters: Any) -> dict[str, Any]:
    """A request of TGI's for so many tokens."""
    return {"inputs": "Q", "parameters": {"max_new_tokens": tokens, **parameters}}


def post(path: str, content: Any, *headers: str) -> bytes:
    """The bytes of a POST request with a JSON body."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


def generate(server: RunningServer, path: str, tokens: int, *headers: str) -> socket.socket:
    """A connection on which a generation has been asked for."""
    connection = server.connect()
    connection.sendall(post(path, body(tokens), *headers))
    return connection


def status_of(answer: bytes) -> int:
    """The status of a raw answer, 0 when there is none."""
    parts = answer.split(b" ", 2)
    return int(parts[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def finish(connection: socket.socket) -> bytes:
    """Everything that still comes on a connection; closes it."""
    with connection:
        return read_all(connection)
