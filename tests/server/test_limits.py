"""Limits: requests at once in all and for each key, the queue, and the deadlines of waiting and of the whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.server.failures import Failure
from octavo.server.limits import Admission
from tests.server.scripted import ScriptedServer, alphabet, body, finish, generate, post, status_of

CLOSE = "Connection: close"


def test_admission_counts_in_all_and_for_each_key() -> None:
    admission = Admission(3, 2)
    for tenant in ("a", "a", None):
        admission.enter(tenant)
    with pytest.raises(Failure, match="at most 3"):
        admission.enter("b")
    admission.leave(None)
    with pytest.raises(Failure, match="with this key"):
        admission.enter("a")
    admission.enter("b")
    for tenant in ("a", "a", "b"):
        admission.leave(tenant)
    assert (admission.active, admission.refused, admission._by_key) == (0, 2, {})


@pytest.fixture
def full() -> Iterator[ScriptedServer]:
    """Two requests run, as many as may."""
    with ScriptedServer(held=True, max_concurrent_requests=2) as server:
        running = [generate(server, "/generate", 5, CLOSE) for _ in range(2)]
        server.until(lambda: server.running.app.admission.active == 2)
        yield server
        server.gate.open()
        assert [status_of(finish(connection)) for connection in running] == [200, 200]
        server.assert_idle()


def test_one_request_too_many_is_refused_in_the_dialects_words(full: ScriptedServer) -> None:
    with full.client() as client:
        tgi = client.post("/generate", json=body())
        assert (tgi.status_code, tgi.headers["retry-after"]) == (429, "1")
        assert tgi.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        openai = client.post("/v1/completions", json={"prompt": "x"})
        assert (openai.status_code, openai.headers["retry-after"]) == (429, "1")
        assert openai.json()["error"]["code"] == 429
        assert client.get("/v1/models").status_code == 200
        assert client.get("/health").status_code == 200


def test_a_place_is_free_again_when_a_stream_ends() -> None:
    with ScriptedServer(max_concurrent_requests=1) as server, server.client() as client:
        for _ in range(3):
            with client.stream("POST", "/generate_stream", json=body()) as stream:
                assert stream.status_code == 200
                stream.read()
            server.until(lambda: server.running.app.admission.active == 0)


def test_one_key_cannot_take_every_place() -> None:
    with ScriptedServer(held=True, api_key=["a:one", "b:two"], max_concurrent_per_key=1) as server:
        keys = {name: f"Authorization: Bearer {key}" for name, key in (("a", "one"), ("b", "two"))}
        running = [generate(server, "/generate", 5, keys["a"], CLOSE)]
        server.until(lambda: server.running.app.admission.active == 1)
        assert status_of(finish(generate(server, "/generate", 5, keys["a"], CLOSE))) == 429
        running.append(generate(server, "/generate", 5, keys["b"], CLOSE))
        server.until(lambda: server.running.app.admission.active == 2)
        server.gate.open()
        assert [status_of(finish(connection)) for connection in running] == [200, 200]


def test_the_queue_is_bounded() -> None:
    with ScriptedServer(held=True, max_num_seqs=1, max_queued_requests=2) as server:
        first = generate(server, "/generate", 5, CLOSE)
        server.until(lambda: server.gate.reached == 1)
        # The engine reports what it has begun at the end of its step.
        server.gate.let(1)
        server.until(lambda: server.serving.llm.num_waiting == 0 and server.gate.reached == 2)
        waiting = []
        for count in (1, 2):
            waiting.append(generate(server, "/generate", 5, CLOSE))
            server.until(lambda count=count: server.serving.llm.num_waiting == count)  # type: ignore[misc]
        refused = finish(generate(server, "/generate", 5, CLOSE))
        assert status_of(refused) == 429
        assert b"retry-after: 1" in refused
        server.gate.open()
        assert [status_of(finish(connection)) for connection in (first, *waiting)] == [200] * 3
        server.assert_idle()


def test_a_request_that_waits_too_long_is_refused_and_one_that_started_is_not() -> None:
    with ScriptedServer(held=True, max_num_seqs=1, queue_timeout=0.2) as server:
        first = generate(server, "/generate", 5, CLOSE)
        server.until(lambda: server.gate.reached == 1)
        server.gate.let(1)
        server.until(lambda: server.gate.reached == 2)
        refused = finish(generate(server, "/generate", 5, CLOSE))
        assert status_of(refused) == 429
        assert b"retry-after: 1" in refused
        with server.client() as client:
            openai = client.post("/v1/completions", json={"prompt": "x", "stream": True})
            assert openai.status_code == 429
            assert "0.2 seconds" in openai.json()["error"]["message"]
        server.gate.open()
        assert status_of(finish(first)) == 200
        server.assert_idle()


def test_a_request_that_takes_too_long_is_504() -> None:
    with ScriptedServer(alphabet, held=True, request_timeout=0.2) as server:
        with server.client() as client:
            response = client.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 504
            assert "0.2 seconds" in response.json()["error"]["message"]
            assert client.post("/generate", json=body()).status_code == 504
        server.gate.open()
        server.assert_idle()


def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    with ScriptedServer(alphabet, held=True, request_timeout=0.5) as server:
        connection = generate(server, "/generate_stream", 50, CLOSE)
        server.gate.let(3)
        answer = finish(connection)
        assert status_of(answer) == 200
        assert answer.count(b'"token"') >= 1
        assert b'"error_type":"timeout"' in answer
        server.gate.open()
        server.assert_idle()


def test_a_cancelled_request_ends_as_aborted_and_frees_its_blocks() -> None:
    with ScriptedServer(alphabet, held=True) as server, server.client() as client:
        streaming = generate(server, "/generate_stream", 50, CLOSE, "X-Request-Id: one")
        server.gate.let(2)
        server.until(lambda: server.gate.reached == 3)
        assert client.post("/v1/requests/one/cancel").json() == {"id": "one", "cancelled": True}
        server.gate.let(1)
        answer = finish(streaming)
        assert status_of(answer) == 200
        server.gate.open()
        server.assert_idle()
        assert client.post("/v1/requests/one/cancel").status_code == 404


def test_a_request_is_cancelled_by_the_id_in_its_answer() -> None:
    with ScriptedServer(alphabet, held=True) as server, server.client() as client:
        asked = {"prompt": "x", "max_tokens": 50, "stream": True}
        server.gate.let(3)
        with client.stream("POST", "/v1/completions", json=asked) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            id_ = first.split('"id":"')[1].split('"')[0]
            with server.client() as other:
                assert other.post(f"/v1/requests/{id_}/cancel").status_code == 200
            server.gate.open()
            assert list(lines)[-2] == "data: [DONE]"
        server.assert_idle()


def test_all_generations_of_an_answer_are_cancelled_by_its_id() -> None:
    with ScriptedServer(alphabet, held=True) as server, server.client() as client:
        streaming = server.connect()
        asked = {"prompt": ["x", "y", "z"], "max_tokens": 100, "request_id": "three", "stream": True}
        streaming.sendall(post("/v1/completions", asked, CLOSE))
        server.until(lambda: server.serving.llm.num_running == 3)
        id_ = next(iter(server.serving.calls.values())).copy().pop().engine_ids[0].rpartition("-")[0]
        assert client.post(f"/v1/requests/{id_}/cancel").status_code == 200
        server.gate.open()
        assert finish(streaming).count(b'"finish_reason":"abort"') == 3
        server.assert_idle()


def test_ids_that_clients_choose_never_clash_in_the_engine() -> None:
    completion = {"prompt": "x", "max_tokens": 5}
    asked = [
        ("/v1/completions", completion | {"prompt": ["x", "y"]}, "X-Request-Id: q"),
        ("/v1/completions", completion, "X-Request-Id: q-0"),  # as the engine calls the first prompt above
        ("/v1/completions", completion | {"request_id": "z"}, "X-Other: 1"),
        ("/v1/completions", completion, "X-Request-Id: z"),
        ("/generate", body(), "X-Request-Id: cmpl-z"),
    ]
    with ScriptedServer(alphabet, held=True) as server:
        running = []
        for place, (path, content, header) in enumerate(asked):
            running.append(server.connect())
            running[-1].sendall(post(path, content, header, CLOSE))
            server.until(lambda wanted=place + 2: server.serving.llm.num_running == wanted)
        server.gate.open()
        assert [status_of(finish(connection)) for connection in running] == [200] * 5
        server.assert_idle()
        assert server.serving.engine_ids == set()


def test_an_id_may_be_used_again_while_the_engine_has_yet_to_drop_the_request_that_had_it() -> None:
    with ScriptedServer(alphabet, held=True) as server:
        first = generate(server, "/generate_stream", 50, "X-Request-Id: again")
        server.gate.let(1)
        server.until(lambda: server.gate.reached == 2)  # and is held, so it takes no command
        first.close()
        server.until(lambda: not server.serving.calls)
        assert server.serving.llm.is_running("again")
        second = generate(server, "/generate", 5, "X-Request-Id: again", CLOSE)
        server.until(lambda: server.serving.llm.num_running == 2)
        server.gate.open()
        assert status_of(finish(second)) == 200
        server.assert_idle()
