"""Requests no server should be given: malformed, oversized, slow and cut ones, and what may be answered to each."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from http_client import Address

__all__ = ["BadRequest", "Outcome", "bad_bodies", "bad_requests", "send"]

_MEBIBYTE = 1 << 20
_LONG = 0.4  # seconds a slow client takes between its pieces
_GOOD_BODY = json.dumps({"prompt": "Hello", "max_tokens": 2, "temperature": 0}).encode()

# The answers with which a server may turn a bad request away; 0: the connection closed without one.
_REFUSALS = frozenset({0, 400, 404, 405, 408, 411, 413, 414, 415, 417, 422, 426, 429, 431, 501, 505})


@dataclass(frozen=True, slots=True)
class BadRequest:
    """Bytes to send, piece by piece with ``pause`` seconds between; then the client reads, or cuts the connection.

    ``statuses`` are those it may get. ``typed``: the answer's body must be JSON that names the error.
    """

    name: str
    pieces: tuple[bytes, ...]
    pause: float = 0.0
    statuses: frozenset[int] = _REFUSALS
    cut: bool = False
    half_close: bool = False
    typed: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The status that came (0: none), and what is wrong with it (None: nothing)."""

    name: str
    status: int
    wrong: str | None


def _post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """A request with a body; ``length`` is what it says of the body's length."""
    size = len(body) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {size}", *headers]
    if not any(header.lower().startswith("content-type") for header in headers):
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _raw(*lines: str, body: bytes = b"") -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


# --- bodies -----------------------------------------------------------------------------------------------------------

_PROMPT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}
_TGI = ("/generate", "/generate_stream", "/")


def bad_bodies(chance: random.Random) -> list[tuple[str, str, bytes]]:
    """Name, path and body of requests that must be refused with a typed error of the 4xx kind."""
    found: list[tuple[str, str, bytes]] = []
    paths = (*_PROMPT, *_TGI, "/tokenize", "/detokenize", "/chat_tokenize")
    for path in paths:
        for name, body in _not_json(chance):
            found.append((f"{name} to {path}", path, body))
    for path, good in _PROMPT.items():
        for field, values in _WRONG_OPENAI.items():
            for value in values:
                found.append((f"{path} {field} {_short(value)}", path, _encode(good | {field: value})))
    for field, values in _WRONG_TGI.items():
        for value in values:
            path = chance.choice(_TGI)
            wrong: dict[str, Any] = {"inputs": "Hi", "parameters": {field: value}}
            found.append((f"{path} {field} {_short(value)}", path, _encode(wrong)))
    for value in (None, 5, [], {}, "", ["a"], "word " * 300_000):
        found.append((f"/generate inputs {_short(value)}", "/generate", _encode({"inputs": value})))
    for value in (5, {}, None, [None], [[1.5]], [-1], [10**12], [1 << 70], [[]], "word " * 300_000, [["a"]]):
        found.append((f"prompt {_short(value)}", "/v1/completions", _encode({"prompt": value, "max_tokens": 1})))
    for value in _WRONG_MESSAGES:
        wrong = {"messages": value, "max_tokens": 1}
        found.append((f"messages {_short(value)}", "/v1/chat/completions", _encode(wrong)))
    return found


def _not_json(chance: random.Random) -> list[tuple[str, bytes]]:
    return [
        ("nothing", b""),
        ("half a JSON text", b'{"prompt": "Hel'),
        ("random bytes", chance.randbytes(chance.randrange(1, 500))),
        ("an array", b"[1, 2]"),
        ("a number", b"17"),
        ("null", b"null"),
        ("deep arrays", b"[" * 100_000),
        ("deep objects", b'{"prompt":' * 20_000),
        ("invalid UTF-8", b'{"prompt": "\xff\xfe", "inputs": "\xff"}'),
        ("trailing words", _GOOD_BODY + b" and more"),
        ("a zero byte", b'{"prompt": "a\x00b"}'),
        ("NaN", b'{"prompt": "Hi", "inputs": "Hi", "temperature": NaN}'),
        ("an unknown field", b'{"prompt": "Hi", "inputs": "Hi", "messages": [], "no_such_field": 1}'),
    ]


