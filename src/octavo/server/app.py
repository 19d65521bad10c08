"""The ASGI application: finds the endpoint of a request, lets its handler answer, words failures in its dialect."""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server import health
from octavo.server.call import Call
from octavo.server.endpoints import Endpoint, NestedDialect
from octavo.server.failures import ClientGone, Failure, Kind, failure_of
from octavo.server.serving import Serving

__all__ = ["App", "build_app"]

_log = logging.getLogger(__name__)

# Packages and modules that bring endpoints, each by a function `endpoints(serving)`.
_SOURCES = ("octavo.server.openai", "octavo.server.tgi", "octavo.observability", "octavo.server.page")


def build_app(serving: Serving) -> ASGIApp:
    """The application with the endpoints of every dialect."""
    endpoints = list(health.endpoints(serving))
    for name in _SOURCES:
        try:
            make = getattr(importlib.import_module(name), "endpoints", None)
        except ImportError:
            _log.exception("%s brings no endpoints", name)
            continue
        if make is not None:
            endpoints.extend(make(serving))
    return App(serving, endpoints)


class App:
    """Routes requests to endpoints."""

    def __init__(self, serving: Serving, endpoints: list[Endpoint]) -> None:
        self.serving = serving
        self.endpoints = endpoints
        self._plain = NestedDialect()
        self._fixed: dict[str, dict[str, Endpoint]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Endpoint]]] = []
        patterns: dict[str, dict[str, Endpoint]] = {}
        for endpoint in endpoints:
            table = patterns if "{" in endpoint.path else self._fixed
            table.setdefault(endpoint.path, {})[endpoint.method] = endpoint
        for path, methods in patterns.items():
            self._patterns.append((compile_path(path)[0], methods))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = Call(self.serving, Request(scope, receive, send))
        self.serving.calls.setdefault(call.request_id, set()).add(call)
        endpoint: Endpoint | None = None
        try:
            try:
                endpoint = self._find(scope)
                response = await endpoint.handler(call)
            except ClientGone:
                return
            except Exception as error:
                failure = call.failed(failure_of(error))
                dialect = self._plain if endpoint is None else endpoint.dialect
                response = dialect.failure_response(failure, call)
            response.headers["X-Request-Id"] = call.request_id
            await self._send(response, scope, receive, send)
        finally:
            call.close()
            same = self.serving.calls.get(call.request_id)
            if same is not None:
                same.discard(call)
                if not same:
                    del self.serving.calls[call.request_id]

    async def _send(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await response(scope, receive, send)
        except ClientGone:
            return

    def _find(self, scope: Scope) -> Endpoint:
        path, method = scope["path"], scope["method"]
        methods: dict[str, Endpoint] | None = self._fixed.get(path)
        if methods is None:
            for pattern, candidates in self._patterns:
                match = pattern.match(path)
                if match is not None:
                    scope["path_params"] = _parameters(match)
                    methods = candidates
                    break
        if methods is None:
            raise Failure(Kind.not_found, f"There is no {path}.", code="not_found")
        endpoint = methods.get(method)
        if endpoint is None:
            allow = ", ".join(sorted(methods))
            message = f"{path} takes {allow}, not {method}."
            raise Failure(Kind.method_not_allowed, message, headers={"Allow": allow})
        return endpoint


def _parameters(match: re.Match[str]) -> dict[str, Any]:
    return dict(match.groupdict())
