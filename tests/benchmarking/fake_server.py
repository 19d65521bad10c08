"""A server that answers with events from a script, on a free port of the loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

__all__ = ["FakeServer", "WordTokenizer", "completion", "letters", "stop", "usage"]

Script = Callable[[Mapping[str, Any]], Sequence[bytes]]


class WordTokenizer:
    """One token a word; unlike real ones it knows every word."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]


def completion(text: str, **more: Any) -> bytes:
    """An event of /v1/completions."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, **more}]}).encode() + b"\n\n"


def usage(prompt: int, output: int) -> bytes:
    """The event with the lengths."""
    numbers = {"prompt_tokens": prompt, "completion_tokens": output}
    return b"data: " + json.dumps({"choices": [], "usage": numbers}).encode() + b"\n\n"


def stop() -> bytes:
    return b"data: [DONE]\n\n"


def letters(body: Mapping[str, Any], *, at_once: int = 1) -> list[bytes]:
    """As many words as asked for, so many in each event, then the lengths."""
    count = int(body.get("max_tokens") or body.get("max_completion_tokens") or 1)
    events = [completion(" w" * min(at_once, count - first)) for first in range(0, count, at_once)]
    return [*events, usage(len(str(body.get("prompt", "")).split()), count), stop()]


class FakeServer:
    """Answers POST with the pieces of ``script``, each sent by itself; GET with what ``pages`` holds, as JSON.

    ``bodies`` are the requests' bodies, ``heads`` their heads and ``paths`` their paths, in the order of arrival;
    ``most`` is how many were being answered at once. With ``hang_up`` the connection is closed after each answer
    without having said so.
    """

    def __init__(
        self,
        script: Script = letters,
        *,
        pages: Mapping[str, Any] | None = None,
        status: int = 200,
        media_type: str = "text/event-stream",
        hang_up: bool = False,
        pause: float = 0.0,
    ) -> None:
        self.script = script
        self.pages = {"/v1/models": {"data": [{"id": "fake", "max_model_len": 4096}]}, **(pages or {})}
        self.status, self.media_type, self.hang_up, self.pause = status, media_type, hang_up, pause
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.paths: list[str] = []
        self.running = self.most = self.connections = 0
        self.port = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(20)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stopped = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready.set()
        await self._stopped.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split("\r\n")[0].split(" ")
        length = next((int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length")), 0)
        raw = await reader.readexactly(length)
        if method == "GET":
            known = path in self.pages
            await self._whole(writer, 200 if known else 404, self.pages.get(path, {"error": "unknown"}))
            return True
        body = json.loads(raw)
        self.heads.append(head)
        self.paths.append(path)
        self.bodies.append(body)
        if self.status != 200:
            await self._whole(writer, self.status, {"error": {"message": "no"}})
            return True
        self.running += 1
        self.most = max(self.most, self.running)
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: {self.media_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        for piece in self.script(body):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(self.pause)
        self.running -= 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return not self.hang_up

    @staticmethod
    async def _whole(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