_ANY_NUMBER: tuple[Any, ...] = ("x", [], {}, True, 1e400, 10**40)
_WRONG_OPENAI: dict[str, tuple[Any, ...]] = {
    "max_tokens": (-1, 1.5, 10**12, "x", [], {}),
    "temperature": (-1, 1e9, "hot", [], {}),
    "top_p": (-0.1, 1.1, 0, "x", []),
    "top_k": (-2, 1.5, "x", 10**12),
    "min_p": (-0.1, 1.1, "x"),
    "n": (0, -1, 10**9, "x", 1.5),
    "seed": ("x", 1.5, 1 << 80),
    "stop": (5, {}, [5], ["x"] * 1000, "s" * 100_000),
    "presence_penalty": (-3, 3, "x"),
    "frequency_penalty": (-3, 3, "x"),
    "repetition_penalty": (0, -1, "x"),
    "logit_bias": (5, {"x": 1}, {"1": "x"}, {"999999999": 1}),
    "logprobs": ("x", -5, 10**6, []),
    "stream": ("x", 5, []),
    "stream_options": (5, {"include_usage": True}, []),
    "model": (5, [], "no-such-model"),
    "user": (5, []),
    "best_of": (0, -1, "x"),
    "priority": ("x", 1.5, 1 << 80),
    "ignore_eos": ("x", 5),
    "stop_token_ids": ("x", [-1], ["x"], 5),
    "min_tokens": (-1, "x", 10**12),
    "allowed_token_ids": ([], [-5], "x", [10**9]),
    "response_format": (5, {"type": "no-such-type"}),
    "truncate_prompt_tokens": (0, -5, "x"),
}
_WRONG_TGI: dict[str, tuple[Any, ...]] = {
    "best_of": (0, -1, 1000, "x"),
    "temperature": (0, -1, "x"),
    "repetition_penalty": (0, -1, "x"),
    "frequency_penalty": (-3, 3, "x"),
    "top_k": (0, -1, "x"),
    "top_p": (0, 1, 2, "x"),
    "typical_p": (0, 1, 2, "x"),
    "max_new_tokens": (0, -1, "x", 10**12),
    "stop": (["x"] * 50, 5, [5]),
    "truncate": (0, -1, "x"),
    "seed": (-1, "x", 1 << 80),
    "top_n_tokens": (-1, 6, "x"),
    "watermark": (5, "x"),
    "details": (5, "x"),
    "no_such_parameter": (1,),
}
_WRONG_MESSAGES: tuple[Any, ...] = (
    None,
    5,
    [],
    "Hi",
    [5],
    [{}],
    [{"role": "user"}],
    [{"content": "Hi"}],
    [{"role": 5, "content": "Hi"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "no-such-type"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}],
    [{"role": "user", "content": "word " * 300_000}],
)


def _encode(body: Any) -> bytes:
    return json.dumps(body).encode()


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:30]}... ({len(text)} characters)"


# --- connections ------------------------------------------------------------------------------------------------------


def _bad(name: str, *pieces: bytes, **more: Any) -> BadRequest:
    return BadRequest(name, pieces, **more)


