"""TGI's routes where the model says what the test wants: characters in pieces, limits, overload, and failures."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from octavo.backends.interface import SampledToken
from octavo.frontend.async_llm import AsyncLLM
from tests.frontend.fakes import Script, ScriptBackend, load_fake, says
from tests.server.running import RunningServer


@contextmanager
def serving(script: Script | ScriptBackend, **options: Any) -> Iterator[RunningServer]:
    llm = AsyncLLM.from_loaded(load_fake(script))
    try:
        with RunningServer(llm, **options) as running:
            yield running
    finally:
        llm.shutdown()


def assert_(condition: bool) -> None:
    assert condition


class Gate(ScriptBackend):
    """Goes on with a step only when the gate is open."""

    def __init__(self, script: Script, **more: Any) -> None:
        super().__init__(script, **more)
        self.open = threading.Event()
        self.before_step = lambda step: assert_(self.open.wait(30))


class Breaks(ScriptBackend):
    """Fails a sequence at its n-th token."""

    def __init__(self, after: int) -> None:
        super().__init__(says("x" * 100))
        self.after = after

    def _sample(self, known: list[int], prompt: int) -> SampledToken:
        if len(known) - prompt >= self.after:
            return SampledToken(0, 0.0, 0, [], "logits are not finite")
        return super()._sample(known, prompt)


def post(server: RunningServer, path: str, parameters: dict[str, Any] | None = None, **more: Any) -> httpx.Response:
    body: dict[str, Any] = {"inputs": "Q:"}
    if parameters is not None:
        body["parameters"] = parameters
    with server.client() as client:
        return client.post(path, json=body, **more)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("text", ["naïve", "🙂🙃", "日本語のテキスト"])
def test_half_a_character_is_never_sent_and_the_events_add_up(text: str) -> None:
    with serving(says(text)) as server:
        whole = post(server, "/generate", {"details": True}).json()
        streamed = events(post(server, "/generate_stream", {}))
    assert whole["generated_text"] == text
    assert whole["details"]["finish_reason"] == "eos_token"
    for tokens in (whole["details"]["tokens"], [event["token"] for event in streamed]):
        assert "".join(token["text"] for token in tokens if not token["special"]) == text
        assert len(tokens) == len(text.encode()) + 1


@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        ("one END two", ["END"], "one END"),
        ("one EN", ["END"], "one EN"),
        ("aaab", ["aab"], "aaab"),
        ("one\ntwo", ["\n"], "one\n"),
        ("first second", ["second", "st s"], "first s"),
        ("日本語", ["本"], "日本"),
    ],
)
def test_a_stop_sequence_ends_the_text_wherever_its_tokens_begin(said: str, stop: list[str], text: str) -> None:
    with serving(says(said)) as server:
        whole = post(server, "/generate", {"stop": stop, "details": True}).json()
        streamed = events(post(server, "/generate_stream", {"stop": stop, "details": True}))
    reason = "stop_sequence" if any(text.endswith(item) for item in stop) else "eos_token"
    assert (whole["generated_text"], whole["details"]["finish_reason"]) == (text, reason)
    assert (streamed[-1]["generated_text"], streamed[-1]["details"]["finish_reason"]) == (text, reason)
    assert "".join(event["token"]["text"] for event in streamed if not event["token"]["special"]) == text


def endless(known: Sequence[int], prompt: int) -> int:
    return ord("x")


def test_without_a_number_of_tokens_the_answer_fills_what_the_limits_leave() -> None:
    with serving(endless, max_total_tokens=40, max_input_tokens=10) as server:
        answer = post(server, "/generate", {"details": True}).json()
        assert answer["generated_text"] == "x" * 37  # 40 less the three tokens of <bos>Q:
        assert answer["details"]["finish_reason"] == "length"
        too_long = post(server, "/generate", {"max_new_tokens": 38})
        assert too_long.json()["error"] == (
            "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 40. "
            "Given: 3 `inputs` tokens and 38 `max_new_tokens`"
        )
        with server.client() as client:
            assert client.get("/info").json()["max_input_tokens"] == 10
            refused = client.post("/generate", json={"inputs": "elevenchars"})
        assert refused.json()["error"] == "Input validation error: `inputs` must have less than 10 tokens. Given: 12"


def test_the_limits_are_those_the_server_was_started_with() -> None:
    with serving(says("Hi"), max_best_of=1, max_stop_sequences=1, max_top_n_tokens=0) as server:
        for parameters, said in (
            ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not allowed for this endpoint"),
            ({"stop": ["a", "b"]}, "`stop` supports up to 1 stop sequences. Given: 2"),
            ({"top_n_tokens": 1}, "`top_n_tokens` must be >= 0 and <= 0. Given: 1"),
        ):
            assert post(server, "/generate", parameters).json()["error"] == f"Input validation error: {said}"


def test_one_request_too_many_is_refused_at_once() -> None:
    backend = Gate(says("Hi"))
    with serving(backend, max_concurrent_requests=1) as server:
        first: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: first.append(post(server, "/generate")))
        thread.start()
        while server.serving.llm.num_running == 0:
            thread.join(0.01)
        for path in ("/generate", "/generate_stream", "/", "/invocations"):
            response = post(server, path)
            assert response.status_code == 429
            assert response.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
            assert int(response.headers["retry-after"]) >= 1
        with server.client() as client:  # what generates nothing is answered
            assert client.get("/info").status_code == 200
            assert client.post("/tokenize", json={"inputs": "Q:"}).status_code == 200
        backend.open.set()
        thread.join(30)
        assert first[0].json() == {"generated_text": "Hi"}


def test_a_generation_that_fails_is_a_424() -> None:
    with serving(Breaks(0)) as server:
        for path in ("/generate", "/generate_stream"):
            response = post(server, path)
            assert response.status_code == 424
            assert response.json()["error_type"] == "generation"
            assert response.json()["error"].startswith("Request failed during generation: ")


def test_a_stream_that_fails_later_ends_with_an_event() -> None:
    seen = threading.Event()
    backend = Breaks(3)
    backend.before_step = lambda step: None if step < 4 else assert_(seen.wait(30))
    with (
        serving(backend) as server,
        server.client() as client,
        client.stream("POST", "/generate_stream", json={"inputs": "Q:"}) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        first = json.loads(next(lines)[6:])
        seen.set()
        rest = [json.loads(line[6:]) for line in lines]
    assert response.status_code == 200
    *tokens, last = [first, *rest]
    assert "".join(event["token"]["text"] for event in tokens) == "xxx"
    assert last == {"error": last["error"], "error_type": "generation"}
    assert last["error"].startswith("Request failed during generation: ")


def test_a_generation_that_is_aborted_is_incomplete() -> None:
    backend = Gate(endless)
    with serving(backend) as server:
        answers: list[httpx.Response] = []
        headers = {"X-Request-Id": "mine"}
        thread = threading.Thread(target=lambda: answers.append(post(server, "/generate", headers=headers)))
        thread.start()
        while server.serving.llm.num_running == 0:
            thread.join(0.01)
        assert server.call(lambda: server.serving.llm.abort("mine"))
        backend.open.set()
        thread.join(30)
    assert answers[0].status_code == 500
    assert answers[0].json() == {"error": "Incomplete generation", "error_type": "incomplete_generation"}


def test_a_stream_that_is_aborted_ends_with_an_event_that_says_so() -> None:
    seen = threading.Event()
    backend = ScriptBackend(endless)
    backend.before_step = lambda step: None if step < 4 else assert_(seen.wait(30))
    with (
        serving(backend) as server,
        server.client() as client,
        client.stream("POST", "/generate_stream", json={"inputs": "Q:"}, headers={"X-Request-Id": "mine"}) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        assert json.loads(next(lines)[6:])["index"] == 1
        assert server.call(lambda: server.serving.llm.abort("mine"))
        seen.set()
        rest = [json.loads(line[6:]) for line in lines]
    assert rest[-1] == {"error": "Incomplete generation stream", "error_type": "incomplete_generation_stream"}


def test_both_generations_of_best_of_end_when_the_client_goes() -> None:
    backend = ScriptBackend(endless)
    backend.before_step = lambda step: time.sleep(0.02)
    with serving(backend) as server:
        body = json.dumps({"inputs": "Q:", "parameters": {"best_of": 2, "do_sample": True}}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        with server.connect() as connection:
            connection.sendall(head.encode() + body)
            while server.serving.llm.num_running < 2:
                assert backend.steps < 200
                time.sleep(0.005)
        while server.serving.llm.num_running > 0:
            assert backend.steps < 200  # or the context would be filled
            time.sleep(0.005)


def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    backend = Gate(says("Hi"))
    with (
        serving(backend, sse_keep_alive=0.05) as server,
        server.client() as client,
        client.stream("POST", "/generate_stream", json={"inputs": "Q:"}) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith(":")
        backend.open.set()
        rest = [line for line in lines if line.startswith("data: ")]
    assert json.loads(rest[-1][6:])["generated_text"] == "Hi"


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}])
def test_without_the_key_the_answer_is_an_empty_401(header: dict[str, str]) -> None:
    with serving(says("Hi"), api_key=["right"]) as server:
        for path in ("/", "/generate", "/generate_stream", "/invocations", "/vertex", "/tokenize", "/chat_tokenize"):
            response = post(server, path, headers=header)
            assert (response.status_code, response.content) == (401, b"")
        assert post(server, "/generate", headers={"Authorization": "Bearer right"}).status_code == 200
        with server.client() as client:
            assert client.get("/").status_code == 200


def test_a_server_that_is_shutting_down_says_so() -> None:
    with serving(says("Hi")) as server:
        server.serving.draining = True
        response = post(server, "/generate")
        assert (response.status_code, response.json()["error_type"]) == (503, "healthcheck")
        assert "retry-after" in response.headers


def test_a_dead_engine_is_unhealthy() -> None:
    def explode(step: int) -> None:
        raise RuntimeError("broken")

    backend = ScriptBackend(says("Hi"))
    backend.before_step = explode
    with serving(backend) as server:
        assert post(server, "/generate").status_code == 503
        with server.client() as client:
            response = client.get("/")
        assert (response.status_code, response.json()) == (503, {"error": "unhealthy", "error_type": "healthcheck"})
