"""A client of the WebSocket for tests, and what is compared with it: event streams, an idle engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.server.running import RunningServer

__all__ = ["LONG", "STORY", "Client", "client", "idle", "sse", "text_of"]

STORY = "Once upon a time"
LONG: dict[str, Any] = {"prompt": STORY, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


class Client:
    """A client that sends and takes frames as dictionaries."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, **frame: Any) -> None:
        self.connection.send(json.dumps(frame))

    def take(self, type_: str | None = None) -> dict[str, Any]:
        """The next frame, which must be of this type."""
        frame: dict[str, Any] = json.loads(self.connection.recv(timeout=60))
        assert type_ is None or frame["type"] == type_, frame
        return frame

    def start(self, id_: str, **fields: Any) -> dict[str, Any]:
        """Start a request; its started frame."""
        self.send(type="start", id=id_, **fields)
        return self.take("started")

    def rest(self, id_: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Every delta of the only running request, and its end."""
        deltas = []
        while (frame := self.take())["type"] == "delta":
            assert frame["id"] == id_
            deltas.append(frame)
        assert (frame["type"], frame["id"]) == ("end", id_), frame
        return deltas, frame

    def tokens(self, number: int) -> list[dict[str, Any]]:
        """Deltas until as many tokens have come, none more."""
        deltas: list[dict[str, Any]] = []
        while sum(delta["tokens"] for delta in deltas) < number:
            deltas.append(self.take("delta"))
        assert sum(delta["tokens"] for delta in deltas) == number
        return deltas

    def error(self, id_: str | None = None) -> dict[str, Any]:
        """The error of the next frame, which must be about this request."""
        frame = self.take("error")
        assert frame.get("id") == id_, frame
        assert set(frame["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = frame["error"]
        return error

    def close_code(self) -> int:
        """The code the server closes with; frames before it are passed over."""
        with suppress(ConnectionClosed):
            while True:
                self.connection.recv(timeout=60)
        code = self.connection.protocol.close_code
        assert code is not None
        return code


@contextmanager
def client(server: RunningServer, path: str = "/v1/stream", **options: Any) -> Iterator[Client]:
    url = f"ws://127.0.0.1:{server.port}{path}"
    with connect(url, proxy=None, compression=None, **options) as connection:
        yield Client(connection)


def text_of(deltas: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(delta["text"] for delta in deltas if delta["index"] == index)


def sse(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices in the events of the same request over HTTP."""
    with server.client() as http, http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [choice for event in data[:-1] for choice in json.loads(event)["choices"]]


def idle(server: RunningServer) -> None:
    """Wait until nothing runs, and check that the engine has everything back."""
    server.until(lambda: server.serving.llm.num_running == 0)
    assert server.call(server.serving.llm.check) == []
    assert server.running.app.admission.active == 0
