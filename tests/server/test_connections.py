"""Connections that are no good: malformed, oversized, cut, slow; the server lives, forgets them, and others go on."""

from __future__ import annotations

import contextlib
import gc
import random
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.server.running import read_all
from tests.server.scripted import ScriptedServer, alphabet, body, finish, generate, post, status_of

GET = b"GET /health HTTP/1.1\r\nHost: t\r\n"
POST = b"POST /generate HTTP/1.1\r\nHost: t\r\n"
CLOSE = b"Connection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    options: dict[str, Any] = {"header_timeout": 0.3, "body_timeout": 0.3, "max_header_bytes": 8192}
    with ScriptedServer(alphabet, max_model_len=4096, num_blocks=1024, **options) as running:
        yield running


def assert_well(server: ScriptedServer) -> None:
    with server.client() as client:
        assert client.post("/generate", json=body(3)).json() == {"generated_text": "abc"}
    server.assert_idle()
    server.until(lambda: server.running.http.connections == 0)


MALFORMED = {
    "not http": b"hello\r\n\r\n",
    "binary": bytes(range(256)) * 4,
    "tls hello": bytes.fromhex("16030100c8010000c40303") + b"\x00" * 200,
    "http/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown method": b"FROB /health HTTP/1.1\r\nHost: t\r\n\r\n",
    "lower-case method": b"get /health HTTP/1.1\r\nHost: t\r\n\r\n",
    "no path": b"GET HTTP/1.1\r\n\r\n",
    "old version": b"GET /health HTTP/9.9\r\nHost: t\r\n\r\n",
    "connect": b"CONNECT other:443 HTTP/1.1\r\nHost: other\r\n\r\n",
    "path outside ascii": b"GET /\xff\xfe HTTP/1.1\r\nHost: t\r\n\r\n",
    "header without colon": GET + b"nonsense\r\n" + CLOSE,
    "space in header name": GET + b"bad name: x\r\n" + CLOSE,
    "control character in header": GET + b"X: a\x00b\r\n" + CLOSE,
    "negative length": POST + b"Content-Length: -5\r\n" + CLOSE,
    "length is no number": POST + b"Content-Length: five\r\n" + CLOSE,
    "length too large for a number": POST + b"Content-Length: 99999999999999999999999\r\n" + CLOSE,
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n" + CLOSE,
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"0\r\n\r\n",
    "coding without an end": POST + b"Transfer-Encoding: gzip\r\n" + CLOSE + b"abc",
    "chunks that are not the last coding": POST + b"Transfer-Encoding: chunked, gzip\r\n" + CLOSE + b"abc",
    "chunk size is no number": POST + b"Transfer-Encoding: chunked\r\n" + CLOSE + b"zz\r\nabc\r\n",
    "chunk longer than its size": POST + b"Transfer-Encoding: chunked\r\n" + CLOSE + b"1\r\nabcdef\r\n0\r\n\r\n",
    "chunk size too large": POST + b"Transfer-Encoding: chunked\r\n" + CLOSE + b"ffffffffffffffffff\r\n",
}


@pytest.mark.parametrize("name", list(MALFORMED))
def test_what_is_not_http_is_refused_and_the_connection_closed(server: ScriptedServer, name: str) -> None:
    answer = server.raw(MALFORMED[name])
    assert 400 <= status_of(answer) < 500
    assert b"connection: close" in answer
    assert_well(server)


@pytest.mark.parametrize("head", [b"gzip, chunked", b"gzip\r\nTransfer-Encoding: chunked"], ids=["list", "lines"])
def test_a_body_in_an_unknown_coding_is_refused_before_it_comes(server: ScriptedServer, head: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(POST + b"Transfer-Encoding: " + head + b"\r\n\r\n")  # and nothing more
        assert status_of(read_all(connection)) == 501
    assert_well(server)


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: t\r\n\r\n",
        GET + b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n",
        GET + b"".join(b"X-%d: a\r\n" % number for number in range(1000)) + b"\r\n",
        GET + b"X-Endless: " + b"a" * 600_000,
    ],
    ids=["path", "one header", "many headers", "no end"],
)
def test_a_head_that_is_too_large_is_431(server: ScriptedServer, data: bytes) -> None:
    with server.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        answer = read_all(connection)
    assert status_of(answer) in (431, 0 if len(data) > 500_000 else 431)
    assert_well(server)


def test_a_head_of_ordinary_size_is_taken(server: ScriptedServer) -> None:
    assert status_of(server.raw(GET + b"Cookie: " + b"a" * 7000 + b"\r\n" + CLOSE)) == 200


@pytest.mark.parametrize(
    "data", [b"G", b"GET /health HTTP/1.1\r\nHost", b"\r\n\r\n\r\n", GET], ids=["byte", "half", "blank", "open"]
)
def test_a_head_that_does_not_come_in_time_is_408(server: ScriptedServer, data: bytes) -> None:
    assert status_of(server.raw(data)) == 408
    assert_well(server)


def test_bytes_that_trickle_do_not_keep_a_connection(server: ScriptedServer) -> None:
    with server.connect() as connection:
        connection.settimeout(0.05)
        answer = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"\r\n")
                with contextlib.suppress(TimeoutError):
                    answer = connection.recv(1000)
                    break
    assert status_of(answer) == 408


def test_a_connection_without_requests_is_closed_after_the_idle_time() -> None:
    with ScriptedServer(idle_timeout=1) as server, server.connect() as silent, server.connect() as used:
        used.sendall(GET + b"\r\n")
        assert status_of(used.recv(1000)) == 200
        assert silent.recv(10) == b""
        assert used.recv(10) == b""


