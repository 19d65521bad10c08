"""Each kind of failure in TGI's status, type and text."""

from __future__ import annotations

import msgspec
import pytest

from octavo.errors import CapacityError, EngineDeadError, GenerationError, ParameterError
from octavo.server.failures import Failure, Kind, failure_of
from octavo.server.tgi.dialect import TGI, error_event, template_failure


@pytest.mark.parametrize(
    ("failure", "status", "error_type", "error"),
    [
        (Failure(Kind.invalid, "wrong"), 422, "validation", "Input validation error: wrong"),
        (template_failure("wrong"), 422, "template_error", "Template error: wrong"),
        (Failure(Kind.generation, "lost"), 424, "generation", "Request failed during generation: lost"),
        (Failure(Kind.overloaded, "much"), 429, "overloaded", "Model is overloaded"),
        (Failure(Kind.queue_timeout, "long"), 429, "overloaded", "Model is overloaded"),
        (Failure(Kind.internal, "bug"), 500, "incomplete_generation", "Incomplete generation"),
        (Failure(Kind.unavailable, "down"), 503, "healthcheck", "down"),
        (Failure(Kind.timeout, "long"), 504, "timeout", "long"),
        (Failure(Kind.too_large, "big"), 413, "validation", "big"),
        (Failure(Kind.unsupported_media, "xml"), 415, "validation", "xml"),
        (Failure(Kind.not_found, "no"), 404, "not_found", "no"),
        (Failure(Kind.method_not_allowed, "no"), 405, "method_not_allowed", "no"),
        (failure_of(ParameterError("top_k", 0, "more")), 422, "validation", None),
        (failure_of(CapacityError("never fits")), 422, "validation", None),
        (failure_of(GenerationError("nan")), 424, "generation", None),
        (failure_of(EngineDeadError("gone")), 503, "healthcheck", None),
    ],
)
def test_status_type_and_text(failure: Failure, status: int, error_type: str, error: str | None) -> None:
    response = TGI.failure_response(failure, None)
    assert response.status_code == status
    body = msgspec.json.decode(response.body)
    assert body["error_type"] == error_type
    assert set(body) == {"error", "error_type"}
    if error is not None:
        assert body["error"] == error


def test_a_missing_key_is_answered_without_a_body() -> None:
    response = TGI.failure_response(Failure(Kind.unauthorized, "no key"), None)
    assert (response.status_code, response.body) == (401, b"")


def test_when_to_come_again_is_said() -> None:
    response = TGI.failure_response(Failure(Kind.overloaded, "much", retry_after=1.2), None)
    assert response.headers["retry-after"] == "2"


def test_a_stream_ends_with_an_event() -> None:
    assert error_event(Failure(Kind.generation, "lost")) == (
        b'data: {"error":"Request failed during generation: lost","error_type":"generation"}\n\n'
    )
    assert error_event(Failure(Kind.internal, "bug")) == (
        b'data: {"error":"Incomplete generation stream","error_type":"incomplete_generation_stream"}\n\n'
    )
