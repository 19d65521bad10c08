"""The WebSocket: its frames say what an event stream says, and its requests end when they should."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo.server import websocket
from tests.server.running import RunningServer
from tests.server.websocket_client import LONG, STORY, client, idle, sse, text_of

# -- the same as over HTTP


def test_a_chat_gives_what_the_event_stream_gives(server: RunningServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": 7,
        "return_token_ids": True,
    }
    events = sse(server, "/v1/chat/completions", body)
    with client(server) as socket:
        started = socket.start("a", **body)
        deltas, end = socket.rest("a")
    assert text_of(deltas) == "".join(event["delta"].get("content", "") for event in events)
    ids = [token for event in events for token in event.get("token_ids", ())]
    assert [token for delta in deltas for token in delta["token_ids"]] == ids
    assert end["finish_reason"] == events[-1]["finish_reason"]
    assert end["usage"]["completion_tokens"] == len(ids)
    assert end["usage"]["prompt_tokens"] == started["prompt_tokens"] == len(started["prompt_token_ids"])
    assert started["model"] == server.serving.model_names[0]


def test_a_prompt_as_text_and_as_token_ids_gives_what_the_event_stream_gives(server: RunningServer) -> None:
    body = {"max_tokens": 30, "temperature": 0.9, "seed": 11, "logprobs": 2}
    events = sse(server, "/v1/completions", {"prompt": STORY, **body})
    ids = server.serving.llm.get_tokenizer().encode(STORY)
    with client(server) as socket:
        for number, prompt in enumerate([{"prompt": STORY}, {"prompt_token_ids": ids}, {"prompt": ids}]):
            socket.start(f"r{number}", **prompt, **body)
            deltas, _ = socket.rest(f"r{number}")
            assert text_of(deltas) == "".join(event["text"] for event in events)
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                over_http = [value for event in events for value in (event["logprobs"] or {}).get(name, ())]
                assert [value for delta in deltas for value in delta["logprobs"][name]] == over_http


def test_the_log_probabilities_of_a_chat_have_the_shape_of_chat(server: RunningServer) -> None:
    with client(server) as socket:
        socket.start(
            "a",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=5,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
        deltas, _ = socket.rest("a")
    positions = [position for delta in deltas for position in delta["logprobs"]["content"]]
    assert len(positions) == 5
    assert [len(position["top_logprobs"]) for position in positions] == [2] * 5


def test_several_choices_are_told_apart_by_their_index(server: RunningServer) -> None:
    body = {"prompt": STORY, "n": 2, "max_tokens": 20, "temperature": 1, "seed": 3}
    with server.client() as http:
        choices = http.post("/v1/completions", json=body).json()["choices"]
    with client(server) as socket:
        socket.start("a", **body)
        deltas, end = socket.rest("a")
    assert [text_of(deltas, index) for index in (0, 1)] == [choice["text"] for choice in choices]
    assert choices[0]["text"] != choices[1]["text"]
    assert [choice["finish_reason"] for choice in end["choices"]] == ["length", "length"]


def test_requests_on_one_socket_run_side_by_side(server: RunningServer) -> None:
    bodies = {
        f"r{seed}": {"prompt": STORY, "max_tokens": 24 + seed, "temperature": 1, "seed": seed} for seed in range(8)
    }
    with server.client() as http:
        texts = {
            id_: http.post("/v1/completions", json=body).json()["choices"][0]["text"] for id_, body in bodies.items()
        }
    found = dict.fromkeys(bodies, "")
    order: list[str] = []
    with client(server) as socket:
        for id_, body in bodies.items():
            socket.send(type="start", id=id_, **body)
        ended = 0
        while ended < len(bodies):
            frame = socket.take()
            order.append(frame["id"])
            if frame["type"] == "delta":
                found[frame["id"]] += frame["text"]
            ended += frame["type"] == "end"
    assert found == texts
    # They take turns: some request goes on after another one has said something.
    assert sum(one != other for one, other in pairwise(order)) > len(bodies)


def test_an_id_can_be_used_again_after_its_end(server: RunningServer) -> None:
    with client(server) as socket:
        for _ in range(3):
            socket.start("same", prompt=STORY, max_tokens=3, temperature=0)
            _, end = socket.rest("same")
            assert end["finish_reason"] == "length"


def test_tokens_can_be_gathered_into_fewer_frames(server: RunningServer) -> None:
    body = {"prompt": STORY, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with client(server) as socket:
        socket.start("a", **body)
        one_by_one, _ = socket.rest("a")
        socket.start("b", **body, stream_interval=10)
        gathered, _ = socket.rest("b")
    assert text_of(gathered) == text_of(one_by_one)
    assert len(gathered) <= 6


def test_the_documented_client_works(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/websocket.md").read_text()
    (program,) = re.findall(r"```py\n(.*?)```", page, re.S)
    exec(program.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"), {})
    assert "'completion_tokens': " in capsys.readouterr().out


# -- ends


def test_a_cancelled_request_ends_and_the_socket_goes_on(server: RunningServer) -> None:
    with client(server) as socket:
        socket.start("a", **LONG)
        socket.take("delta")
        socket.send(type="cancel", id="a")
        _, end = socket.rest("a")
        assert end["finish_reason"] == "abort"
        assert 0 < end["usage"]["completion_tokens"] < 1500
        socket.send(type="start", id="b", **LONG)
        socket.send(type="cancel", id="b")
        frame = socket.take()
        assert (frame if frame["type"] == "end" else socket.rest("b")[1])["finish_reason"] == "abort"
        socket.start("a", prompt=STORY, max_tokens=2, temperature=0)
        socket.rest("a")
    idle(server)


def test_a_request_cancelled_before_it_begins_ends_once_and_its_id_is_free(server: RunningServer) -> None:
    with client(server) as socket:
        for _ in range(websocket.MAX_REQUESTS + 5):  # as one that stayed would take a place
            for _ in range(2):
                socket.send(type="start", id="a", **LONG)
                socket.send(type="cancel", id="a")
            for _ in range(2):
                while (frame := socket.take())["type"] != "end":
                    assert frame["type"] in ("started", "delta"), frame
                assert frame["finish_reason"] == "abort"
        socket.send(type="cancel", id="a")
        assert socket.error()["code"] == 404


def test_a_request_without_credits_left_can_be_cancelled(server: RunningServer) -> None:
    with client(server) as socket:
        socket.start("a", **LONG, credits=3)
        socket.tokens(3)
        socket.send(type="cancel", id="a")
        assert socket.take("end")["finish_reason"] == "abort"
    idle(server)


def test_requests_of_a_closed_socket_leave_the_batch_within_a_step(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = server.serving.llm
    steps: list[int] = []
    end_requests = websocket._Session._end_requests

    async def count_and_end(session: Any) -> None:
        steps.append((await llm.stats()).counters.steps)
        await end_requests(session)

    monkeypatch.setattr(websocket._Session, "_end_requests", count_and_end)
    with client(server) as socket:
        for number in range(4):
            socket.send(type="start", id=f"r{number}", **LONG)
        socket.send(type="start", id="paced", **LONG, credits=1)
        deltas = 0
        while deltas < 20:
            deltas += socket.take()["type"] == "delta"
        assert llm.num_running == 5
        socket.connection.socket.shutdown(2)  # no closing handshake: the line is cut
    idle(server)
    # The step under way when the aborts are sent, and no other.
    assert server.call(llm.stats).counters.steps <= steps[0] + 2


@pytest.mark.parametrize("credits_", [None, 3])
def test_a_request_can_be_cancelled_over_http(server: RunningServer, credits_: int | None) -> None:
    with client(server) as socket, server.client() as http:
        started = socket.start("a", **LONG, credits=credits_)
        socket.take("delta") if credits_ is None else socket.tokens(3)
        assert http.post(f"/v1/requests/{started['request_id']}/cancel").status_code == 200
        deltas, end = socket.rest("a")
        assert end["finish_reason"] == "abort"
        assert credits_ is None or deltas == []
    idle(server)


@pytest.mark.parametrize("frame", [{"credits": 2}, {"hold": True}, {}], ids=["no-credits-left", "held", "running"])
def test_a_deadline_holds_whatever_the_client_does(server: RunningServer, frame: dict[str, Any]) -> None:
    with RunningServer(server.serving.llm, request_timeout=0.5) as strict, client(strict) as socket:
        hold = frame.pop("hold", False)
        socket.start("a", **LONG, **frame)
        if hold:
            socket.send(type="pause", id="a")
        while (last := socket.take())["type"] == "delta":
            pass
        assert (last["type"], last["id"], last["error"]["code"]) == ("error", "a", 504)
        assert "0.5 seconds" in last["error"]["message"]
    idle(server)
