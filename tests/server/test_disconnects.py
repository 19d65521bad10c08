"""A client that leaves: whatever its request was doing, the engine is rid of it within one step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.scripted import ScriptedServer, alphabet, finish, generate, post, status_of

ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "tgi": ("/generate", {"inputs": "Q", "parameters": {"max_new_tokens": 100}}),
    "tgi stream": ("/generate_stream", {"inputs": "Q", "parameters": {"max_new_tokens": 100}}),
    "completion": ("/v1/completions", {"prompt": "Q", "max_tokens": 100}),
    "completion stream": ("/v1/completions", {"prompt": "Q", "max_tokens": 100, "stream": True}),
    "completions": ("/v1/completions", {"prompt": ["Q", "R", "S"], "max_tokens": 100}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 100}),
    "chat stream": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 100, "stream": True},
    ),
}


@pytest.mark.parametrize("route", list(ROUTES))
def test_a_running_request_is_aborted_within_a_step(route: str) -> None:
    path, content = ROUTES[route]
    with ScriptedServer(alphabet, held=True) as server:
        connection = server.connect()
        connection.sendall(post(path, content))
        server.gate.let(2)
        server.until(lambda: server.gate.reached == 3)  # held in its third step
        connection.close()
        server.until(lambda: not server.serving.calls)
        server.gate.let(1)
        server.until(lambda: server.serving.llm.num_running == 0)
        server.gate.open()
        server.assert_idle()
        assert server.gate.reached <= 4


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_a_waiting_request_is_aborted(path: str) -> None:
    with ScriptedServer(alphabet, held=True, max_num_seqs=1) as server:
        first = generate(server, "/generate", 5, "Connection: close")
        server.until(lambda: server.gate.reached == 1)
        waiting = [generate(server, path, 100) for _ in range(4)]
        server.until(lambda: server.serving.llm.num_running == 5)
        for connection in waiting:
            connection.close()
        server.until(lambda: len(server.serving.calls) == 1)
        server.gate.let(1)
        server.until(lambda: server.serving.llm.num_running == 1)
        server.gate.open()
        assert json.loads(finish(first).partition(b"\r\n\r\n")[2]) == {"generated_text": "abcde"}
        server.assert_idle()


def test_many_streams_closed_at_once_leave_nothing() -> None:
    with ScriptedServer(alphabet, held=True) as server:
        streams = [generate(server, "/generate_stream", 200) for _ in range(16)]
        server.until(lambda: server.serving.llm.num_running == 16)
        server.gate.let(2)
        for connection in streams:
            connection.close()
        server.gate.open()
        server.assert_idle()


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing() -> None:
    with ScriptedServer() as server:
        with server.connect() as connection:
            connection.sendall(post("/generate", ROUTES["tgi"][1])[:-10])
            server.until(lambda: len(server.serving.calls) == 1)
        server.until(lambda: not server.serving.calls)
        server.assert_idle()
        assert server.gate.reached == 0


def test_others_go_on_when_a_neighbour_leaves() -> None:
    with ScriptedServer(alphabet, held=True) as server:
        stays = generate(server, "/generate", 30, "Connection: close")
        leaves = generate(server, "/generate_stream", 30)
        server.until(lambda: server.serving.llm.num_running == 2)
        server.gate.let(4)
        leaves.close()
        server.gate.open()
        answer = finish(stays)
        assert status_of(answer) == 200
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["generated_text"] == "abcdefghijklmnopqrstuvwxyzabcd"
        server.assert_idle()
