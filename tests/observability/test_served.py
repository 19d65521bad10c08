"""The metrics, logs and traces of a real server add up, over aborts, refusals and a killed engine."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from octavo.observability.endpoint import CONTENT_TYPE
from tests.observability.scene import Reading
from tests.observability.test_tracing import PARENT, Collector
from tests.server.running import RunningServer

PROMPT = "Once upon a time there was a"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[RunningServer]:
    options = {"served_model_name": "the-model", "max_concurrent_requests": 8, "otlp_endpoint": collector.url}
    with RunningServer(separate_process=True, **options) as running:
        yield running


def read(server: RunningServer) -> Reading:
    with server.client() as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == CONTENT_TYPE
    return Reading(answer.text)


def wait(server: RunningServer, reached: Callable[[Reading], bool]) -> Reading:
    for _ in range(300):
        seen = read(server)
        if reached(seen):
            return seen
        time.sleep(0.1)
    raise AssertionError(read(server).text)


def complete(server: RunningServer, **body: object) -> httpx.Response:
    with server.client() as client:
        return client.post("/v1/completions", json={"model": "the-model", "prompt": PROMPT, **body})


def ended(seen: Reading) -> float:
    return sum(seen.by("vllm:request_success_total", "finished_reason").values())


def leave_a_stream(server: RunningServer) -> None:
    """Read the beginning of an answer and close the connection."""
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())


def test_a_request_adds_exactly_what_it_is(server: RunningServer) -> None:
    before = read(server)
    answer = complete(server, max_tokens=9, ignore_eos=True).json()
    after = wait(server, lambda seen: ended(seen) > ended(before))

    def added(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    usage = answer["usage"]
    assert added("vllm:prompt_tokens_total") == usage["prompt_tokens"] > 0
    assert added("vllm:generation_tokens_total") == usage["completion_tokens"] == 9
    assert added("vllm:inter_token_latency_seconds_count") == 8
    assert added("vllm:request_success_total", finished_reason="length") == 1
    assert added("octavo:step_tokens_total", kind="prefill") == usage["prompt_tokens"]
    assert added("octavo:step_tokens_total", kind="decode") == 8
    assert added("vllm:iteration_tokens_total_sum") == usage["prompt_tokens"] + 8
    assert after.all("vllm:num_requests_running", model_name="the-model")
    for name in ("tgi_request_count", "tgi_request_success", "vllm:time_to_first_token_seconds_count"):
        assert added(name) == 1
    assert after("http_requests_total", handler="/v1/completions", method="POST", status="2xx") >= 1
    phases = [added("octavo:step_phase_seconds_sum", phase=phase) for phase in ("schedule", "execute", "process")]
    assert all(seconds > 0 for seconds in phases)
    assert sum(phases) <= added("octavo:engine_busy_seconds_total") * 1.01 + 1e-3


def test_an_abort_is_counted_and_the_gauges_go_back_without_further_traffic(server: RunningServer) -> None:
    before = read(server)
    leave_a_stream(server)
    after = wait(server, lambda seen: ended(seen) > ended(before))
    aborts = "vllm:request_success_total"
    assert after(aborts, finished_reason="abort") - before(aborts, finished_reason="abort") == 1
    gone = wait(
        server, lambda seen: seen("octavo:client_disconnects_total") > before("octavo:client_disconnects_total")
    )
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert gone(name) == 0
    assert gone("octavo:requests_in_flight") == gone("tgi_batch_current_size") == 0


def test_refusals_are_counted_by_reason_and_reach_no_engine(server: RunningServer) -> None:
    before = read(server)
    assert complete(server, max_tokens=-1).status_code == 400
    assert complete(server, model="other").status_code == 404
    after = read(server)
    for reason in ("invalid", "not_found"):
        assert sum(value for _, value in after.all("octavo:refused_requests_total", reason=reason)) - sum(
            value for _, value in before.all("octavo:refused_requests_total", reason=reason)
        ) == pytest.approx(1), reason
    assert after("octavo:accepted_requests_total") == before("octavo:accepted_requests_total")
    assert ended(after) == ended(before)


def test_nothing_falls_and_everything_adds_up_when_the_engine_is_killed(server: RunningServer) -> None:
    before = read(server)
    pid = server.serving.llm.engine_info.pid
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(complete, server, max_tokens=150, ignore_eos=True, seed=n) for n in range(4)]
        wait(server, lambda seen: seen("vllm:num_requests_running") >= 1)
        os.kill(pid, signal.SIGKILL)
        middle = wait(
            server, lambda seen: seen("octavo:engine_restarts_total") > before("octavo:engine_restarts_total")
        )
        answers = [future.result().json() for future in running]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [150] * 4
    after = wait(server, lambda seen: seen("octavo:requests_in_flight") == 0)
    for first, second in ((before, middle), (middle, after)):
        falling = [
            key
            for key, value in first.series.items()
            if key[0].endswith(("_total", "_count", "_sum", "_bucket"))
            and not key[0].startswith(("process_", "python_", "octavo_engine_process"))
            and second.series.get(key, 0.0) < value
        ]
        assert falling == []
    assert after("octavo:engine_up") == 1
    assert after("octavo:replays_total") - before("octavo:replays_total") >= 1
    assert after("vllm:generation_tokens_total") - before("vllm:generation_tokens_total") == 4 * 150
    assert after("octavo:accepted_requests_total") == ended(after)
    assert after("vllm:e2e_request_latency_seconds_count") == ended(after)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert after(name) == 0
    assert after("octavo:metric_faults_total") == 0


def test_the_access_line_says_what_happened_and_not_what_was_said(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "octavo.access"), server.client() as client:
        body = {"prompt": "my secret is 1234", "max_tokens": 4, "ignore_eos": True}
        headers = {"X-Request-Id": "mine-1", "Authorization": "Bearer hidden"}
        client.post("/v1/completions?key=hidden", json=body, headers=headers)
        for _ in range(50):
            found = [line for line in caplog.records if getattr(line, "fields", {}).get("request_id") == "mine-1"]
            if found:
                break
            time.sleep(0.1)
    (line,) = found
    fields = line.fields  # type: ignore[attr-defined]
    assert line.getMessage() == "POST /v1/completions 200"
    assert (fields["generated_tokens"], fields["finish_reason"]) == (4, "length")
    assert fields["prompt_tokens"] > 0
    parts = fields["queue_ms"] + fields["prefill_ms"] + fields["decode_ms"]
    assert 0 < parts <= fields["total_ms"]
    said = json.dumps(fields) + line.getMessage()
    assert "secret" not in said
    assert "hidden" not in said


def test_the_trace_of_a_request_reaches_the_collector(server: RunningServer, collector: Collector) -> None:
    with server.client(headers={"traceparent": PARENT, "X-Request-Id": "traced-1"}) as client:
        assert client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}).status_code == 200
    wanted = bytes.fromhex(PARENT.split("-")[1])
    for _ in range(100):
        spans = [
            span
            for _, request in collector.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.trace_id == wanted
        ]
        if spans:
            break
        time.sleep(0.1)
    assert {span.name for span in spans} == {"llm_request", "queue", "prefill", "decode"}
