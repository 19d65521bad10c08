"""Requests of a socket outlive the engine's process, whether they run, wait for credits, or are held."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.server.running import RunningServer
from tests.server.websocket_client import client, text_of

BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0.8, "ignore_eos": True}


def test_requests_of_a_socket_go_on_after_a_crash_of_the_engine() -> None:
    with RunningServer(separate_process=True) as server, client(server) as socket:
        llm = server.serving.llm
        whole = {}
        for seed, id_ in enumerate(("runs", "waits", "held")):
            socket.start(id_, **BODY, seed=seed)
            whole[id_] = text_of(socket.rest(id_)[0])
        assert len(set(whole.values())) == 3

        found = dict.fromkeys(whole, "")
        ended = set()

        def take() -> dict[str, Any]:
            frame = socket.take()
            if frame["type"] == "delta":
                found[frame["id"]] += frame["text"]
            elif frame["type"] == "end":
                ended.add(frame["id"])
            else:
                assert frame["type"] == "started", frame
            return frame

        socket.send(type="start", id="waits", **BODY, seed=1, credits=5)
        socket.send(type="start", id="held", **BODY, seed=2, credits=20)
        while sum(len(text) for text in found.values()) < 20:
            take()
        socket.send(type="pause", id="held")
        socket.send(type="start", id="runs", **BODY, seed=0)
        while not found["runs"]:
            take()
        before = llm.engine_info.pid
        os.kill(before, signal.SIGKILL)
        while "runs" not in ended:
            take()
        assert llm.engine_info.pid != before
        socket.send(type="credit", id="waits", tokens=100)
        socket.send(type="credit", id="held", tokens=100)
        socket.send(type="resume", id="held")
        while len(ended) < 3:
            take()
        assert found == whole
        server.until(lambda: llm.num_running == 0)
        assert server.call(llm.check) == []
