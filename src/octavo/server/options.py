"""The settings of the server: names, defaults, documentation and checks, beside those of the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.errors import ConfigError, ParameterError
from octavo.frontend.options import EngineOptions

__all__ = ["ENGINE_DEFAULTS", "ServerOptions", "server_option_documentation"]

# Where a server's engine is set up otherwise than one for scripts: clients who give no seed must not get the same
# answers after every start, and streams must not stand still while a long prompt is computed.
ENGINE_DEFAULTS: dict[str, Any] = {"seed": None, "max_step_seconds": 0.2}

_TEXTS = (
    "uds",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_keyfile_password",
    "api_key_file",
    "chat_template",
    "response_role",
    "otlp_endpoint",
    "otlp_service_name",
)
_SECONDS = (
    "header_timeout",
    "body_timeout",
    "idle_timeout",
    "write_timeout",
    "sse_keep_alive",
    "engine_timeout",
    "step_timeout",
)
_INTEGERS = {
    "max_concurrent_requests": (1, 1 << 20),
    "max_concurrent_per_key": (1, 1 << 20),
    "max_queued_requests": (1, 1 << 20),
    "max_client_batch_size": (1, 1 << 16),
    "max_best_of": (1, 128),
    "max_stop_sequences": (0, 1024),
    "max_top_n_tokens": (0, 1024),
    "max_input_tokens": (1, 1 << 24),
    "max_total_tokens": (2, 1 << 24),
    "max_connections": (1, 1 << 20),
    "max_body_bytes": (1, 1 << 32),
    "max_header_bytes": (1024, 1 << 24),
    "write_buffer_bytes": (1024, 1 << 24),
    "max_unread_tokens": (1, 1 << 24),
}
_MAY_BE_NONE = ("max_concurrent_per_key", "max_queued_requests", "max_input_tokens", "max_total_tokens")


def _option(default: Any, doc: str, *, secret: bool = False) -> Any:
    return field(default=default, metadata={"doc": doc}, repr=not secret)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Everything that can be set when a server is started. Checked when made: a wrong value is a ParameterError."""

    engine: EngineOptions = field(default_factory=EngineOptions)

    # Where it listens.
    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 or :: for all interfaces")
    port: int = _option(8000, "port to listen on; 0 takes a free one")
    uds: str | None = _option(None, "path of a Unix socket to listen on in place of host and port; default: none")
    ssl_certfile: str | None = _option(None, "certificate chain (PEM) to serve HTTPS with; default: none, plain HTTP")
    ssl_keyfile: str | None = _option(None, "private key (PEM) of the certificate; default: in ssl_certfile")
    ssl_keyfile_password: str | None = _option(None, "password of the private key; default: none", secret=True)

    # Who may use it, and under which name.
    served_model_name: tuple[str, ...] = _option(
        (), "name the model is served under; may be given several times; default: the model as it was named"
    )
    api_key: tuple[str, ...] = _option(
        (),
        "key every route but /health, /ready and /ping asks for, KEY or NAME:KEY; may be given several times; "
        "the environment variable OCTAVO_API_KEY adds one",
        secret=True,
    )
    api_key_file: str | None = _option(
        None, "file with one KEY or NAME:KEY a line; read again when it changes; default: none"
    )
    cors_allow_origins: tuple[str, ...] = _option(
        (), "origin whose pages may call the server from a browser, or *; may be given several times"
    )

    # What it takes on.
    max_concurrent_requests: int = _option(128, "most generating requests at once; more are refused with 429")
    max_concurrent_per_key: int | None = _option(
        None, "most generating requests at once with one API key; default: all there may be"
    )
    max_queued_requests: int | None = _option(
        None, "most requests that wait for the engine; one more is refused with 429; default: no bound of its own"
    )
    max_client_batch_size: int = _option(1024, "most prompts in one request")
    max_best_of: int = _option(2, "largest best_of on the TGI routes")
    max_stop_sequences: int = _option(4, "most stop sequences on the TGI routes")
    max_top_n_tokens: int = _option(5, "largest top_n_tokens on the TGI routes")
    max_input_tokens: int | None = _option(
        None, "longest prompt on the TGI routes, in tokens; default: one less than max_total_tokens"
    )
    max_total_tokens: int | None = _option(
        None, "longest prompt plus answer on the TGI routes, in tokens; default: max_model_len"
    )
    max_connections: int = _option(4096, "most connections at once; more are refused with 503")
    max_body_bytes: int = _option(2_000_000, "largest body of a request in bytes; larger ones are refused with 413")
    max_header_bytes: int = _option(
        65_536,
        "largest head of a request in bytes, 32 more counted for each field; larger ones are refused with 431",
    )

    # How long things may take, in seconds.
    request_timeout: float | None = _option(
        None,
        "longest a request may take in all, in seconds, its wait included; then it ends with 504; default: no limit",
    )
    queue_timeout: float | None = _option(
        None, "longest a request may wait for its start, in seconds; then it is refused with 429; default: no limit"
    )
    header_timeout: float = _option(10.0, "longest the head of a request may take to come, in seconds")
    body_timeout: float = _option(30.0, "longest the body of a request may take to come, in seconds")
    idle_timeout: float = _option(75.0, "how long a connection may stay open without a request, in seconds")
    write_timeout: float = _option(
        120.0, "how long a client may read nothing of its answer, in seconds; then it is cut off"
    )
    sse_keep_alive: float = _option(15.0, "a comment goes to a stream in which nothing was sent for this many seconds")
    shutdown_timeout: float = _option(30.0, "how long requests may go on after SIGTERM, in seconds")

    # Chat.
    chat_template: str | None = _option(
        None, "file with, or text of, the chat template to use; default: the model's own"
    )
    trust_request_chat_template: bool = _option(False, "let requests bring a chat template of their own")
    response_role: str = _option("assistant", "role of the messages that are answers")

    # When the engine is taken to hang.
    engine_timeout: float = _option(
        10.0, "how long the engine's process may give no sign of life, in seconds; then it is replaced"
    )
    step_timeout: float = _option(600.0, "longest one step of the engine may take, in seconds; then it is replaced")

    # Readers that do not keep up.
    write_buffer_bytes: int = _option(16_384, "most bytes kept for a client that does not read its answer")
    max_unread_tokens: int = _option(256, "a request pauses when its client is this many tokens behind")

    # What it says.
    log_format: str = _option("text", "form of the log on stderr: text or json")
    log_level: str = _option("info", "least level of what is logged: debug, info, warning or error")
    access_log: bool = _option(True, "log a line for each request")
    otlp_endpoint: str | None = _option(
        None,
        "where traces of requests are sent by OTLP over HTTP, a URL; needs the extra octavo[otel]; default: nowhere",
    )
    otlp_service_name: str = _option("octavo", "name of this service in traces")

    def __post_init__(self) -> None:
        if not isinstance(self.engine, EngineOptions):
            raise ParameterError("engine", self.engine, "EngineOptions")
        _text("host", self.host)
        _integer("port", self.port, 0, 65535)
        for name in _TEXTS:
            if getattr(self, name) is not None:
                _text(name, getattr(self, name))
        if self.ssl_certfile is None and (self.ssl_keyfile is not None or self.ssl_keyfile_password is not None):
            raise ConfigError("ssl_keyfile and ssl_keyfile_password belong to an ssl_certfile: give that too")
        for name in ("served_model_name", "api_key", "cors_allow_origins"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for name, (low, high) in _INTEGERS.items():
            if getattr(self, name) is not None or name not in _MAY_BE_NONE:
                _integer(name, getattr(self, name), low, high)
        for name in ("request_timeout", "queue_timeout"):
            if getattr(self, name) is not None:
                _seconds(name, getattr(self, name))
        for name in _SECONDS:
            _seconds(name, getattr(self, name))
        _seconds("shutdown_timeout", self.shutdown_timeout, zero=True)
        _one_of("log_format", self.log_format, ("text", "json"))
        _one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        for name in ("access_log", "trust_request_chat_template"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, getattr(self, name), "True or False")

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerOptions:
        """Make options from keyword arguments, those of the engine and of the server together.

        A name that is neither is refused, never ignored.
        """
        own = {item.name for item in fields(cls)} - {"engine"}
        engine = {name: value for name, value in kwargs.items() if name not in own}
        mine = {name: value for name, value in kwargs.items() if name in own}
        return cls(engine=EngineOptions.from_kwargs(**engine), **mine)


def server_option_documentation() -> dict[str, str]:
    """The one-sentence documentation of every server option by name, for help texts."""
    return {item.name: str(item.metadata["doc"]) for item in fields(ServerOptions) if "doc" in item.metadata}


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ParameterError(name, value, "a non-empty string")


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)):
        raise ParameterError(name, value, "a string or a list of strings")
    for item in value:
        _text(name, item)
    return tuple(value)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ParameterError(name, value, "one of " + ", ".join(allowed))


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(name, value, f"an integer from {low} to {high}")


def _seconds(name: str, value: object, *, zero: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not (0 < value <= 1e9 or (zero and value == 0)):  # type: ignore[operator]
        raise ParameterError(name, value, f"a number of seconds {'of at least' if zero else 'above'} 0")
