"""Routes that say how the server is: /health, /ready, /ping, /version, /load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from octavo.server.endpoints import Endpoint, NestedDialect, json_response
from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from octavo.server.call import Call
    from octavo.server.endpoints import Handler
    from octavo.server.serving import Serving

__all__ = ["Load", "Version", "endpoints"]


class Version(msgspec.Struct):
    """The version of the server."""

    version: str


class Load(msgspec.Struct):
    """How many requests the engine has."""

    server_load: int


async def _health(call: Call) -> Response:
    """Asks nothing of the engine, whose last sign of life is known, so that it is answered at once."""
    if not call.serving.service.engine_alive:
        raise Failure(Kind.unavailable, "The engine does not answer.", code="engine_unavailable", retry_after=1)
    return Response(status_code=200)


async def _ready(call: Call) -> Response:
    if call.serving.draining:
        raise Failure(Kind.unavailable, "The server is shutting down.", code="draining", retry_after=1)
    return await _health(call)


async def _version(call: Call) -> Response:
    return json_response(Version(call.serving.version))


async def _load(call: Call) -> Response:
    return json_response(Load(call.serving.service.num_running))


def _open(method: str, path: str, handler: Handler, summary: str) -> Endpoint:
    dialect = NestedDialect()
    return Endpoint(method=method, path=path, handler=handler, dialect=dialect, summary=summary, guarded=False)


def endpoints(serving: Serving) -> list[Endpoint]:
    """The routes of this file."""
    plain = NestedDialect()
    return [
        _open("GET", "/health", _health, "200 while the engine lives, else 503"),
        _open("GET", "/ready", _ready, "200 while new requests are taken, else 503"),
        _open("GET", "/ping", _health, "The same as /health"),
        _open("POST", "/ping", _health, "The same as /health"),
        Endpoint(method="GET", path="/version", handler=_version, dialect=plain, summary="The version", answer=Version),
        Endpoint(
            method="GET", path="/load", handler=_load, dialect=plain, summary="Requests in the engine", answer=Load
        ),
    ]
