"""Server options: checked when made, documented, shared with the engine's, and never ignored."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from octavo.errors import ConfigError, ParameterError
from octavo.frontend.options import EngineOptions
from octavo.server.options import ServerOptions, server_option_documentation


def test_the_defaults_listen_on_the_loopback() -> None:
    options = ServerOptions()
    assert (options.host, options.port, options.api_key) == ("127.0.0.1", 8000, ())


def test_engine_and_server_options_are_given_together() -> None:
    options = ServerOptions.from_kwargs(model="x", max_num_seqs=3, port=0, served_model_name="y")
    assert options.engine == EngineOptions(model="x", max_num_seqs=3)
    assert (options.port, options.served_model_name) == (0, ("y",))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ParameterError, match="prot is not an option"):
        ServerOptions.from_kwargs(prot=1)


def test_no_name_is_both_the_engines_and_the_servers() -> None:
    assert {item.name for item in fields(ServerOptions)} & {item.name for item in fields(EngineOptions)} == set()


def test_every_option_is_documented() -> None:
    documentation = server_option_documentation()
    assert {item.name for item in fields(ServerOptions)} == {*documentation, "engine"}
    assert all(text[0].islower() and not text.endswith(".") for text in documentation.values() if text[:3] != "URL")


def test_secrets_are_not_shown() -> None:
    shown = repr(ServerOptions(api_key="sesame", ssl_certfile="c", ssl_keyfile_password="open"))
    assert "sesame" not in shown
    assert "'open'" not in shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("port", True),
        ("port", "8000"),
        ("uds", " "),
        ("api_key", 5),
        ("api_key", ["a", ""]),
        ("served_model_name", [1]),
        ("max_concurrent_requests", 0),
        ("max_concurrent_per_key", 0),
        ("max_queued_requests", 1.5),
        ("max_body_bytes", 0),
        ("max_body_bytes", None),
        ("request_timeout", 0),
        ("request_timeout", float("nan")),
        ("queue_timeout", -1),
        ("header_timeout", None),
        ("shutdown_timeout", -0.1),
        ("log_format", "yaml"),
        ("log_level", "loud"),
        ("access_log", 1),
        ("write_buffer_bytes", 10),
        ("engine", {}),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        ServerOptions(**{name: value})
    assert caught.value.field == name


def test_no_time_at_all_is_a_time_for_shutting_down() -> None:
    assert ServerOptions(shutdown_timeout=0).shutdown_timeout == 0


def test_a_key_without_a_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="ssl_certfile"):
        ServerOptions(ssl_keyfile="key.pem")
