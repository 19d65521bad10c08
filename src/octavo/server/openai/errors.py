"""Errors in OpenAI's nested shape, worded as vLLM does: the code is the HTTP status, a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct
from starlette.responses import Response

from octavo.server.endpoints import failure_headers, json_response
from octavo.server.failures import Failure, Kind, failure_of
from octavo.server.sse import data_event

if TYPE_CHECKING:
    from octavo.server.call import Call

__all__ = ["DONE", "OPENAI", "ErrorBody", "ErrorDetail", "OpenAIDialect", "error_body", "error_events", "read_body"]

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_LONGEST_NAME = 200  # of a field that is repeated to the client
_LONGEST_MESSAGE = 1000

_SCHEMA = "schema"  # the code of a failure of the body itself: not JSON, or a field of another type

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ErrorDetail(Struct):
    """What went wrong; ``param`` names the field at fault, ``code`` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(Struct):
    """The body of every answer that is an error, and the data of an event that ends a stream with one."""

    error: ErrorDetail


def _status(failure: Failure) -> int:
    # vLLM checks the content type together with the body, and reports both alike.
    return 400 if failure.kind is Kind.unsupported_media else failure.status


def error_body(failure: Failure) -> ErrorBody:
    """The body that reports a failure."""
    status = _status(failure)
    message, param = failure.message, failure.param
    type_ = _TYPES.get(status, "APIError")
    if failure.code in (_SCHEMA, "json") or failure.kind is Kind.unsupported_media:
        type_ = "Bad Request"
        message = f"1 validation error: {message}"
        param = "body" if param is None else f"body.{param}"
    return ErrorBody(ErrorDetail(message, type_, param, status))


def error_events(failure: Failure) -> bytes:
    """How a stream ends on a failure: the status line has gone out, so the error is an event, and the end is marked."""
    return data_event(error_body(failure)) + DONE


class OpenAIDialect:
    """Errors as the clients of OpenAI and vLLM read them."""

    name = "openai"

    def failure_response(self, failure: Failure, call: Call | None) -> Response:
        """The answer that reports ``failure``."""
        return json_response(error_body(failure), _status(failure), failure_headers(failure))


OPENAI = OpenAIDialect()


async def read_body(call: Call, type_: type[T]) -> T:
    """The body of a call; what is not JSON, of a wrong type or an unknown field is told apart from a wrong value."""
    try:
        return await call.read(type_)
    except msgspec.ValidationError as error:
        failure = failure_of(error)
        param = None if failure.param is None else failure.param[:_LONGEST_NAME]
        if str(error).startswith("Object contains unknown field"):
            message = f"{param} is not a parameter this server knows: see the table of parameters in its docs"
            raise Failure(Kind.invalid, message, param=param, code="unknown_field") from None
        raise Failure(Kind.invalid, failure.message[:_LONGEST_MESSAGE], param=param, code=_SCHEMA) from None
    except RecursionError:
        raise Failure(Kind.invalid, "The body is nested too deeply.", code=_SCHEMA) from None
