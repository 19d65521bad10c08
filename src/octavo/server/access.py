"""Tells the log, the metrics and the trace of each request that has ended, once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo.observability.access import AccessRecord
from octavo.observability.logs import log_access

if TYPE_CHECKING:
    from octavo.server.call import Call

__all__ = ["report"]

# Asked every few seconds by machines; a line is worth writing when something is wrong.
_POLLED = frozenset({"/health", "/ready", "/ping", "/metrics"})


def report(call: Call, method: str, path: str, route: str, status: int, size: int) -> None:
    """``route`` is the path as its endpoint has it, ``status`` 499 when the client left, ``size`` bytes of answer."""
    known, serving = call.record, call.serving
    end = time.monotonic()
    record = AccessRecord(
        request_id=call.request_id,
        method=method,
        path=path,
        route=route,
        status=status,
        arrival=call.arrival,
        end=end,
        model=known.model,
        tenant=call.tenant,
        prompt_tokens=known.prompt_tokens,
        cached_tokens=known.cached_tokens,
        generated_tokens=known.generated_tokens,
        generations=known.generations,
        finish_reason=",".join(sorted(known.finish_reasons)) or None,
        failure=None if known.failure is None else str(known.failure.kind),
        response_bytes=size,
        times=known.times,
        params=known.params,
    )
    if serving.options.access_log and (route not in _POLLED or status >= 400):
        log_access(record)
    if serving.tracer is not None:
        serving.tracer.request(record, call.request.headers)
    if serving.observer is not None:
        serving.observer.http_request(method, route, status, end - call.arrival, known.body_bytes, size)
        if call.gone:
            serving.observer.client_gone()
