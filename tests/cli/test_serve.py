"""``octavo serve``: a flag for every option, one clear line for what is wrong, and a server that ends in order."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.frontend.options import EngineOptions
from octavo.server.options import ServerOptions


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Serving sets up the logging of the process, which here is that of the tests."""
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    yield
    for handler in [handler for handler in root.handlers if handler not in before[0]]:
        root.removeHandler(handler)
    root.setLevel(before[1])
    logging.captureWarnings(False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line a command ends with that cannot serve."""
    assert main(["serve", *arguments]) in (1, 2)
    output = capsys.readouterr()
    assert output.out == ""
    line = output.err.rstrip("\n")
    assert line.startswith("octavo: ")
    assert "\n" not in line
    assert "Traceback" not in line
    return line


def test_every_option_of_engine_and_server_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for item in (*fields(EngineOptions), *fields(ServerOptions)):
        if item.name not in ("model", "engine"):
            assert f"--{item.name.replace('_', '-')}" in text, item.name


def test_the_options_stand_under_headings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"\n{words}") for words in ("Address:\n", "Limits:\n", "Deadlines:\n", "Engine:\n")]
    assert places == sorted(places)
    assert places[1] < text.index("--max-body-bytes") < places[2] < text.index("--idle-timeout") < places[3]


def test_a_port_in_use_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = refused(capsys, "--port", str(port))
    assert f"port {port} of 127.0.0.1 is in use" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("/no/such/model",), "/no/such/model"),
        (("--host", "203.0.113.7"), "203.0.113.7"),
        (("--host", "no such host"), "no such host"),
        (("--port", "99999"), "65535"),
        (("--log-format", "yaml"), "log_format"),
        (("--scheduling-policy", "random"), "scheduling_policy"),
        (("--request-timeout", "0"), "request_timeout"),
        (("--ssl-keyfile", "key.pem"), "ssl_certfile"),
        (("--ssl-certfile", "/no/cert.pem"), "/no/cert.pem"),
        (("--api-key-file", "/no/keys"), "/no/keys"),
        (("--api-key", "two words"), "api_key"),
        (("--chat-template", "/no/template"), "/no/template"),
        (("--num-gpu-blocks-override", "1000000000"), "does not fit"),
        (("--otlp-endpoint", "collector"), "otlp_endpoint"),
        (("--uds", "/no/such/folder/socket"), "/no/such/folder/socket"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    port = () if "--port" in arguments else ("--port", "0")
    assert words in refused(capsys, *port, *arguments)


def test_a_file_that_is_no_certificate_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("not a certificate")
    assert "wrong.pem" in refused(capsys, "--port", "0", "--ssl-certfile", str(wrong))


def test_a_file_in_the_place_of_the_socket_is_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("text")
    assert "no socket" in refused(capsys, "--uds", str(file))
    assert file.read_text() == "text"
