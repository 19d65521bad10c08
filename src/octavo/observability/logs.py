"""Logs on stderr, as text or as one JSON object a line, with the id of the request they belong to."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import IO, Any

from octavo.errors import ParameterError
from octavo.observability.access import AccessRecord

__all__ = ["access_fields", "bind", "configure", "log_access"]

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_access = logging.getLogger("octavo.access")
_request_id: ContextVar[str | None] = ContextVar("octavo_request_id", default=None)

# Their own news (each connection, each request sent) would drown the server's.
_CHATTY = ("asyncio", "httpcore", "httpx", "opentelemetry", "urllib3", "websockets")
# One line a request is written by `log_access`, which knows more.
_SILENCED = ("uvicorn.access",)
_OTHERS = ("uvicorn", "uvicorn.error", "uvicorn.asgi")

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def bind(request_id: str | None) -> None:
    """From here on, what the present task logs carries this id; tasks it starts inherit it."""
    _request_id.set(request_id)


def configure(format: str = "text", level: str = "info", *, stream: IO[str] | None = None) -> None:
    """Send all logs to ``stream`` (stderr) in this format ("text" or "json"), from this level up.

    May be called again; then the later settings hold. ``ParameterError`` for an unknown format or level.
    """
    if format not in FORMATS:
        raise ParameterError("log_format", format, "one of " + ", ".join(FORMATS))
    if level not in LEVELS:
        raise ParameterError("log_level", level, "one of " + ", ".join(LEVELS))
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonFormatter() if format == "json" else _TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old.formatter, _Formatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    number = logging.getLevelName(level.upper())
    root.setLevel(number)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    for name in (*_OTHERS, *_SILENCED):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name in _OTHERS
        # uvicorn tells of each connection at INFO.
        logger.setLevel(max(number, logging.WARNING) if name in _OTHERS else logging.CRITICAL + 1)
    logging.captureWarnings(True)


def log_access(record: AccessRecord) -> None:
    """Write the line of a request."""
    if _access.isEnabledFor(logging.INFO):
        fields = access_fields(record)
        message = f"{record.method} {record.path} {record.status}"
        _access.info("%s", message, extra={"fields": fields})


def access_fields(record: AccessRecord) -> dict[str, Any]:
    """What the line of a request says; what does not apply to it is absent. Times are in milliseconds."""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "total_ms": _ms(record.seconds),
        "response_bytes": record.response_bytes,
    }
    for name in ("tenant", "model", "finish_reason", "failure"):
        value = getattr(record, name)
        if value is not None:
            fields[name] = value
    if record.generations:
        fields["prompt_tokens"] = record.prompt_tokens
        fields["cached_tokens"] = record.cached_tokens
        fields["generated_tokens"] = record.generated_tokens
    spans = record.spans
    for name in ("queue", "prefill", "decode"):
        span = getattr(spans, name)
        if span is not None:
            fields[f"{name}_ms"] = _ms(span[1] - span[0])
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class _Formatter(logging.Formatter):
    """What both formats have in common: Coordinated Universal Time to the millisecond."""

    @staticmethod
    def time_of(record: logging.LogRecord) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"

    @staticmethod
    def fields_of(record: logging.LogRecord) -> dict[str, Any]:
        fields: dict[str, Any] = getattr(record, "fields", {})
        request_id = _request_id.get()
        if request_id is not None and "request_id" not in fields:
            fields = {"request_id": request_id, **fields}
        return fields


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(self.fields_of(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        fields = self.fields_of(record)
        if record.name == _access.name:
            # Paths are the client's: none may begin a line that looks like another's.
            message = _plain(message)
            fields = {name: value for name, value in fields.items() if name not in ("method", "path", "status")}
        shown = "".join([f" {name}={_plain(str(value))}" for name, value in fields.items()])
        line = f"{self.time_of(record)} {record.levelname:<7} {record.name}: {message}{shown}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _plain(text: str) -> str:
    return _CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
