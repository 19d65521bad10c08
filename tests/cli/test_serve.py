"""``octavo serve``: a flag for every option, one clear line for what is wrong, and a server that ends in order."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from octavo.cli.main import main
from octavo.frontend.options import EngineOptions
from octavo.server.options import ServerOptions

SMALL = ("--max-model-len", "2048", "--num-gpu-blocks-override", "512", "--max-num-seqs", "8")


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


class Served:
    """``octavo serve`` in a process of its own, with what it prints."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "octavo.cli.main", "serve", *SMALL, *arguments]
        variables = {**os.environ, **(environment or {})}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=variables)
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._listening = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.lines)),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors)),
        ]
        for reader in self._readers:
            reader.start()
        self._listening.wait(60)
        found = re.search(r" at (\S+)$", self.lines[-1]) if self.lines else None
        if found is None:
            self.close()
            pytest.fail(f"it does not serve: {self.errors}")
        self.url = found.group(1)

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            if " serves " in line:
                self._listening.set()
        self._listening.set()

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def end(self, *signals: int) -> int:
        """Send signals, wait for the end and give the exit code; no process is left over."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.05)  # one after the other, or the kernel may deliver them in another order
        code = self.process.wait(60)
        for reader in self._readers:
            reader.join(10)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for reader, stream in zip(self._readers, (self.process.stdout, self.process.stderr), strict=True):
            reader.join(10)
            assert stream is not None
            stream.close()


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    arguments = getattr(request, "param", ())
    running = Served("--port", "0", *arguments)
    yield running
    running.close()


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.01)


def test_a_server_tells_its_memory_and_address_and_ends_cleanly_on_sigterm(served: Served) -> None:
    assert any("KV pool" in line for line in served.lines)
    assert "serves smollm2-135m at http://127.0.0.1:" in served.lines[-1]
    asked = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=served.url, timeout=60) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "smollm2-135m"
        with client.stream("POST", "/v1/completions", json=asked) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert served.end() == 0
    assert sum("POST /v1/completions 200" in line for line in served.errors) == 1


@pytest.mark.parametrize(
    ("signals", "code"),
    [((signal.SIGINT,), 130), ((signal.SIGTERM, signal.SIGTERM), 143)],
    ids=["interrupt", "terminated twice"],
)
def test_a_server_told_to_stop_does_so_at_once(served: Served, signals: tuple[int, ...], code: int) -> None:
    asked = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=served.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=asked) as stream,
    ):
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        assert served.end(*signals) == code
        assert "shutting down" in list(lines)[-2]


def test_health_answers_during_a_long_prefill_and_tells_of_a_stopped_engine() -> None:
    served = Served("--port", "0", "--engine-timeout", "2")
    try:
        with httpx.Client(base_url=served.url, timeout=60) as client:
            done = threading.Event()

            def prefill() -> None:
                asked = {"prompt": [1000 + number for number in range(2000)], "max_tokens": 1}
                assert httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60).status_code == 200
                done.set()

            thread = threading.Thread(target=prefill)
            thread.start()
            answers = 0
            while not done.is_set():
                answers += client.get("/health").status_code in (200, 503)
            thread.join()
            assert answers > 5
            first = served.engine
            first.send_signal(signal.SIGSTOP)
            until(lambda: client.get("/health").status_code == 503)
            until(lambda: client.get("/health").status_code == 200)
            assert served.engine.pid != first.pid
        assert served.end(signal.SIGTERM) == 0
    finally:
        served.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls_and_a_key_of_the_environment(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make, *names], check=True, capture_output=True)
    files = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    served = Served("--port", "0", *files, environment={"OCTAVO_API_KEY": "me:sesame"})
    try:
        assert served.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=served.url, verify=trusted, timeout=60) as client:
            until(lambda: client.get("/health").status_code == 200)
            assert client.get("/v1/models").status_code == 401
            asked = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0, "stream": True}
            headers = {"Authorization": "Bearer sesame"}
            assert client.post("/v1/completions", json=asked, headers=headers).text.endswith("data: [DONE]\n\n")
        assert served.end(signal.SIGTERM) == 0
        assert any("tenant=me" in line for line in served.errors)
        assert not any("sesame" in line for line in (*served.lines, *served.errors))
    finally:
        served.close()


def test_a_unix_socket_is_served_and_taken_away_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "octavo.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    served = Served("--uds", str(path))
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://octavo", timeout=60) as client:
            assert client.get("/health").status_code == 200
            assert (
                client.post("/generate", json={"inputs": "Hi", "parameters": {"max_new_tokens": 2}}).status_code == 200
            )
        assert served.end(signal.SIGTERM) == 0
        assert not path.exists()
    finally:
        served.close()
