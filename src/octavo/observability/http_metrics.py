"""What the HTTP layer counts: requests, durations and sizes, under the names of vLLM's instrumentation."""

from __future__ import annotations

from octavo.observability.buckets import HTTP, HTTP_FINE
from octavo.observability.exposition import Family, histogram, label_text, labelled
from octavo.observability.instruments import Histogram, merged
from octavo.observability.numbers import Snapshot

__all__ = ["HttpMetrics"]

# Not counted, as in vLLM: routes that machines poll.
_POLLED = frozenset({"/metrics", "/health", "/ready", "/ping", "/version"})


class HttpMetrics:
    """Written under a lock by the event loops that serve, read by whoever scrapes."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, ...], float] = {}
        self.durations: dict[tuple[str, str], Histogram] = {}
        self.fine = Histogram(HTTP_FINE)
        self.request_sizes: dict[str, tuple[int, int]] = {}
        self.response_sizes: dict[str, tuple[int, int]] = {}

    def observe(
        self, method: str, handler: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Count one request. Unknown methods and paths share a label each: clients must not be able to add series."""
        if handler in _POLLED:
            return
        if method not in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"):
            method = "other"
        key = (handler, method, f"{status // 100}xx")
        self.requests[key] = self.requests.get(key, 0) + 1
        durations = self.durations.get((handler, method))
        if durations is None:
            durations = self.durations[handler, method] = Histogram(merged(HTTP))
        durations.observe(seconds)
        self.fine.observe(seconds)
        for sizes, size in ((self.request_sizes, request_bytes), (self.response_sizes, response_bytes)):
            count, total = sizes.get(handler, (0, 0))
            sizes[handler] = (count + 1, total + size)

    def families(self) -> list[Family]:
        """The names of the FastAPI instrumentation, with as many series as there were routes, methods and statuses."""
        requests = labelled(
            "http_requests_total",
            "counter",
            "Total number of requests by method, status and handler.",
            ("handler", "method", "status"),
            lambda snapshot: self.requests,
        )
        durations = [
            ({"handler": handler, "method": method}, [shown])
            for (handler, method), shown in self.durations.copy().items()
        ]
        return [
            requests,
            _sizes("http_request_size_bytes", "Content length of incoming requests by handler.", self.request_sizes),
            _sizes("http_response_size_bytes", "Content length of outgoing answers by handler.", self.response_sizes),
            histogram(
                "http_request_duration_highr_seconds",
                "Latency with many buckets, of all routes.",
                HTTP_FINE,
                ({}, [self.fine]),
            ),
            histogram("http_request_duration_seconds", "Latency with few buckets, by handler.", HTTP, *durations),
        ]


def _sizes(name: str, text: str, sizes: dict[str, tuple[int, int]]) -> Family:
    def write(out: list[str], snapshot: Snapshot) -> None:
        for handler, (count, total) in sizes.copy().items():
            shown = label_text({"handler": handler})
            out.append(f"{name}_count{shown} {count}.0\n{name}_sum{shown} {total}.0\n")

    return Family(name, "summary", text, write)
