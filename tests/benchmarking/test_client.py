"""The client takes any HTTP/1.1 answer as it comes, and never raises for what a server does."""

from __future__ import annotations

import asyncio
import socket

import pytest

from octavo.benchmarking.client import Client, Target
from octavo.errors import ConfigError
from tests.benchmarking.fake_server import FakeServer, letters


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("http://127.0.0.1:8000/", ("http", "127.0.0.1", 8000, "", "127.0.0.1:8000")),
        ("127.0.0.1:81/base/", ("http", "127.0.0.1", 81, "/base", "127.0.0.1:81")),
        ("https://example.com", ("https", "example.com", 443, "", "example.com")),
        ("http://[::1]:9", ("http", "::1", 9, "", "[::1]:9")),
    ],
)
def test_urls_are_read(url: str, read: tuple[object, ...]) -> None:
    target = Target.of(url)
    assert (target.scheme, target.host, target.port, target.base, target.authority) == read


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x/?q=1", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        Target.of(url)


async def test_pieces_come_with_their_times_in_order() -> None:
    events = 0

    def count(number: int) -> None:
        nonlocal events
        events += number

    with FakeServer(pause=0.002) as server:
        async with Client(Target.of(server.url), on_event=count) as client:
            exchange = await client.call("POST", "/v1/completions", b'{"max_tokens": 5}')
    assert exchange.ok
    times = [time for time, _ in exchange.pieces]
    assert exchange.sent <= times[0] <= times[-1] <= exchange.ended
    assert times == sorted(times)
    assert events == 7
    assert exchange.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize(("keep_alive", "connections"), [(True, 1), (False, 3)])
async def test_connections_are_used_again_unless_told_not_to(keep_alive: bool, connections: int) -> None:
    with FakeServer() as server:
        async with Client(Target.of(server.url), keep_alive=keep_alive) as client:
            for _ in range(3):
                assert (await client.call("POST", "/", b"{}")).ok
        assert server.connections == connections


async def test_a_connection_closed_while_idle_costs_no_request() -> None:
    with FakeServer(hang_up=True) as server:
        async with Client(Target.of(server.url)) as client:
            for _ in range(3):
                assert (await client.call("POST", "/", b"{}")).ok
                await asyncio.sleep(0.01)
        assert len(server.bodies) == 3


async def raw(answer: bytes) -> str | None:
    """What is wrong with an answer of these bytes, after which the connection is closed."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server, Client(Target("http", "127.0.0.1", server.sockets[0].getsockname()[1])) as client:
        exchange = await client.call("GET", "/")
        return exchange.fault()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", None),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "closed before"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", "closed before"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 5\r\n\r\nlater", "HTTP 503 later"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"", "closed before"),
    ],
)
async def test_what_is_wrong_with_an_answer_is_said(answer: bytes, said: str | None) -> None:
    fault = await raw(answer)
    assert (fault is None) if said is None else (fault is not None and said in fault)


async def test_nobody_listening_is_an_error_of_the_exchange() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        exchange = await Client(Target("http", "127.0.0.1", taken.getsockname()[1])).call("GET", "/")
    assert exchange.error is not None
    assert "cannot connect" in exchange.error


async def test_an_answer_that_takes_too_long_has_failed() -> None:
    with FakeServer(pause=5.0) as server:
        async with Client(Target.of(server.url)) as client:
            exchange = await client.call("POST", "/", b"{}", timeout=0.2)
    assert exchange.error == "no answer within 0.2 s"


async def test_headers_are_sent() -> None:
    with FakeServer(letters) as server:
        async with Client(Target.of(f"{server.url}/base"), headers=["Authorization: Bearer k"]) as client:
            await client.call("POST", "/v1", b"{}", headers=["X-Request-Id: r1"])
        assert server.paths == ["/base/v1"]
        assert "Authorization: Bearer k\r\n" in server.heads[0]
        assert "X-Request-Id: r1\r\n" in server.heads[0]
