"""What a route is: method, path, handler, the dialect of its errors, and what /openapi.json says about it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.responses import Response

from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from octavo.server.call import Call

__all__ = [
    "Dialect",
    "Endpoint",
    "Handler",
    "NestedDialect",
    "failure_headers",
    "json_response",
    "long_json_response",
]

# Items of an answer that take a millisecond or so to make and encode.
_PIECE = 4096

Handler = Callable[["Call"], Awaitable[Response]]


class Dialect(Protocol):
    """How one family of clients wants errors to look."""

    @property
    def name(self) -> str:
        """Short name, for logs and metrics."""
        ...

    def failure_response(self, failure: Failure, call: Call | None) -> Response:
        """The answer that reports ``failure``; ``call`` is None when the request was not even read."""
        ...


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One route.

    ``path`` may hold ``{name}`` parts, which match up to the next slash, or ``{name:path}``, which match the rest.
    ``body`` and ``answer`` are msgspec types (``answer`` may be a media type instead) for the documentation; the
    handler decodes the body itself with ``call.read``. ``guarded`` routes need an API key when keys are configured;
    routes with ``generates`` count against the limits of concurrency.
    """

    method: str
    path: str
    handler: Handler
    dialect: Dialect
    summary: str
    body: Any = None
    answer: Any = None
    guarded: bool = True
    generates: bool = False


_encoder = msgspec.json.Encoder()


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer of msgspec structs or plain data as JSON."""
    return Response(_encoder.encode(content), status, headers, "application/json")


async def long_json_response(make: Callable[[], Any], items: int) -> Response:
    """An answer of msgspec structs or lists with so many items.

    Many are made and encoded in a worker thread, piece by piece: two million characters, token by token with their
    texts, would hold up the event loop for seconds, and encoded at once everybody for a tenth of a second.
    """
    if items <= _PIECE:
        return json_response(make())
    return Response(await asyncio.to_thread(lambda: _in_pieces(make())), 200, None, "application/json")


def _in_pieces(content: Any) -> bytes:
    """What the encoder would make of it; between two pieces of a list whoever waits for the interpreter gets a turn."""
    if isinstance(content, list) and len(content) > _PIECE:
        starts = range(0, len(content), _PIECE)
        return b"[" + b",".join([_encoder.encode(content[at : at + _PIECE])[1:-1] for at in starts]) + b"]"
    if isinstance(content, msgspec.Struct):
        values = [(field.encode_name, getattr(content, field.name)) for field in msgspec.structs.fields(content)]
        return b"{" + b",".join([_encoder.encode(name) + b":" + _in_pieces(value) for name, value in values]) + b"}"
    return _encoder.encode(content)


def failure_headers(failure: Failure) -> dict[str, str]:
    """The headers of a failure: its own, Retry-After in whole seconds, and what 401 has to bring."""
    headers = dict(failure.headers)
    if failure.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(failure.retry_after)))
    if failure.kind is Kind.unauthorized:
        headers.setdefault("WWW-Authenticate", "Bearer")
    return headers


_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class NestedDialect:
    """Errors in OpenAI's nested shape as vLLM words it, for every route that has no dialect of its own."""

    name = "plain"

    def failure_response(self, failure: Failure, call: Call | None) -> Response:
        """``{"error": {"message", "type", "param", "code"}}``, the code being the HTTP status."""
        error = {
            "message": failure.message,
            "type": _TYPES.get(failure.status, "APIError"),
            "param": failure.param,
            "code": failure.status,
        }
        return json_response({"error": error}, failure.status, failure_headers(failure))
