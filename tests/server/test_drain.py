"""The end of the server: what runs may finish, what comes is refused, and each way to end has its exit code."""

from __future__ import annotations

import signal

import pytest

from tests.server.scripted import ScriptedServer, alphabet, body, finish, generate, post, status_of

CLOSE = "Connection: close"


def test_a_drain_lets_running_requests_finish_and_refuses_new_ones() -> None:
    with ScriptedServer(alphabet, held=True, max_num_seqs=1) as server:
        stream = generate(server, "/generate_stream", 5, CLOSE)
        server.until(lambda: server.gate.reached == 1)
        waiting = generate(server, "/generate", 5, CLOSE)
        server.until(lambda: server.serving.llm.num_running == 2)
        server.signal(signal.SIGTERM)
        server.until(lambda: server.serving.draining)
        with server.client() as client:
            for path, content in (("/generate", body()), ("/v1/completions", {"prompt": "x"})):
                refused = client.post(path, json=content)
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
                assert refused.headers["connection"] == "close"
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
            assert client.get("/metrics").status_code == 200
        server.gate.open()
        assert finish(stream).count(b'"token"') == 5
        assert b'"abcde"' in finish(waiting)
        assert server.wait() == 0
        assert server.serving.llm.num_running == 0


def test_a_drain_without_requests_ends_at_once_whatever_connections_are_open() -> None:
    with ScriptedServer() as server:
        idle = [server.connect() for _ in range(3)]
        server.until(lambda: server.running.http.connections == 3)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        for connection in idle:
            assert finish(connection) == b""


def test_what_does_not_finish_in_time_gets_an_error_its_client_sees() -> None:
    with ScriptedServer(alphabet, held=True, shutdown_timeout=0.3) as server:
        stream = generate(server, "/generate_stream", 100, CLOSE)
        whole = generate(server, "/v1/completions", 100, CLOSE)
        whole.close()
        whole = generate(server, "/generate", 100, CLOSE)
        server.gate.let(2)
        server.until(lambda: server.gate.reached == 3)
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        answer = finish(whole)
        assert status_of(answer) == 503
        assert b"shutting down" in answer
        answer = finish(stream)
        assert status_of(answer) == 200
        assert b"shutting down" in answer
        assert answer.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_or_an_interrupt_ends_at_once(first: signal.Signals, second: signal.Signals) -> None:
    with ScriptedServer(alphabet, held=True, shutdown_timeout=1000) as server:
        stream = generate(server, "/generate_stream", 100, CLOSE)
        server.gate.let(2)
        server.until(lambda: server.gate.reached == 3)
        server.signal(first)
        if first is signal.SIGTERM:
            server.until(lambda: server.serving.draining)
            server.signal(second)
        code = server.wait()
        assert code == 128 + (second if first is signal.SIGTERM else first)
        assert b"shutting down" in finish(stream)


def test_a_client_that_reads_nothing_does_not_hold_up_the_end() -> None:
    options = {"shutdown_timeout": 0.2, "write_buffer_bytes": 4096}
    with ScriptedServer(alphabet, max_model_len=8192, num_blocks=1024, most_unread=64, **options) as server:
        stuck = server.connect(receive_buffer=4096)
        stuck.sendall(post("/generate_stream", body(6000)))
        server.until(lambda: server.serving.llm.num_running == 1)
        server.signal(signal.SIGTERM)
        assert server.wait() == 1
        assert len(finish(stuck)) < 1_000_000


def test_the_server_ends_when_its_engine_is_lost_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(alphabet, held=True) as server:

        def fail(step: int) -> None:
            raise RuntimeError("the disk is on fire")

        server.backend.before_step = fail
        with server.client() as client:
            response = client.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 503
            assert response.json()["error"]["code"] == 503
        assert server.wait() == 1
    line = capsys.readouterr().err.strip()
    assert line.startswith("octavo: the engine is lost for good: ")
    assert "the disk is on fire" in line
    assert "\n" not in line
