"""How Text Generation Inference reports errors: status, ``{"error", "error_type"}``, and its fixed texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from octavo.server.endpoints import failure_headers, json_response
from octavo.server.failures import Failure, Kind
from octavo.server.sse import data_event
from octavo.server.tgi.schemas import ErrorResponse

if TYPE_CHECKING:
    from octavo.server.call import Call

__all__ = ["TGI", "TgiDialect", "error_event", "invalid", "template_failure"]

_STATUS = {Kind.invalid: 422, Kind.generation: 424}
_TYPES = {
    Kind.invalid: "validation",
    Kind.not_found: "not_found",
    Kind.method_not_allowed: "method_not_allowed",
    Kind.too_large: "validation",
    Kind.unsupported_media: "validation",
    Kind.overloaded: "overloaded",
    Kind.queue_timeout: "overloaded",
    Kind.timeout: "timeout",
    Kind.unavailable: "healthcheck",
    Kind.generation: "generation",
    Kind.internal: "incomplete_generation",
}
_TEMPLATE = "template"


def invalid(message: str, param: str, code: str = "validation") -> Failure:
    """A request that breaks a rule; the dialect puts "Input validation error: " before the message."""
    return Failure(Kind.invalid, message, param=param, code=code)


def template_failure(message: str) -> Failure:
    """A conversation that the chat template does not take, which TGI tells apart from other invalid requests."""
    return Failure(Kind.invalid, message, param="messages", code=_TEMPLATE)


def _error(failure: Failure, *, stream: bool) -> ErrorResponse:
    kind, message = failure.kind, failure.message
    type_ = _TYPES.get(kind, "unknown")
    if kind is Kind.invalid:
        if failure.code == _TEMPLATE:
            return ErrorResponse(f"Template error: {message}", "template_error")
        message = f"Input validation error: {message}"
    elif kind in (Kind.overloaded, Kind.queue_timeout):
        message = "Model is overloaded"
    elif kind is Kind.generation:
        message = f"Request failed during generation: {message}"
    elif kind is Kind.internal:
        message = "Incomplete generation stream" if stream else "Incomplete generation"
        type_ = "incomplete_generation_stream" if stream else type_
    return ErrorResponse(message, type_)


def error_event(failure: Failure) -> bytes:
    """The event that ends a stream on an error: the status line has gone out, so it stays 200."""
    return data_event(_error(failure, stream=True))


class TgiDialect:
    """Errors as TGI sends them; its 401 has no body."""

    name = "tgi"

    def failure_response(self, failure: Failure, call: Call | None) -> Response:
        """The answer that reports ``failure``."""
        headers = failure_headers(failure)
        if failure.kind is Kind.unauthorized:
            return Response(None, failure.status, headers)
        status = _STATUS.get(failure.kind, failure.status)
        return json_response(_error(failure, stream=False), status, headers)


TGI = TgiDialect()