def test_one_connection_too_many_is_refused() -> None:
    with ScriptedServer(max_connections=3) as server:
        held = [server.connect() for _ in range(3)]
        server.until(lambda: server.running.http.connections == 3)
        refused = server.raw(GET + b"\r\n")
        assert status_of(refused) == 503
        assert b"retry-after" in refused
        held.pop().close()
        server.until(lambda: server.running.http.connections == 2)
        assert status_of(server.raw(GET + CLOSE)) == 200
        for connection in held:
            connection.close()


def test_requests_sent_ahead_are_answered_in_order(server: ScriptedServer) -> None:
    requests = b"".join(post("/generate", body(count)) for count in (1, 2, 3)) + GET + CLOSE
    answer = server.raw(requests)
    places = [answer.index(text) for text in (b'"a"', b'"ab"', b'"abc"')]
    assert places == sorted(places)
    assert answer.count(b"HTTP/1.1 200 OK") == 4


def test_too_many_requests_sent_ahead_end_the_connection_but_not_the_answer(server: ScriptedServer) -> None:
    answer = server.raw(post("/generate_stream", body(50)) + (GET + b"\r\n") * 500)
    assert answer.count(b"data:") == 50
    assert answer.count(b"HTTP/1.1 200") == 1
    assert_well(server)


def test_garbage_after_a_request_does_not_get_into_its_answer(server: ScriptedServer) -> None:
    answer = server.raw(post("/generate_stream", body(50)) + b"\x00garbage\r\n\r\n")
    assert answer.count(b"data:") == 50
    assert answer.endswith(b"0\r\n\r\n")
    assert_well(server)


def _mutations(seed: int) -> Iterator[bytes]:
    """Requests with something wrong: bytes changed, cut, doubled, or inserted."""
    chance = random.Random(seed)
    sources = [
        GET + b"\r\n",
        post("/generate", body(3)),
        post("/v1/completions", {"prompt": "x", "max_tokens": 3}),
        POST + b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n",
        b"GET /v1/stream HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    ]
    while True:
        data = bytearray(chance.choice(sources))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at : at + chance.randint(1, 20)]
                case 2:
                    data[at:at] = data[at : at + chance.randint(1, 50)]
                case _:
                    data[at:at] = chance.randbytes(chance.randint(1, 20))
            if not data:
                data = bytearray(b"\r")
        yield bytes(data)


def _abuse(server: ScriptedServer, requests: Iterator[bytes], count: int, chance: random.Random) -> None:
    """Send broken requests on some connections at a time; leave some at once, wait for an answer on others."""
    for _ in range(count // 20):
        batch: list[socket.socket] = []
        for _ in range(20):
            connection = server.connect()
            batch.append(connection)
            with contextlib.suppress(ConnectionError):
                connection.sendall(next(requests))
                if chance.random() < 0.5:
                    connection.shutdown(socket.SHUT_WR)
        for connection in batch:
            if chance.random() < 0.7:
                connection.settimeout(0.05)
                with contextlib.suppress(OSError):
                    connection.recv(100)
            connection.close()


def test_hundreds_of_broken_connections_harm_nobody(server: ScriptedServer) -> None:
    chance = random.Random(5)
    requests = _mutations(7)
    _abuse(server, requests, 100, chance)  # whatever is made once is made now
    assert_well(server)
    gc.collect()
    before = psutil.Process().memory_info().rss
    stream = generate(server, "/generate_stream", 3000, "Connection: close")
    assert stream.recv(12) == b"HTTP/1.1 200"
    _abuse(server, requests, 400, chance)
    answer = finish(stream)
    assert answer.count(b'"token"') == 3000
    text = ("abcdefghijklmnopqrstuvwxyz" * 116)[:3000].encode()
    assert b'"generated_text":"' + text + b'"' in answer
    assert_well(server)
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 30_000_000


def test_a_client_that_leaves_with_requests_sent_ahead_is_noticed() -> None:
    with ScriptedServer(alphabet, held=True) as held:
        with held.connect() as connection:
            connection.sendall(post("/generate", body(100)) * 3)
            held.until(lambda: held.gate.reached == 1)
        held.until(lambda: not held.serving.calls)
        held.gate.open()
        held.assert_idle()
        assert held.gate.reached <= 2


def test_an_upgrade_sent_ahead_does_not_get_into_an_answer(server: ScriptedServer) -> None:
    upgrade = b"GET /v1/stream HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    answer = server.raw(post("/generate_stream", body(50)) + upgrade + key)
    assert answer.count(b"data:") == 50
    assert b"101" not in answer.partition(b"\r\n")[0]
    assert answer.endswith(b"0\r\n\r\n")
    assert_well(server)


def test_a_stream_to_a_client_of_http_1_0_comes_without_chunks_and_ends_with_the_connection() -> None:
    with ScriptedServer(alphabet) as server:
        new = post("/generate_stream", body(8), "Connection: close")
        old = server.raw(new.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, answer = old.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        events = answer.split(b"\n\n")
        assert events.pop() == b""
        assert len(events) == 8
        assert all(event.startswith(b"data:") and b"\r" not in event for event in events)
        sized = server.raw(post("/generate", body(3)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert b"content-length" in sized.lower()
        assert b"connection: close" in sized.lower()
        server.assert_idle()


def test_a_compressed_body_is_refused_by_name() -> None:
    with ScriptedServer(alphabet) as server, server.client() as client:
        for path in ("/generate", "/v1/completions"):
            response = client.post(path, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
            assert response.status_code in (400, 415)
            assert "gzip" in response.text
