"""Traces over OTLP: for each request that generated, a span with its queue, prefill and decode inside.

The spans of a request are made when it has ended, of the times it has anyhow; a thread of the exporter sends them in
batches. When the collector does not answer they are dropped: serving does not wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from octavo.errors import ConfigError, ParameterError
from octavo.observability.access import AccessRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Tracer"]

_log = logging.getLogger(__name__)

_PATH = "/v1/traces"
_EXPORT_SECONDS = 10  # longest it is tried to send a batch
_CLOSE_SECONDS = 2.0


class Tracer:
    """Makes the spans of requests and hands them to the exporter; see `connect`."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter) -> None:
        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("octavo")
        self._broken = False

    @classmethod
    def connect(cls, endpoint: str, *, service_name: str = "octavo", version: str = "") -> Tracer:
        """Send traces to ``endpoint``, the URL of an OTLP/HTTP collector; without a path, to its ``/v1/traces``.

        Nothing is sent yet, so a collector that is down is no error. ``ConfigError`` when the extra is not installed,
        ``ParameterError`` when the endpoint is no URL.
        """
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ParameterError("otlp_endpoint", endpoint, "an http:// or https:// URL, such as http://127.0.0.1:4318")
        if parts.path in ("", "/"):
            parts = parts._replace(path=_PATH)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f'traces need the extra "otel": pip install "octavo[otel]", or leave otlp_endpoint out ({error})'
            ) from error
        resource = Resource.create({"service.name": service_name, "service.version": version})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=urlunsplit(parts), timeout=_EXPORT_SECONDS)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, exporter)

    def request(self, record: AccessRecord, headers: Mapping[str, str]) -> None:
        """Trace a request that has ended; ``headers`` are those it came with, ``traceparent`` among them."""
        if record.generations == 0 and record.times is None:
            return
        try:
            self._trace(record, headers)
        except Exception:
            if not self._broken:
                self._broken = True
                _log.exception("a request could not be traced; others may not be either, serving goes on")

    def _trace(self, record: AccessRecord, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        wall = time.time() - time.monotonic()

        def nanoseconds(moment: float) -> int:
            return int((moment + wall) * 1e9)

        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        parent = TraceContextTextMapPropagator().extract(carrier)
        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=nanoseconds(record.arrival),
        )
        inside = set_span_in_context(span)
        for name in ("queue", "prefill", "decode"):
            times = getattr(record.spans, name)
            if times is not None:
                start, end = times
                child = self._tracer.start_span(name, context=inside, start_time=nanoseconds(start))
                child.end(nanoseconds(end))
        if record.failure is not None:
            span.set_status(Status(StatusCode.ERROR, record.failure))
        span.end(nanoseconds(record.end))

    def close(self) -> None:
        """Send what is still to be sent, as far as that takes a few seconds, and stop."""
        closing = threading.Thread(target=self._shutdown, name="octavo-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():  # the collector is down: the exporter would go on trying
            self._exporter.shutdown()
            closing.join(_CLOSE_SECONDS)

    def _shutdown(self) -> None:
        try:
            self._provider.shutdown()
        except Exception:
            _log.exception("the exporter of traces could not be closed")


def _attributes(record: AccessRecord) -> dict[str, Any]:
    """vLLM's names where it has one (seconds, tokens), OpenTelemetry's for HTTP, octavo's own for the rest."""
    spans, times, params = record.spans, record.times, record.params
    found: dict[str, Any] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.response.model": record.model,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.generated_tokens,
        "gen_ai.latency.e2e": record.seconds,
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "octavo.cached_tokens": record.cached_tokens,
        "octavo.finish_reason": record.finish_reason,
        "octavo.tenant": record.tenant,
        "error.type": record.failure,
    }
    if params is not None:
        found |= {
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.n": params.n,
        }
    if times is not None:
        found["gen_ai.latency.time_to_first_token"] = times.time_to_first_token
    for name, span in (("queue", spans.queue), ("model_prefill", spans.prefill), ("model_decode", spans.decode)):
        if span is not None:
            found[f"gen_ai.latency.time_in_{name}"] = span[1] - span[0]
    if spans.prefill is not None and spans.decode is not None:
        found["gen_ai.latency.time_in_model_inference"] = spans.decode[1] - spans.prefill[0]
    return {name: value for name, value in found.items() if value is not None}