def _bad_heads() -> Iterator[BadRequest]:
    """Heads that are not HTTP's."""
    yield _bad("connect and close", cut=True)
    yield _bad("TLS hello", bytes.fromhex("16030100c8010000c40303") + bytes(190), half_close=True)
    yield _bad("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40), half_close=True)
    yield _bad("no version", b"GET /health\r\n\r\n", statuses=_REFUSALS | {200}, half_close=True)
    yield _bad("version 9.9", _raw("GET /health HTTP/9.9", "Host: x"), half_close=True)
    yield _bad("method of no RFC", _raw("BREW /health HTTP/1.1", "Host: x", "Connection: close"))
    yield _bad("lower-case method", _raw("get /health HTTP/1.1", "Host: x", "Connection: close"))
    yield _bad("TRACE", _raw("TRACE / HTTP/1.1", "Host: x", "Connection: close"))
    yield _bad("CONNECT", _raw("CONNECT 127.0.0.1:1 HTTP/1.1", "Host: x", "Connection: close"), half_close=True)
    yield _bad("header without colon", _raw("GET /health HTTP/1.1", "Host: x", "nonsense"), half_close=True)
    yield _bad("zero byte in a header", b"GET /health HTTP/1.1\r\nHost: x\r\nA: a\x00b\r\n\r\n", half_close=True)
    yield _bad("space before the colon", _raw("GET /x HTTP/1.1", "Host: x", "A : b", "Connection: close"))
    yield _bad("control bytes in the path", b"GET /\x01\x02\x7f HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    yield _bad("bad percent escapes", _raw("GET /%zz%ff%00/%2e%2e HTTP/1.1", "Host: x", "Connection: close"))
    yield _bad("path above the root", _raw("GET /ui/../../../../etc/passwd HTTP/1.1", "Host: x", "Connection: close"))
    yield _bad(
        "escaped path above the root",
        _raw("GET /ui/..%2f..%2f..%2fetc%2fpasswd HTTP/1.1", "Host: x", "Connection: close"),
    )
    yield _bad("a path of 100 kB", _raw("GET /" + "a" * 100_000 + " HTTP/1.1", "Host: x", "Connection: close"))
    yield _bad("a header of 1 MB", _raw("GET /no HTTP/1.1", "Host: x", "A: " + "a" * _MEBIBYTE, "Connection: close"))
    yield _bad("5,000 headers", _raw("GET /no HTTP/1.1", "Host: x", *["A: b"] * 5000, "Connection: close"))
    yield _bad("a head without end", b"GET /no HTTP/1.1\r\n" + b"A: b\r\n" * 50, half_close=True)


def _lying_lengths() -> Iterator[BadRequest]:
    """Lengths and framings that lie."""
    for length in ("-1", "abc", "1e3", "99999999999999999999", "0x10", "+5", "5, 6"):
        yield _bad(
            f"Content-Length {length}",
            _raw(
                "POST /v1/completions HTTP/1.1",
                "Host: x",
                f"Content-Length: {length}",
                "Connection: close",
                body=_GOOD_BODY,
            ),
            half_close=True,
        )
    yield _bad(
        "two lengths",
        _raw(
            "POST /v1/completions HTTP/1.1",
            "Host: x",
            "Content-Length: 5",
            "Content-Length: 50",
            "Connection: close",
            body=_GOOD_BODY,
        ),
        half_close=True,
    )
    yield _bad(
        "a length and chunks",
        _raw(
            "POST /v1/completions HTTP/1.1",
            "Host: x",
            "Content-Length: 5",
            "Transfer-Encoding: chunked",
            "Connection: close",
            body=b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        ),
        half_close=True,
    )
    for size in ("zz", "-5", "FFFFFFFFFFFFFFFF", "1" * 200):
        yield _bad(
            f"chunk of size {size[:20]}",
            _raw(
                "POST /v1/completions HTTP/1.1",
                "Host: x",
                "Transfer-Encoding: chunked",
                "Connection: close",
                body=f"{size}\r\nabc\r\n".encode(),
            ),
            half_close=True,
        )
    yield _bad(
        "unknown transfer coding",
        _raw("POST /v1/completions HTTP/1.1", "Host: x", "Transfer-Encoding: gzip", "Connection: close", body=b"abc"),
        half_close=True,
    )
    yield _bad(
        "a body of no length",
        _raw("POST /v1/completions HTTP/1.1", "Host: x", "Connection: close", body=_GOOD_BODY),
        half_close=True,
    )


def _too_much(max_body_bytes: int) -> Iterator[BadRequest]:
    """Bodies that are too large, or are said to be."""
    big = b'{"prompt": "' + b"a" * (max_body_bytes + 1000) + b'"}'
    yield _bad("a body over the limit", _post("/v1/completions", big), statuses=frozenset({0, 413}))
    yield _bad(
        "a huge length and no body",
        _post("/v1/completions", b"", length=10**12),
        statuses=frozenset({0, 413}),
        half_close=True,
    )
    chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    chunks = [chunk] * (max_body_bytes // 65536 + 2)
    yield _bad(
        "chunks over the limit",
        _raw(
            "POST /generate HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            "Transfer-Encoding: chunked",
            "Connection: close",
        ),
        *chunks,
        statuses=frozenset({0, 413}),
    )
    yield _bad(
        "100-continue for too much",
        _post("/v1/completions", b"", "Expect: 100-continue", length=10**10),
        statuses=frozenset({0, 100, 413, 417}),
        half_close=True,
    )


def _wrong_kinds() -> Iterator[BadRequest]:
    """Media types, methods and paths there are none of."""
    for kind in (
        "text/plain",
        "application/xml",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "a" * 1000,
        "\x80\xff",
    ):
        yield _bad(
            f"Content-Type {kind[:40]!r}", _post("/v1/completions", _GOOD_BODY, f"Content-Type: {kind}"), typed=True
        )
    yield _bad(
        "a body said to be gzip",
        _post("/v1/completions", _GOOD_BODY, "Content-Encoding: gzip"),
        statuses=_REFUSALS | {200},
    )
    yield _bad(
        "GET where POST is due", _raw("GET /v1/completions HTTP/1.1", "Host: x", "Connection: close"), typed=True
    )
    yield _bad("DELETE", _raw("DELETE /v1/models HTTP/1.1", "Host: x", "Connection: close"), typed=True)
    yield _bad("no such path", _raw("GET /no/such/path HTTP/1.1", "Host: x", "Connection: close"), typed=True)
    yield _bad("no such model", _raw("GET /v1/models/no%2Fsuch HTTP/1.1", "Host: x", "Connection: close"), typed=True)


def _bad_sockets() -> Iterator[BadRequest]:
    """WebSocket handshakes and frames that are wrong."""
    upgrade = [
        "GET /v1/stream HTTP/1.1",
        "Host: x",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    ]
    anything = _REFUSALS | {101}
    yield _bad("WebSocket elsewhere", _raw("GET /v1/completions HTTP/1.1", *upgrade[1:]), statuses=_REFUSALS | {403})
    yield _bad("WebSocket without a key", _raw(*upgrade[:-1]), statuses=anything, half_close=True)
    yield _bad(
        "WebSocket version 99",
        _raw(*upgrade[:-2], "Sec-WebSocket-Version: 99", upgrade[-1]),
        statuses=anything,
        half_close=True,
    )
    frames = {
        "an unmasked frame": b"\x81\x02{}",
        "a reserved opcode": b"\x83\x80abcd",
        "a frame of 2^62 bytes": b"\x81\xff" + struct.pack(">Q", 1 << 62) + b"abcd",
        "invalid UTF-8": b"\x81\x82\x00\x00\x00\x00\xff\xfe",
        "half a frame": b"\x81\xfe\x10",
        "a long ping": b"\x89\xfe\x01\x00abcd" + bytes(256),
        "not JSON": b"\x81\x83\x00\x00\x00\x00abc",
        "a fragment without start": b"\x80\x80abcd",
        "binary": b"\x82\x83\x00\x00\x00\x00abc",
        "a close frame of one byte": b"\x88\x81\x00\x00\x00\x00a",
    }
    for name, frame in frames.items():
        yield _bad(f"WebSocket: {name}", _raw(*upgrade), frame, pause=0.02, statuses=anything, half_close=True)
        yield _bad(f"WebSocket cut: {name}", _raw(*upgrade), frame, pause=0.02, statuses=anything, cut=True)


_GOOD_HEAD = _raw(
    "POST /v1/completions HTTP/1.1",
    "Host: x",
    "Content-Type: application/json",
    f"Content-Length: {len(_GOOD_BODY)}",
    "Connection: close",
)


def _slow() -> Iterator[BadRequest]:
    """Clients that take their time."""
    yield _bad("a slow head, cut", *[_GOOD_HEAD[at : at + 20] for at in range(0, 120, 20)], pause=_LONG, cut=True)
    yield _bad(
        "a slow body, cut", _GOOD_HEAD, *[_GOOD_BODY[at : at + 10] for at in range(0, 40, 10)], pause=_LONG, cut=True
    )
    yield _bad(
        "a slow but good request",
        _GOOD_HEAD,
        *[_GOOD_BODY[at : at + 20] for at in range(0, len(_GOOD_BODY), 20)],
        pause=_LONG,
        statuses=frozenset({200}),
    )
    yield _bad("silence, then cut", b"", b"", pause=2.0, cut=True)


def _cut_short() -> Iterator[BadRequest]:
    """Clients that go away in the middle."""
    yield _bad("a body cut short", _GOOD_HEAD + _GOOD_BODY[:20], cut=True)
    yield _bad("a body closed short", _GOOD_HEAD + _GOOD_BODY[:20], half_close=True)
    yield _bad(
        "chunks cut short",
        _raw("POST /generate HTTP/1.1", "Host: x", "Transfer-Encoding: chunked") + b"20\r\nabc",
        cut=True,
    )
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/generate_stream"):
        body = _encode(_good_body(path, 50) | ({"stream": True} if path in _PROMPT else {}))
        for wait in (0.0, 0.05, 0.3):
            yield _bad(f"{path} left after {wait} s", _post(path, body), b"", pause=wait, cut=True)


def _good_body(path: str, tokens: int) -> dict[str, Any]:
    """A request that may be made at ``path``, for that many tokens."""
    if path in _PROMPT:
        return _PROMPT[path] | {"max_tokens": tokens}
    more = {} if path == "/tokenize" else {"parameters": {"max_new_tokens": tokens}}
    return {"inputs": "Tell me about the sea."} | more


def _damaged(chance: random.Random) -> BadRequest:
    """A good request with some bytes changed."""
    path = chance.choice((*_PROMPT, "/generate", "/tokenize"))
    data = bytearray(_post(path, _encode(_good_body(path, 1))))
    for _ in range(chance.randrange(1, 6)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return BadRequest("a damaged request", (bytes(data),), statuses=_REFUSALS | {200}, half_close=True)


def _noise(chance: random.Random) -> BadRequest:
    return BadRequest("noise", (chance.randbytes(chance.randrange(1, 4000)),), half_close=True)


def bad_requests(seed: int, *, max_body_bytes: int = 2_000_000) -> Sequence[Callable[[], BadRequest]]:
    """Makers of bad requests, one for each kind; those with chance in them make another each time."""
    chance = random.Random(seed)
    fixed = [
        _bad(name, _post(path, body), statuses=_REFUSALS - {0, 501}, typed=True)
        for name, path, body in bad_bodies(chance)
    ]
    for group in (
        _bad_heads(),
        _lying_lengths(),
        _too_much(max_body_bytes),
        _wrong_kinds(),
        _bad_sockets(),
        _slow(),
        _cut_short(),
    ):
        fixed.extend(group)
    makers: list[Callable[[], BadRequest]] = [partial(_same, request) for request in fixed]
    return [*makers, *[partial(_damaged, chance)] * 40, *[partial(_noise, chance)] * 10]


def _same(request: BadRequest) -> BadRequest:
    return request


# --- sending ----------------------------------------------------------------------------------------------------------


async def send(address: Address, request: BadRequest, *, timeout: float = 60.0) -> Outcome:
    """Send one and judge what comes back."""
    try:
        async with asyncio.timeout(timeout):
            data = await _exchange(address, request)
    except TimeoutError:
        return Outcome(request.name, 0, f"the connection was still open after {timeout:.0f} s")
    if request.cut or data is None:
        return Outcome(request.name, 0, None)
    return _judge(request, data)


async def _exchange(address: Address, request: BadRequest) -> bytes | None:
    """All that came back; None when the server closed while it was being written to and nothing could be read."""
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    except OSError as error:
        return f"HTTP/1.1 599 cannot connect: {error}\r\n\r\n".encode()
    try:
        for number, piece in enumerate(request.pieces):
            if number and request.pause:
                await asyncio.sleep(request.pause)
            writer.write(piece)
            await writer.drain()
        if request.cut:
            if request.pause:
                await asyncio.sleep(request.pause)
            _cut(writer)
            return None
        if request.half_close:
            writer.write_eof()
        return await reader.read()
    except (ConnectionError, OSError):
        return await _left_over(reader)
    finally:
        writer.close()


async def _left_over(reader: asyncio.StreamReader) -> bytes | None:
    """What had arrived before the connection broke."""
    try:
        return await reader.read() or None
    except OSError:
        return None


def _cut(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, as a process does that dies with data unread."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _judge(request: BadRequest, data: bytes) -> Outcome:
    status = int(data[9:12]) if data.startswith(b"HTTP/1.") and data[9:12].isdigit() else 0
    if data and status == 0:
        return Outcome(request.name, 0, f"an answer that is not HTTP: {data[:100]!r}")
    if status == 101 and 101 in request.statuses:
        return Outcome(request.name, status, None)
    if status not in request.statuses:
        return Outcome(request.name, status, f"status {status}: {_body(data)[:200]!r}")
    if request.typed and not _names_an_error(data):
        return Outcome(request.name, status, f"status {status} without a typed error: {_body(data)[:200]!r}")
    return Outcome(request.name, status, None)


def _body(data: bytes) -> bytes:
    return data.partition(b"\r\n\r\n")[2]


def _names_an_error(data: bytes) -> bool:
    try:
        return bool(json.loads(_body(data))["error"])
    except (ValueError, LookupError, TypeError):
        return False
