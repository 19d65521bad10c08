"""What the WebSocket refuses: wrong frames, unknown keys, and more than the limits allow; nothing sent breaks it."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed, InvalidStatus

from octavo.server import websocket
from tests.server.running import RunningServer
from tests.server.websocket_client import LONG, STORY, client, idle

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
        with suppress(ConnectionClosed):  # the server may close before all of it is sent
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
