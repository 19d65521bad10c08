"""Routes that say how the server is: /health, /ready, /ping, /version, /load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from octavo.server.endpoints import Endpoint, NestedDialect, json_response
from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from octavo.server.call import Call
    from octavo.server.serving import Serving

__all__ = ["endpoints"]


class Version(msgspec.Struct):
    """The version of the server."""

    version: str


class Load(msgspec.Struct):
    """How much the server has to do."""

    server_load: int


def _alive(serving: Serving) -> bool:
    """Whether the engine gave a sign of life lately; asks nothing of the engine, so it is answered at once."""
    alive: bool = getattr(serving.llm, "engine_alive", serving.llm.failure is None)
    return alive


async def _health(call: Call) -> Response:
    if not _alive(call.serving):
        raise Failure(Kind.unavailable, "The engine does not answer.", code="engine_unavailable", retry_after=1)
    return Response(status_code=200)


async def _ready(call: Call) -> Response:
    if call.serving.draining:
        raise Failure(Kind.unavailable, "The server is shutting down.", code="draining", retry_after=1)
    return await _health(call)


async def _version(call: Call) -> Response:
    return json_response(Version(call.serving.version))


async def _load(call: Call) -> Response:
    return json_response(Load(call.serving.llm.num_running))


def endpoints(serving: Serving) -> list[Endpoint]:
    """The routes of this file."""
    plain = NestedDialect()
    return [
        Endpoint(
            method="GET",
            path="/health",
            handler=_health,
            dialect=plain,
            summary="200 while the engine lives, else 503",
            guarded=False,
        ),
        Endpoint(
            method="GET",
            path="/ready",
            handler=_ready,
            dialect=plain,
            summary="200 while new requests are taken, else 503",
            guarded=False,
        ),
        Endpoint(method="GET", path="/version", handler=_version, dialect=plain, summary="The version", answer=Version),
        Endpoint(
            method="GET", path="/load", handler=_load, dialect=plain, summary="Requests being answered", answer=Load
        ),
    ]
