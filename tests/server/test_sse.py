"""Streams of events: real status for early failures, events for late ones, comments while nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from octavo.server.app import App
from octavo.server.call import Call
from octavo.server.endpoints import Endpoint, NestedDialect
from octavo.server.failures import Failure, Kind
from octavo.server.sse import data_event, sse_response
from tests.server.running import RunningServer
from tests.server.scripted import ScriptedServer

Events = Callable[[], AsyncIterator[bytes]]


class Streams:
    """Serves whatever events a test wants at /events."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.closed = 0
        self.events: Events

        async def handler(call: Call) -> Any:
            def on_failure(failure: Failure) -> list[bytes]:
                return [data_event({"error": failure.message}), b"data: [DONE]\n\n"]

            return await sse_response(call, self._watched(), on_failure=on_failure, headers={"X-More": "yes"})

        endpoint = Endpoint(method="GET", path="/events", handler=handler, dialect=NestedDialect(), summary="events")
        app = App(server.serving, [endpoint])
        server.running.app._fixed.update(app._fixed)

    async def _watched(self) -> AsyncIterator[bytes]:
        try:
            async for event in self.events():
                yield event
        finally:
            self.closed += 1


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with ScriptedServer(sse_keep_alive=0.2) as server:
        yield server


@pytest.fixture
def streams(running: RunningServer) -> Streams:
    return Streams(running)


@pytest.fixture
def client(running: RunningServer) -> Iterator[httpx.Client]:
    with running.client() as made:
        yield made


def test_events_come_as_they_are_made(streams: Streams, client: httpx.Client) -> None:
    async def events() -> AsyncIterator[bytes]:
        for number in range(3):
            yield data_event({"number": number})

    streams.events = events
    response = client.get("/events")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-more"] == "yes"
    assert response.text == 'data: {"number":0}\n\ndata: {"number":1}\n\ndata: {"number":2}\n\n'
    assert streams.closed == 1


def test_no_events_are_an_empty_stream(streams: Streams, client: httpx.Client) -> None:
    async def events() -> AsyncIterator[bytes]:
        return
        yield

    streams.events = events
    response = client.get("/events")
    assert (response.status_code, response.content) == (200, b"")


def test_a_failure_before_the_first_event_has_its_own_status(streams: Streams, client: httpx.Client) -> None:
    async def events() -> AsyncIterator[bytes]:
        raise Failure(Kind.overloaded, "full", retry_after=3)
        yield b""

    streams.events = events
    response = client.get("/events")
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert streams.closed == 1


def test_a_failure_later_is_an_event(streams: Streams, client: httpx.Client) -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: one\n\n"
        raise Failure(Kind.generation, "broken")

    streams.events = events
    response = client.get("/events")
    assert response.status_code == 200
    assert response.text == 'data: one\n\ndata: {"error":"broken"}\n\ndata: [DONE]\n\n'


def test_an_unforeseen_error_later_is_an_event_without_its_text(
    streams: Streams, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: one\n\n"
        raise KeyError("secret")

    streams.events = events
    response = client.get("/events")
    assert "secret" not in response.text
    assert "internal error" in response.text
    assert "secret" in caplog.text


def test_comments_keep_a_silent_stream_open(streams: Streams, client: httpx.Client) -> None:
    go_on = asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        await go_on.wait()
        go_on.clear()
        yield b"data: one\n\n"
        await go_on.wait()
        yield b"data: two\n\n"

    streams.events = events
    with client.stream("GET", "/events") as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines) == ": keep-alive"
        assert next(lines) == ": keep-alive"
        streams.server.loop.call_soon_threadsafe(go_on.set)
        assert next(line for line in lines if line != ": keep-alive") == "data: one"
        assert next(lines) == ": keep-alive"
        streams.server.loop.call_soon_threadsafe(go_on.set)
        assert [line for line in lines if line != ": keep-alive"] == ["data: two"]
    assert streams.closed == 1


@pytest.mark.parametrize("after", [0, 1])
def test_the_events_are_closed_when_the_client_goes(streams: Streams, after: int) -> None:
    async def events() -> AsyncIterator[bytes]:
        for _ in range(after):
            yield b"data: one\n\n"
        await asyncio.Event().wait()

    streams.events = events
    with streams.server.connect() as connection:
        connection.sendall(b"GET /events HTTP/1.1\r\nHost: t\r\n\r\n")
        if after:
            assert connection.recv(12) == b"HTTP/1.1 200"
        streams.server.until(lambda: len(streams.server.serving.calls) == 1)
    streams.server.until(lambda: streams.closed == 1)
    streams.server.until(lambda: not streams.server.serving.calls)
