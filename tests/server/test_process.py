"""The server's process: what it prints, how it ends, that it tells the truth of its engine; TLS and Unix sockets."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.served import Served


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
