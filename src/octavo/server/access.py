"""Tells the log and the metrics of each answered request, once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.server.call import Call

__all__ = ["report"]


def report(call: Call, method: str, path: str, route: str, status: int, size: int) -> None:
    """``route`` is the path as its endpoint has it, ``status`` 499 when the client left, ``size`` the answer's bytes."""
    seconds = time.monotonic() - call.arrival
    record, serving = call.record, call.serving
    observer = serving.observer
    if observer is not None:
        observer.http_request(method, route, status, seconds, record.body_bytes, size)
        if call.gone:
            observer.client_gone()
