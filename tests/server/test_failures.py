"""Exceptions become failures of the right kind, with the field at fault, and nothing internal gets out."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from octavo.errors import (
    CapacityError,
    ConfigError,
    EngineCrashedError,
    EngineDeadError,
    GenerationError,
    ParameterError,
)
from octavo.server.endpoints import NestedDialect, failure_headers
from octavo.server.failures import Failure, Kind, failure_of


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class Body(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    max_tokens: int = 1
    stop: list[str] = []
    stream_options: Inner | None = None


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (ParameterError("top_p", 2, "at most 1"), Kind.invalid, 400),
        (CapacityError("too long", needed=3, available=2), Kind.invalid, 400),
        (ConfigError("no template"), Kind.invalid, 400),
        (GenerationError("not finite"), Kind.generation, 500),
        (EngineCrashedError("three times"), Kind.generation, 500),
        (EngineDeadError("gone"), Kind.unavailable, 503),
    ],
)
def test_errors_of_octavo_keep_their_message(error: Exception, kind: Kind, status: int) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.status, failure.message) == (kind, status, str(error))


def test_a_parameter_error_names_its_field() -> None:
    assert failure_of(ParameterError("top_p", 2, "at most 1")).param == "top_p"


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"prompt": "x", "max_tokens": "y"}', "max_tokens"),
        (b'{"prompt": "x", "wrong": 1}', "wrong"),
        (b'{"max_tokens": 1}', "prompt"),
        (b'{"prompt": "x", "stream_options": {"usage": 1}}', "stream_options.usage"),
        (b'{"prompt": "x", "stop": [1]}', "stop[0]"),
        (b"[]", None),
    ],
)
def test_a_body_of_the_wrong_shape_names_the_field(data: bytes, param: str | None) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(data, type=Body)
    failure = failure_of(caught.value)
    assert (failure.kind, failure.param, failure.code) == (Kind.invalid, param, "validation")
    if param is not None:
        assert failure.message.startswith(f"{param}: ")


@pytest.mark.parametrize("data", [b"", b"{", b'{"prompt": "\xff"}', b"nonsense"])
def test_what_is_not_json_is_invalid(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(data, type=Body)
    assert failure_of(caught.value).kind is Kind.invalid


def test_an_unforeseen_error_is_logged_and_its_text_kept_inside(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        failure = failure_of(KeyError("secret"))
    assert failure.kind is Kind.internal
    assert "secret" not in failure.message
    assert "secret" in caplog.text


def test_a_failure_can_be_raised_again_as_another_object() -> None:
    failure = Failure(Kind.timeout, "slow", param="p", code="c", retry_after=2.5, headers={"A": "b"}, status=408)
    again = failure.again()
    assert again is not failure
    assert vars(again) == vars(failure)


def test_headers_say_when_to_come_back_and_how_to_identify() -> None:
    assert failure_headers(Failure(Kind.overloaded, "full", retry_after=0.2))["Retry-After"] == "1"
    assert failure_headers(Failure(Kind.overloaded, "full", retry_after=2.2))["Retry-After"] == "3"
    assert failure_headers(Failure(Kind.unauthorized, "no"))["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_a_nested_answer(kind: Kind) -> None:
    response = NestedDialect().failure_response(Failure(kind, "words", param="p"), None)
    error: dict[str, Any] = msgspec.json.decode(response.body)["error"]
    assert error["message"] == "words"
    assert error["param"] == "p"
    assert error["code"] == response.status_code >= 400
    assert error["type"]


def test_what_a_client_sent_is_not_sent_back_at_length() -> None:
    failure = Failure(Kind.not_found, "The model `" + "x" * 100_000 + "` does not exist.")
    assert len(failure.message) < 1100
    assert failure.message.startswith("The model `xxx")
