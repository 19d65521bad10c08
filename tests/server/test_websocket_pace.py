"""The WebSocket at the client's pace: credits, holding, and clients that do not read."""

from __future__ import annotations

from typing import Any

from tests.server.running import RunningServer
from tests.server.websocket_client import LONG, STORY, client, idle, text_of


def test_no_more_tokens_come_than_credits_were_given(server: RunningServer) -> None:
    body = {"prompt": STORY, "max_tokens": 60, "temperature": 0.7, "seed": 5, "ignore_eos": True}
    with client(server) as socket:
        socket.start("plain", **body)
        whole = text_of(socket.rest("plain")[0])
        socket.start("paced", **body, credits=4)
        deltas = socket.tokens(4)
        # It is out of the batch, and stays there until it gets more.
        server.until(lambda: server.serving.llm.num_running == 1)
        server.call(lambda: _until_paused(server, 1))
        for credits_ in (1, 2, 30):
            socket.send(type="credit", id="paced", tokens=credits_)
            deltas += socket.tokens(credits_)
        socket.send(type="credit", id="paced", tokens=1000)
        rest, end = socket.rest("paced")
    assert text_of(deltas + rest) == whole
    assert sum(delta["tokens"] for delta in deltas + rest) == 60
    assert end["usage"]["completion_tokens"] == 60
    idle(server)


async def _until_paused(server: RunningServer, number: int) -> None:
    for _ in range(2000):
        if (await server.serving.llm.stats()).paused == number:
            return
    raise AssertionError("the request was not paused")


def test_a_paused_request_goes_on_with_the_same_text(server: RunningServer) -> None:
    body = {"prompt": STORY, "max_tokens": 80, "temperature": 0.7, "seed": 9, "ignore_eos": True}
    with client(server) as socket:
        socket.start("plain", **body)
        whole = text_of(socket.rest("plain")[0])
        socket.start("held", **body)
        deltas = [socket.take("delta") for _ in range(3)]
        socket.send(type="pause", id="held")
        server.call(lambda: _until_paused(server, 1))
        # Another request of the socket is not held up by it. What was under way before the pause comes first.
        socket.send(type="start", id="other", prompt=STORY, max_tokens=4, temperature=0)
        frames = []
        while not frames or frames[-1]["type"] != "end":
            frames.append(socket.take())
        assert frames[-1]["id"] == "other"
        deltas += [frame for frame in frames if frame["id"] == "held"]
        socket.send(type="resume", id="held")
        rest, end = socket.rest("held")
    assert text_of(deltas + rest) == whole
    assert end["usage"]["completion_tokens"] == 80
    idle(server)


def test_a_request_can_be_held_before_it_begins(server: RunningServer) -> None:
    with client(server) as socket:
        socket.send(type="start", id="a", prompt=STORY, max_tokens=4, temperature=0)
        socket.send(type="pause", id="a")
        socket.send(type="resume", id="a")
        socket.take("started")
        _, end = socket.rest("a")
        assert end["usage"]["completion_tokens"] == 4


def test_stop_strings_and_half_characters_survive_single_credits(server: RunningServer) -> None:
    ids = server.serving.llm.get_tokenizer().encode("🙂🙃🙂🙃 ünïcödé 🙂🙃🙂")
    body = {"prompt_token_ids": ids, "max_tokens": 40, "temperature": 1.3, "seed": 2, "ignore_eos": True}
    with client(server) as socket:
        socket.start("first", **body)
        whole = text_of(socket.rest("first")[0])
        stop = whole[len(whole) // 2 :][:3]
        socket.start("plain", **body, stop=[stop])
        stopped = text_of(socket.rest("plain")[0])
        socket.start("paced", **body, stop=[stop], credits=1)
        deltas: list[dict[str, Any]] = []
        while (frame := socket.take())["type"] == "delta":
            assert frame["tokens"] <= 1
            deltas.append(frame)
            if frame["tokens"]:
                socket.send(type="credit", id="paced", tokens=1)
        # The last credit may have come too late for a request that had ended.
        assert frame["type"] == "end"
    assert frame["stop_reason"] == stop
    assert text_of(deltas) == stopped


def test_a_client_that_gives_no_credits_for_too_long_loses_the_request(server: RunningServer) -> None:
    with RunningServer(server.serving.llm, write_timeout=0.2) as strict, client(strict) as socket:
        socket.start("a", **LONG, credits=2)
        socket.tokens(2)
        error = socket.error("a")
        assert error["code"] == 504
        socket.start("b", prompt=STORY, max_tokens=2, temperature=0)
        socket.rest("b")
    idle(server)


def test_a_client_that_does_not_read_is_cut_off(server: RunningServer) -> None:
    # Frames of some kilobytes, so that the buffers of both kernels are soon full.
    with RunningServer(server.serving.llm, write_timeout=0.5) as strict:
        options = {"sock": strict.connect(receive_buffer=4096), "max_queue": 1, "close_timeout": 0.1}
        with client(strict, **options) as socket:
            socket.send(type="start", id="a", **LONG, logprobs=20)
            strict.until(lambda: strict.running.app.admission.active == 1)
            strict.until(lambda: strict.running.app.admission.active == 0)
            strict.until(lambda: not strict.running.app.sockets)
    idle(server)
