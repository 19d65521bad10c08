"""A trace of each request reaches an OTLP collector, goes on from the client's, and no collector can harm serving."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from octavo.errors import ConfigError, ParameterError
from octavo.frontend.outputs import RequestMetrics
from octavo.observability.access import AccessRecord
from octavo.observability.tracing import Tracer
from octavo.sampling.params import SamplingParams

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """An OTLP/HTTP receiver that keeps what it gets."""

    def __init__(self, status: int = 200) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def spans(self) -> dict[str, Span]:
        found = [
            span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def ended(failure: str | None = None) -> AccessRecord:
    now = time.monotonic()
    return AccessRecord(
        request_id="req-1",
        method="POST",
        path="/v1/completions",
        route="/v1/completions",
        status=200,
        arrival=now - 10,
        end=now - 1,
        model="smollm2",
        prompt_tokens=40,
        generated_tokens=17,
        generations=1,
        finish_reason="stop",
        failure=failure,
        times=RequestMetrics(now - 9.5, now - 9, now - 7, now - 3, now - 2),
        params=SamplingParams(temperature=0.5, top_p=0.9, max_tokens=20, n=2),
    )


def values(span: Span) -> dict[str, object]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_a_request_is_one_span_with_its_phases_inside(collector: Collector) -> None:
    tracer = Tracer.connect(collector.url, service_name="my-octavo", version="1.0")
    before = time.time()
    tracer.request(ended(), {})
    tracer.close()
    assert [path for path, _ in collector.requests] == ["/v1/traces"]
    spans = collector.spans()
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    whole = spans["llm_request"]
    assert whole.parent_span_id == b""
    assert whole.kind == Span.SPAN_KIND_SERVER
    for name, seconds in (("queue", 0.5), ("prefill", 2), ("decode", 4)):
        child = spans[name]
        assert (child.trace_id, child.parent_span_id) == (whole.trace_id, whole.span_id)
        assert (child.end_time_unix_nano - child.start_time_unix_nano) / 1e9 == pytest.approx(seconds, abs=1e-4)
        assert whole.start_time_unix_nano <= child.start_time_unix_nano
        assert child.end_time_unix_nano <= whole.end_time_unix_nano
    assert abs(whole.start_time_unix_nano / 1e9 + 10 - before) < 5  # times of day, not of the machine's start
    found = values(whole)
    assert found["gen_ai.request.id"] == "req-1"
    assert found["gen_ai.response.model"] == "smollm2"
    assert found["gen_ai.usage.prompt_tokens"] == 40
    assert found["gen_ai.usage.completion_tokens"] == 17
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.n"]) == (20, 2)
    latencies = {name: found[f"gen_ai.latency.{name}"] for name in ("e2e", "time_in_queue", "time_to_first_token")}
    assert latencies == pytest.approx({"e2e": 9, "time_in_queue": 0.5, "time_to_first_token": 2.5})
    assert found["gen_ai.latency.time_in_model_inference"] == pytest.approx(6)
    assert found["octavo.finish_reason"] == "stop"
    resource = {
        item.key: item.value.string_value for item in collector.requests[0][1].resource_spans[0].resource.attributes
    }
    assert resource["service.name"] == "my-octavo"


def test_the_trace_of_the_client_goes_on(collector: Collector) -> None:
    tracer = Tracer.connect(collector.url + "/v1/traces")
    tracer.request(ended("timeout"), {"traceparent": PARENT, "tracestate": "vendor=1"})
    tracer.close()
    whole = collector.spans()["llm_request"]
    assert whole.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert whole.parent_span_id.hex() == "b7ad6b7169203331"
    assert whole.trace_state == "vendor=1"
    assert whole.status.code == 2
    assert values(whole)["error.type"] == "timeout"


def test_a_client_that_does_not_sample_is_not_traced_and_a_broken_header_starts_a_trace(collector: Collector) -> None:
    tracer = Tracer.connect(collector.url)
    tracer.request(ended(), {"traceparent": PARENT[:-1] + "0"})
    tracer.request(ended(), {"traceparent": "00-garbage"})
    tracer.close()
    assert collector.spans()["llm_request"].parent_span_id == b""


def test_requests_that_generate_nothing_are_not_traced(collector: Collector) -> None:
    tracer = Tracer.connect(collector.url)
    now = time.monotonic()
    tracer.request(
        AccessRecord(
            request_id="x", method="GET", path="/health", route="/health", status=200, arrival=now - 1, end=now
        ),
        {},
    )
    tracer.close()
    assert collector.requests == []


def test_a_collector_that_refuses_or_is_down_harms_nothing() -> None:
    refusing = Collector(status=400)
    tracer = Tracer.connect(refusing.url)
    for _ in range(10):
        tracer.request(ended(), {})
    tracer.close()
    refusing.close()
    assert refusing.requests
    tracer = Tracer.connect(refusing.url)  # nobody listens there any more
    tracer.request(ended(), {})
    tracer.close()


def test_a_fault_in_tracing_is_logged_once(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer.connect(collector.url)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            tracer.request(ended(), None)  # type: ignore[arg-type]
    assert len(caplog.records) == 1
    tracer.close()


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"octavo\[otel\]"):
        Tracer.connect("http://127.0.0.1:4318")


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ParameterError, match="otlp_endpoint"):
        Tracer.connect(endpoint)
