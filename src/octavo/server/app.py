"""The ASGI application: finds the endpoint of a request, lets its handler answer, words failures in its dialect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Message, Receive, Scope, Send

from octavo.observability.logs import bind
from octavo.server import control, docs_page, health, openai, openapi, page, tgi
from octavo.server.access import report
from octavo.server.call import Call
from octavo.server.connections import WRITE
from octavo.server.cors import Cors
from octavo.server.endpoints import Dialect, Endpoint, NestedDialect
from octavo.server.failures import ClientGone, Failure, Kind
from octavo.server.limits import Admission
from octavo.server.security import KeyRing

if TYPE_CHECKING:
    from octavo.server.serving import Serving

__all__ = ["App", "build_app"]

_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})


def build_app(serving: Serving) -> App:
    """The application with the endpoints of every dialect."""
    sources = (health, control, page, openai, tgi)
    endpoints = [endpoint for source in sources for endpoint in source.endpoints(serving)]
    endpoints.extend(docs_page.endpoints(serving, endpoints))
    endpoints.extend(openapi.endpoints(endpoints, serving))
    return App(serving, endpoints)


class Session(Protocol):
    """A connection that outlives its requests (a WebSocket), to be told when the server is going to end."""

    def drain(self) -> None:
        """Take no more requests, and close when none runs."""
        ...


class App:
    """Routes requests to endpoints: keys, limits and refusals come before a handler, words and records after it.

    ``admission`` counts the calls that generate, ``keys`` checks API keys, ``sockets`` are the open WebSockets.
    """

    def __init__(self, serving: Serving, endpoints: list[Endpoint]) -> None:
        self.serving = serving
        self.endpoints = endpoints
        options = serving.options
        self.keys = KeyRing.from_options(options)
        self.admission = Admission(options.max_concurrent_requests, options.max_concurrent_per_key)
        self.sockets: set[Session] = set()
        self._cors = Cors(options.cors_allow_origins)
        self._plain = NestedDialect()
        self._page = Endpoint(
            method="GET", path="/", handler=page.index, dialect=self._plain, summary="The page", guarded=False
        )
        self._fixed: dict[str, dict[str, Endpoint]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Endpoint]]] = []
        patterns: dict[str, dict[str, Endpoint]] = {}
        for endpoint in endpoints:
            table = patterns if "{" in endpoint.path else self._fixed
            methods = table.setdefault(endpoint.path, {})
            if endpoint.method in methods:
                raise ValueError(f"{endpoint.method} {endpoint.path} has two endpoints")
            methods[endpoint.method] = endpoint
        for path, methods in patterns.items():
            self._patterns.append((compile_path(path)[0], methods))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "websocket":
            from octavo.server.websocket import serve_socket

            await serve_socket(self, scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self.serving, Request(scope, receive))
        sender = _Sender(call, send, scope.get(WRITE))
        endpoint: Endpoint | None = None
        dialect: Dialect = self._plain
        admitted = False
        bind(call.request_id)
        with self.registered(call):
            try:
                try:
                    methods = self._find(scope, call)
                    endpoint = None if methods is None else _choose(methods, scope["method"])
                    if methods:
                        dialect = (endpoint or next(iter(methods.values()))).dialect
                    response = await self._before(call, scope, endpoint, methods)
                    if response is None:
                        assert endpoint is not None
                        if endpoint.generates:
                            self.admit(call.tenant)
                            admitted = True
                            response = await call.until_gone(endpoint.handler(call))
                        else:
                            response = await endpoint.handler(call)
                except ClientGone:
                    raise
                except Exception as error:
                    response = dialect.failure_response(call.failed(error), call)
                self._add_headers(call, response)
                await response(scope, receive, sender)
            except ClientGone:
                sender.status = 499  # what nginx calls it, and what no client sees
            finally:
                if admitted:
                    self.admission.leave(call.tenant)
                call.close()
                route = "none" if endpoint is None else endpoint.path
                report(call, scope["method"], scope["path"], route, sender.status, sender.size)

    async def _before(
        self, call: Call, scope: Scope, endpoint: Endpoint | None, methods: Mapping[str, Endpoint] | None
    ) -> Response | None:
        """What comes before the handler: preflights, the key, refusals, the body."""
        method, path = scope["method"], scope["path"]
        if method == "OPTIONS":
            preflight = self._cors.preflight(call.request.headers)
            if preflight is not None:
                return preflight
        if endpoint is None or endpoint.guarded:
            call.tenant = self.keys.check(call.request.headers)
        if methods is None:
            raise Failure(Kind.not_found, f"There is no {_shown(path)}.", code="not_found")
        if endpoint is None:
            allow = ", ".join(_allowed(methods))
            if method == "OPTIONS":
                return Response(status_code=204, headers={"Allow": allow})
            message = f"{_shown(path)} takes {allow}, not {_shown(method)}."
            raise Failure(Kind.method_not_allowed, message, headers={"Allow": allow})
        if endpoint.generates and self.serving.draining:
            raise draining()
        if method not in _WITHOUT_BODY:
            await call.body()
        return None

    def admit(self, tenant: str | None) -> None:
        """Take a place among the calls that generate (``admission.leave`` gives it back), or raise a Failure."""
        if self.serving.draining:
            raise draining()
        self.admission.enter(tenant)

    @contextmanager
    def registered(self, call: Call) -> Iterator[None]:
        """Have a call among those that are being answered, where cancelling and draining find it."""
        calls = self.serving.calls.setdefault(call.request_id, set())
        calls.add(call)
        try:
            yield
        finally:
            calls.discard(call)
            if not calls:
                del self.serving.calls[call.request_id]

    @contextmanager
    def answering(self, call: Call, route: str) -> Iterator[None]:
        """What every generating request gets, for those that are not an HTTP request: a place, and a record at the end.

        A Failure when there is no place. Failures that end the call are to be given to ``call.failed``.
        """
        self.admit(call.tenant)
        try:
            with self.registered(call):
                yield
        finally:
            self.admission.leave(call.tenant)
            failure = call.record.failure
            status = 499 if call.gone else 200 if failure is None else failure.status
            report(call, "WS", route, route, status, 0)

    def _find(self, scope: Scope, call: Call) -> Mapping[str, Endpoint] | None:
        """The endpoints of a path by method, None when there are none."""
        path: str = scope["path"]
        found = self._fixed.get(path)
        if found is not None:
            if path == "/" and page.wants_page(call.request.headers):
                return {**found, "GET": self._page}
            return found
        for pattern, candidates in self._patterns:
            match = pattern.match(path)
            if match is not None:
                scope["path_params"] = match.groupdict()
                return candidates
        return None

    def _add_headers(self, call: Call, response: Response) -> None:
        headers = response.raw_headers
        headers.append((b"x-request-id", call.request_id.encode()))
        if self.serving.draining:
            headers.append((b"connection", b"close"))
        self._cors.add(call.request.headers, headers)


class _Sender:
    """Sends what it is given, and remembers the status and how many bytes it was."""

    __slots__ = ("_call", "_send", "_write", "size", "status")

    def __init__(self, call: Call, send: Send, write: Callable[[bytes], bool] | None) -> None:
        self._call = call
        self._send = send
        self._write = write
        self.status = 500
        self.size = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.size += len(message.get("body", b""))
            if not message.get("more_body", False):
                self._call.answered = True
        await self._send(message)

    def write(self, body: bytes) -> bool:
        """Send a piece of an answer that has begun at once; false when that takes an awaited call."""
        if self._write is None or not self._write(body):
            return False
        self.size += len(body)
        return True


def draining() -> Failure:
    """What a request gets that comes when the server is about to end, or still runs when it does."""
    return Failure(Kind.unavailable, "The server is shutting down.", code="draining", retry_after=1)


def _choose(methods: Mapping[str, Endpoint], method: str) -> Endpoint | None:
    return methods.get("GET" if method == "HEAD" else method)


def _allowed(methods: Mapping[str, Endpoint]) -> list[str]:
    more = {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())
    return sorted({*methods, *more})


def _shown(text: str) -> str:
    """Text of a client as a message may show it."""
    return text if len(text) <= 200 else f"{text[:200]}..."
