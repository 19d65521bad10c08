"""What can be wrong with one request, before a dialect puts it into its own words and status."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from octavo import errors

__all__ = ["ClientGone", "Failure", "Kind", "failure_of"]

_log = logging.getLogger(__name__)


class Kind(StrEnum):
    """What sort of failure it is; decides the status unless the dialect has another one."""

    invalid = "invalid"
    unauthorized = "unauthorized"
    not_found = "not_found"
    method_not_allowed = "method_not_allowed"
    too_large = "too_large"
    unsupported_media = "unsupported_media"
    overloaded = "overloaded"
    queue_timeout = "queue_timeout"
    timeout = "timeout"
    unavailable = "unavailable"
    generation = "generation"
    internal = "internal"


_STATUS = {
    Kind.invalid: 400,
    Kind.unauthorized: 401,
    Kind.not_found: 404,
    Kind.method_not_allowed: 405,
    Kind.too_large: 413,
    Kind.unsupported_media: 415,
    Kind.overloaded: 429,
    Kind.queue_timeout: 429,
    Kind.timeout: 504,
    Kind.unavailable: 503,
    Kind.generation: 500,
    Kind.internal: 500,
}

_LONGEST_MESSAGE = 1000


class Failure(Exception):
    """One request cannot be answered.

    ``param`` is the field at fault, ``code`` a short detail for programs ("model_not_found", "context_length_exceeded",
    "validation", ...), ``retry_after`` the seconds after which trying again makes sense, ``headers`` are added to the
    answer. ``status`` is the HTTP status of the kind; a dialect may use another.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
        status: int | None = None,
    ) -> None:
        if len(message) > _LONGEST_MESSAGE:  # what a client sent may be in it
            message = f"{message[:_LONGEST_MESSAGE]}..."
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.headers = dict(headers or {})
        self.status = _STATUS[kind] if status is None else status

    def again(self) -> Failure:
        """The same failure to be raised once more: one object raised in several tasks would mix up tracebacks."""
        return Failure(
            self.kind,
            self.message,
            param=self.param,
            code=self.code,
            retry_after=self.retry_after,
            headers=self.headers,
            status=self.status,
        )


class ClientGone(Exception):
    """The client closed its connection: nobody waits for an answer any more."""


# How msgspec words what it refuses: "Expected `int`, got `str` - at `$.max_tokens`",
# "Object contains unknown field `x` - at `$.stream_options`", "Object missing required field `prompt`".
_AT = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `([^`]*)`")


def _of_validation(error: msgspec.DecodeError) -> Failure:
    text = str(error)
    path, field = _AT.search(text), _FIELD.match(text)
    parts = [match.group(1) for match in (path, field) if match is not None]
    param = ".".join(part for part in parts if part) or None
    # The field that is one too many or missing is in the sentence already; the path of a wrong value is not.
    message = _AT.sub("", text)
    if param is not None:
        message = f"{param}: {message}"
    return Failure(Kind.invalid, message, param=param, code="validation")


def failure_of(error: BaseException) -> Failure:
    """The failure an exception stands for. One that was not foreseen is logged, and its text stays inside."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, errors.ParameterError):
        return Failure(Kind.invalid, str(error), param=error.field, code="validation")
    if isinstance(error, errors.CapacityError):
        return Failure(Kind.invalid, str(error), code="context_length_exceeded")
    if isinstance(error, errors.GenerationError):
        return Failure(Kind.generation, str(error), code="generation")
    if isinstance(error, errors.EngineCrashedError):
        return Failure(Kind.generation, str(error), code="engine_crashed")
    if isinstance(error, errors.EngineDeadError):
        return Failure(Kind.unavailable, str(error), code="engine_unavailable", retry_after=5)
    if isinstance(error, msgspec.ValidationError):
        return _of_validation(error)
    if isinstance(error, msgspec.DecodeError):
        return Failure(Kind.invalid, f"The body is not valid JSON: {error}", code="json")
    if isinstance(error, (errors.ConfigError, UnicodeDecodeError)):
        return Failure(Kind.invalid, str(error), code="validation")
    _log.error("a request failed on an internal error", exc_info=error)
    return Failure(Kind.internal, "The server failed on an internal error; its log says more.", code="internal")
