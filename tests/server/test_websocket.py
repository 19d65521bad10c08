"""The WebSocket: its frames say what an event stream says, at the client's pace; nothing a client sends breaks it."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from octavo.server import websocket
from tests.server.running import RunningServer

STORY = "Once upon a time"
LONG: dict[str, Any] = {"prompt": STORY, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


class Client:
    """A client that sends and takes frames as dictionaries."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, **frame: Any) -> None:
        self.connection.send(json.dumps(frame))

    def take(self, type_: str | None = None) -> dict[str, Any]:
        """The next frame, which must be of this type."""
        frame: dict[str, Any] = json.loads(self.connection.recv(timeout=60))
        assert type_ is None or frame["type"] == type_, frame
        return frame

    def start(self, id_: str, **fields: Any) -> dict[str, Any]:
        """Start a request; its started frame."""
        self.send(type="start", id=id_, **fields)
        return self.take("started")

    def rest(self, id_: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Every delta of the only running request, and its end."""
        deltas = []
        while (frame := self.take())["type"] == "delta":
            assert frame["id"] == id_
            deltas.append(frame)
        assert (frame["type"], frame["id"]) == ("end", id_), frame
        return deltas, frame

    def tokens(self, number: int) -> list[dict[str, Any]]:
        """Deltas until as many tokens have come, none more."""
        deltas: list[dict[str, Any]] = []
        while sum(delta["tokens"] for delta in deltas) < number:
            deltas.append(self.take("delta"))
        assert sum(delta["tokens"] for delta in deltas) == number
        return deltas

    def error(self, id_: str | None = None) -> dict[str, Any]:
        """The error of the next frame, which must be about this request."""
        frame = self.take("error")
        assert frame.get("id") == id_, frame
        assert set(frame["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = frame["error"]
        return error

    def close_code(self) -> int:
        """The code the server closes with; frames before it are passed over."""
        with suppress(ConnectionClosed):
            while True:
                self.connection.recv(timeout=60)
        code = self.connection.protocol.close_code
        assert code is not None
        return code


@contextmanager
def client(server: RunningServer, path: str = "/v1/stream", **options: Any) -> Iterator[Client]:
    url = f"ws://127.0.0.1:{server.port}{path}"
    with connect(url, proxy=None, compression=None, **options) as connection:
        yield Client(connection)


def text_of(deltas: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(delta["text"] for delta in deltas if delta["index"] == index)


def sse(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices in the events of the same request over HTTP."""
    with server.client() as http, http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [choice for event in data[:-1] for choice in json.loads(event)["choices"]]


def idle(server: RunningServer) -> None:
    """Wait until nothing runs, and check that the engine has everything back."""
    server.until(lambda: server.serving.llm.num_running == 0)
    assert server.call(server.serving.llm.check) == []
    assert server.running.app.admission.active == 0


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


# -- the client's pace


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


# -- what is refused


WRONG_FRAMES = [
    pytest.param("no json", None, id="no-json"),
    pytest.param("[]", None, id="a-list"),
    pytest.param('{"type":"start","id":"a","messages":' + "[" * 200_000, None, id="nested-too-deeply"),
    pytest.param(
        '{"type":"cancel","id":"a","x":' + "[" * 9000 + "]" * 9000 + "}", None, id="nested-too-deeply-elsewhere"
    ),
    pytest.param('{"type":"start"}', "id", id="no-id"),
    pytest.param('{"type":"start","id":""}', "id", id="empty-id"),
    pytest.param('{"type":"start","id":7,"prompt":"a"}', "id", id="id-is-a-number"),
    pytest.param('{"type":"begin","id":"x"}', "type", id="unknown-type"),
    pytest.param('{"type":"cancel","id":"nobody"}', "id", id="nobody-to-cancel"),
    pytest.param('{"type":"cancel","id":"x","tokens":1}', "tokens", id="cancel-with-tokens"),
    pytest.param('{"type":"credit","id":"x"}', "tokens", id="credit-without-tokens"),
    pytest.param('{"type":"credit","id":"x","tokens":0}', "tokens", id="no-credit"),
    pytest.param('{"type":"pause","id":"x","speed":1}', "speed", id="unknown-field"),
]


@pytest.mark.parametrize(("text", "param"), WRONG_FRAMES)
def test_a_frame_that_is_wrong_gets_an_error_and_the_socket_stays(
    server: RunningServer, text: str, param: str | None
) -> None:
    with client(server) as socket:
        socket.connection.send(text)
        error = socket.error()
        assert error["code"] == (404 if "nobody" in text else 400)
        assert error["param"] == param
        socket.start("a", prompt=STORY, max_tokens=1, temperature=0)
        socket.rest("a")


WRONG_STARTS = [
    pytest.param({}, "prompt", id="no-prompt"),
    pytest.param({"prompt": ["one", "two"]}, "prompt", id="two-prompts"),
    pytest.param({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids", id="prompt-twice"),
    pytest.param({"prompt": "a", "temperature": 3}, "temperature", id="too-hot"),
    pytest.param({"prompt": "a", "max_tokens": "many"}, "body.max_tokens", id="wrong-type"),
    pytest.param({"prompt": "a", "speed": 1}, "speed", id="unknown-field"),
    pytest.param({"prompt": "a", "credits": 0}, "credits", id="no-credits"),
    pytest.param({"prompt": "a", "stream": False}, "stream", id="not-streamed"),
    pytest.param({"prompt": "a", "echo": True}, "echo", id="echo"),
    pytest.param({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", id="stream-options"),
    pytest.param({"prompt": "a", "credits": 1, "stream_interval": 2}, "stream_interval", id="credits-and-interval"),
    pytest.param({"prompt": "a", "max_tokens": 5000}, "input_tokens", id="too-long"),
    pytest.param({"messages": []}, "messages", id="no-messages"),
    pytest.param({"prompt": "a", "metadata": [[]]}, "body.metadata", id="wrong-list"),
    pytest.param({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, "prompt", id="chat-and-prompt"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_STARTS)
def test_a_start_that_is_wrong_ends_that_request_only(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    with client(server) as socket:
        socket.send(type="start", id="bad", **fields)
        error = socket.error("bad")
        assert (error["code"], error["param"]) == (400, param)
        socket.start("bad", prompt=STORY, max_tokens=1, temperature=0)
        socket.rest("bad")


FIELDS = [
    *("type", "id", "tokens", "credits", "prompt", "messages", "prompt_token_ids", "n", "max_tokens", "temperature"),
    *("seed", "stop", "logprobs", "stream", "logit_bias", "stream_interval", "model", "priority", "bad_words"),
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.floats(allow_nan=False)
    | st.sampled_from(["start", "credit", "cancel", "pause", "resume", "a", "", "x" * 200, "\ud83d\ude42"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "7"]), inner),
    max_leaves=6,
)
FRAMES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6).flatmap(
    lambda frame: st.sampled_from([frame, {"type": "start", "id": "a", "prompt": "Hi", **frame}])
)


def test_no_frame_makes_the_server_fail(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is sent, what comes back are frames, no error is the server's own, and the socket goes on."""
    with client(server) as socket:

        @settings(max_examples=300, deadline=None)
        @given(st.lists(FRAMES, min_size=1, max_size=4))
        def send(frames: list[dict[str, Any]]) -> None:
            for frame in frames:
                socket.send(**frame)
            socket.send(type="cancel", id="nobody")
            while True:
                frame = socket.take()
                assert frame["type"] in ("started", "delta", "end", "error")
                if frame["type"] == "error":
                    assert 400 <= frame["error"]["code"] < 500, frame
                    if "nobody" in frame["error"]["message"]:
                        return

        send()
    assert [record.message for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
    idle(server)


def test_a_model_that_is_not_served_is_not_found(server: RunningServer) -> None:
    with client(server) as socket:
        socket.send(type="start", id="a", prompt="a", model="gpt-4")
        assert socket.error("a")["code"] == 404


def test_an_id_in_use_is_refused_and_the_request_that_has_it_goes_on(server: RunningServer) -> None:
    with client(server) as socket:
        socket.start("a", prompt=STORY, max_tokens=3, temperature=0, credits=1)
        socket.tokens(1)
        socket.send(type="start", id="a", prompt=STORY)
        assert socket.error()["param"] == "id"
        socket.send(type="credit", id="a", tokens=10)
        socket.rest("a")


def test_credit_for_a_request_that_counts_none_is_refused(server: RunningServer) -> None:
    with client(server) as socket:
        socket.start("a", **LONG)
        socket.send(type="credit", id="a", tokens=5)
        while (frame := socket.take())["type"] == "delta":
            pass
        assert (frame["type"], frame["error"]["param"]) == ("error", "tokens")
        assert "id" not in frame
        socket.send(type="cancel", id="a")
        socket.rest("a")


def test_binary_frames_close_the_socket(server: RunningServer) -> None:
    with client(server) as socket:
        socket.connection.send(b"\x00")
        assert socket.close_code() == 1003


def test_a_frame_that_is_too_large_closes_the_socket(server: RunningServer) -> None:
    with client(server) as socket:
        socket.send(type="start", id="a", prompt="x" * server.options.max_body_bytes)
        assert socket.close_code() == 1009
    idle(server)


def test_other_paths_have_no_websocket(server: RunningServer) -> None:
    with pytest.raises(InvalidStatus) as refused, client(server, "/v1/elsewhere"):
        pass
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == 404


# -- keys and limits


def test_a_key_is_needed_where_keys_are_configured(server: RunningServer) -> None:
    with RunningServer(server.serving.llm, api_key=("mine:secret-key/+",)) as guarded:
        encoded = base64.urlsafe_b64encode(b"secret-key/+").decode().rstrip("=")
        good = [
            {"additional_headers": {"Authorization": "Bearer secret-key/+"}},
            {"subprotocols": ["octavo.v1", f"octavo.key.{encoded}"]},
        ]
        for options in good:
            with client(guarded, **options) as socket:
                assert socket.connection.subprotocol == ("octavo.v1" if "subprotocols" in options else None)
                socket.start("a", prompt=STORY, max_tokens=1, temperature=0)
                socket.rest("a")
        bad: list[dict[str, Any]] = [
            {},
            {"additional_headers": {"Authorization": "Bearer wrong"}},
            {"subprotocols": ["octavo.v1", "octavo.key.d3Jvbmc"]},
            {"subprotocols": ["octavo.v1", "octavo.key.!"]},
        ]
        for options in bad:
            with pytest.raises(InvalidStatus) as refused, client(guarded, **options):
                pass
            assert refused.value.response.status_code == 401
            assert refused.value.response.headers["WWW-Authenticate"] == "Bearer"


def test_requests_of_sockets_count_against_the_limits(server: RunningServer) -> None:
    with RunningServer(server.serving.llm, max_concurrent_requests=1) as small, client(small) as socket:
        socket.start("a", **LONG, credits=1)
        socket.tokens(1)
        socket.send(type="start", id="b", prompt=STORY)
        frame = socket.take("error")
        assert (frame["id"], frame["error"]["code"], frame["retry_after"]) == ("b", 429, 1)
        with small.client() as http:
            assert http.post("/v1/completions", json={"prompt": STORY}).status_code == 429
        socket.send(type="cancel", id="a")
        socket.take("end")
        socket.start("b", prompt=STORY, max_tokens=1, temperature=0)
        socket.rest("b")
    idle(server)


def test_one_socket_runs_a_bounded_number_of_requests(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_REQUESTS", 2)
    with client(server) as socket:
        for id_ in ("a", "b"):
            socket.start(id_, **LONG, credits=1)
            socket.tokens(1)
        socket.send(type="start", id="c", prompt=STORY)
        assert socket.error("c")["code"] == 429
    idle(server)


def test_too_many_sockets_are_told_to_come_back(server: RunningServer) -> None:
    with (
        RunningServer(server.serving.llm, max_connections=4) as small,
        client(small),
        client(small),
        client(small) as last,
    ):
        assert last.close_code() == 1013


def test_a_server_that_drains_ends_sockets_when_their_requests_have_ended(server: RunningServer) -> None:
    with RunningServer(server.serving.llm) as ending, client(ending) as socket, client(ending) as quiet:
        socket.start("a", prompt=STORY, max_tokens=40, temperature=0, ignore_eos=True, credits=1)
        socket.tokens(1)
        quiet.start("b", prompt=STORY, max_tokens=1, temperature=0)
        quiet.rest("b")
        ending.signal(15)
        assert quiet.close_code() == 1012
        socket.send(type="start", id="late", prompt=STORY)
        assert socket.error("late")["code"] == 503
        socket.send(type="credit", id="a", tokens=100)
        deltas, end = socket.rest("a")
        assert sum(delta["tokens"] for delta in deltas) == 39
        assert end["finish_reason"] == "length"
        assert socket.close_code() == 1012
        assert ending.wait() == 0
