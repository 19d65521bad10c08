"""Logs are one parseable line each, know the request they belong to, and keep secrets and prompts out."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import ParameterError
from octavo.frontend.outputs import RequestMetrics
from octavo.observability.access import AccessRecord, Spans
from octavo.observability.logs import bind, configure, log_access


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Give the logging of the test run back as it was."""
    names = [None, "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "httpx", "asyncio", "opentelemetry"]
    names += ["httpcore", "urllib3", "websockets"]
    before = [
        (logging.getLogger(name), logging.getLogger(name).level, logging.getLogger(name).propagate) for name in names
    ]
    handlers = logging.getLogger().handlers[:]
    yield
    logging.captureWarnings(False)
    logging.getLogger().handlers[:] = handlers
    for logger, level, propagate in before:
        logger.setLevel(level)
        logger.propagate = propagate
    bind(None)


def record(**fields: Any) -> AccessRecord:
    times = RequestMetrics(10.0, 10.5, 12.0, 16.0, 16.25)
    known: dict[str, Any] = {
        "request_id": "req-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "route": "/v1/chat/completions",
        "status": 200,
        "arrival": 9.75,
        "end": 16.5,
        "model": "smollm2",
        "tenant": "alice",
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "generated_tokens": 17,
        "generations": 1,
        "finish_reason": "stop",
        "response_bytes": 900,
        "times": times,
    }
    return AccessRecord(**{**known, **fields})


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_has_one_object_a_line_and_the_access_line_says_everything() -> None:
    stream = io.StringIO()
    configure("json", "info", stream=stream)
    log_access(record())
    (line,) = lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "logger": "octavo.access",
        "message": "POST /v1/chat/completions 200",
        "request_id": "req-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "total_ms": 6750.0,
        "response_bytes": 900,
        "tenant": "alice",
        "model": "smollm2",
        "finish_reason": "stop",
        "prompt_tokens": 40,
        "cached_tokens": 32,
        "generated_tokens": 17,
        "queue_ms": 500.0,
        "prefill_ms": 1500.0,
        "decode_ms": 4000.0,
    }


def test_text_has_the_same_on_one_line() -> None:
    stream = io.StringIO()
    configure("text", "info", stream=stream)
    log_access(record())
    (line,) = stream.getvalue().splitlines()
    assert re.match(r"^\S+Z INFO    octavo\.access: POST /v1/chat/completions 200 request_id=req-1 ", line)
    for part in ("total_ms=6750.0", "queue_ms=500.0", "prefill_ms=1500.0", "decode_ms=4000.0", "finish_reason=stop"):
        assert f" {part}" in line
    for part in ("tenant=alice", "model=smollm2", "prompt_tokens=40", "cached_tokens=32", "generated_tokens=17"):
        assert f" {part}" in line


def test_what_does_not_apply_is_left_out() -> None:
    stream = io.StringIO()
    configure("json", "info", stream=stream)
    bare = {"model": None, "tenant": None, "generations": 0, "finish_reason": None, "times": None}
    log_access(record(path="/v1/models", method="GET", status=404, failure="not_found", **bare))
    (line,) = lines(stream)
    assert line["failure"] == "not_found"
    absent = {"model", "tenant", "prompt_tokens", "finish_reason", "queue_ms", "prefill_ms", "decode_ms"}
    assert not absent & set(line)


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_path_cannot_forge_a_line(format: str) -> None:
    stream = io.StringIO()
    configure(format, "info", stream=stream)
    log_access(record(path="/x\n2026-01-01T00:00:00.000Z INFO octavo.access: GET / 200\u2028\x1b[2J"))
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()


def test_lines_of_a_task_carry_the_id_of_its_request() -> None:
    stream = io.StringIO()
    configure("json", "info", stream=stream)
    log = logging.getLogger("octavo.server.call")

    async def answer(request_id: str) -> None:
        bind(request_id)
        await asyncio.sleep(0)
        log.warning("said in %s", request_id)

    async def main() -> None:
        await asyncio.gather(answer("a"), answer("b"))
        log.warning("said by nobody")

    asyncio.run(main())
    said = {line["message"]: line.get("request_id") for line in lines(stream)}
    assert said == {"said in a": "a", "said in b": "b", "said by nobody": None}


def test_exceptions_stay_in_their_line() -> None:
    stream = io.StringIO()
    configure("json", "info", stream=stream)
    try:
        raise ValueError("why\nso")
    except ValueError:
        logging.getLogger("octavo").exception("it failed")
    (line,) = lines(stream)
    assert line["level"] == "error"
    assert line["exception"].endswith("ValueError: why\nso")


def test_the_web_servers_own_loggers_go_the_same_way_but_not_its_access_log() -> None:
    stream = io.StringIO()
    own = io.StringIO()
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler(own))
    configure("json", "info", stream=stream)
    logging.getLogger("uvicorn.error").info("a connection was opened")
    logging.getLogger("uvicorn.error").error("something is wrong")
    logging.getLogger("uvicorn.access").info("127.0.0.1 GET /?key=secret")
    logging.getLogger("httpx").info("chatter")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert [line["logger"] for line in lines(stream)] == ["uvicorn.error", "py.warnings"]
    assert own.getvalue() == ""


def test_the_level_and_the_last_configuration_hold() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("json", "debug", stream=first)
    configure("json", "warning", stream=second)
    log_access(record())
    logging.getLogger("octavo").warning("seen")
    assert first.getvalue() == ""
    assert [line["message"] for line in lines(second)] == ["seen"]


@pytest.mark.parametrize(("format", "level", "field"), [("xml", "info", "log_format"), ("text", "loud", "log_level")])
def test_unknown_settings_are_refused_by_name(format: str, level: str, field: str) -> None:
    with pytest.raises(ParameterError) as refused:
        configure(format, level)
    assert refused.value.field == field


def test_a_request_cut_off_has_the_parts_it_came_to() -> None:
    assert Spans.of(None, 9.0) == Spans()
    assert Spans.of(RequestMetrics(1.0), 9.0) == Spans((1.0, 9.0))
    assert Spans.of(RequestMetrics(1.0, 2.0), 9.0) == Spans((1.0, 2.0), (2.0, 9.0))
    assert Spans.of(RequestMetrics(1.0, 2.0, finished_time=5.0), 9.0) == Spans((1.0, 2.0), (2.0, 5.0))
    assert Spans.of(RequestMetrics(1.0, 2.0, 3.0, 4.0, 5.0), 9.0) == Spans((1.0, 2.0), (2.0, 3.0), (3.0, 4.0))
