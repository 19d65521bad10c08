"""Clients that do not read: little is kept for them, their request leaves the batch, and no text is lost."""

from __future__ import annotations

import json
import re
import time

from tests.server.running import read_all
from tests.server.scripted import ScriptedServer, alphabet, body, post, status_of

TOKENS = 6000
EXPECTED = "".join(chr(ord("a") + place % 26) for place in range(TOKENS))


def _text(answer: bytes) -> str:
    """The text of a stream of TGI's, put together from its tokens."""
    return "".join(json.loads(f'"{match.decode()}"') for match in re.findall(rb'"text":"([^"]*)"', answer))


def steps_when_stuck(server: ScriptedServer) -> int:
    """Wait until the only stream is paused for good: the kernel takes no more for its client, and no step happens."""
    seen = -1

    def stuck() -> bool:
        nonlocal seen
        before, seen = seen, server.backend.steps
        (connection,) = server.running.http._state.connections
        if before == seen and connection.flow.write_paused and server.stats().paused == 1:
            return True
        time.sleep(0.3)
        return False

    server.until(stuck)
    return seen


def test_a_reader_that_stops_is_paused_and_gets_the_same_text_when_it_reads_on() -> None:
    with ScriptedServer(
        alphabet, max_model_len=8192, num_blocks=1024, most_unread=64, write_buffer_bytes=4096
    ) as server:
        with server.connect(receive_buffer=4096) as slow:
            slow.sendall(post("/generate_stream", body(TOKENS), "Connection: close"))
            server.until(lambda: len(server.serving.calls) == 1)
            stopped = steps_when_stuck(server)
            # It is out of the batch: others are served, and it is not computed with them.
            with server.client() as client:
                assert client.post("/generate", json=body(30)).json() == {"generated_text": EXPECTED[:30]}
            assert server.backend.steps <= stopped + 31
            assert server.stats().paused == 1
            answer = read_all(slow)
        assert status_of(answer) == 200
        assert _text(answer) == EXPECTED
        server.assert_idle()


def test_a_client_that_reads_nothing_at_all_is_cut_off() -> None:
    options = {"write_timeout": 0.3, "write_buffer_bytes": 4096}
    with ScriptedServer(alphabet, max_model_len=8192, num_blocks=1024, most_unread=64, **options) as server:
        with server.connect(receive_buffer=4096) as dead:
            dead.sendall(post("/generate_stream", body(TOKENS)))
            server.until(lambda: len(server.serving.calls) == 1)
            server.assert_idle()
            assert len(read_all(dead)) < 1_000_000
        server.until(lambda: server.running.http.connections == 0)


def test_a_paused_reader_that_leaves_is_forgotten() -> None:
    with ScriptedServer(
        alphabet, max_model_len=8192, num_blocks=1024, most_unread=64, write_buffer_bytes=4096
    ) as server:
        with server.connect(receive_buffer=4096) as slow:
            slow.sendall(post("/generate_stream", body(TOKENS)))
            server.until(lambda: len(server.serving.calls) == 1)
            server.until(lambda: server.stats().paused == 1)
        server.assert_idle()


def test_the_deadline_frees_a_request_whose_reader_is_stuck() -> None:
    options = {"request_timeout": 0.7, "write_buffer_bytes": 4096}
    with ScriptedServer(alphabet, max_model_len=8192, num_blocks=1024, most_unread=64, **options) as server:
        with server.connect(receive_buffer=4096) as slow:
            slow.sendall(post("/generate_stream", body(TOKENS), "Connection: close"))
            server.until(lambda: len(server.serving.calls) == 1)
            server.until(lambda: server.serving.llm.num_running == 0)
            answer = read_all(slow)
        assert b'"error_type":"timeout"' in answer
        assert EXPECTED.startswith(_text(answer))
        server.assert_idle()
