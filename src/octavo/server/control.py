"""Routes that act on what runs: cancelling a request by its id, forgetting cached prefixes, reading the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from octavo.observability.endpoint import CONTENT_TYPE, metrics_text
from octavo.server.endpoints import Endpoint, NestedDialect, json_response
from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from octavo.server.call import Call
    from octavo.server.serving import Serving

__all__ = ["Cancelled", "PrefixCacheReset", "endpoints"]


class Cancelled(msgspec.Struct):
    """A request that was cancelled."""

    id: str
    cancelled: bool


class PrefixCacheReset(msgspec.Struct):
    """Whether the cached prefixes were forgotten: not while requests run that use them."""

    reset: bool


def _is_of(wanted: str, call: Call, engine_id: str) -> bool:
    """Whether an id names a call, one of its generations, or the answer its generations are numbered for."""
    if wanted in (engine_id, call.request_id):
        return True
    base, _, number = engine_id.rpartition("-")
    return base == wanted and number.isdecimal() and engine_id != call.request_id


async def _cancel(call: Call) -> Response:
    """End the generations of a call, or the one that has the id; a key's calls are its own."""
    wanted: str = call.request.path_params["id"]
    serving = call.serving
    found: list[tuple[Call, str]] = []
    for same in serving.calls.values():
        for other in same:
            if other is not call and other.tenant == call.tenant:
                found.extend((other, one) for one in other.engine_ids if _is_of(wanted, other, one))
    ended = False
    for other, one in found:
        ended |= await serving.llm.abort(one)
        other.wake()
    if not ended:
        raise Failure(Kind.not_found, f"No request {wanted[:200]} is running.", param="id", code="request_not_found")
    return json_response(Cancelled(wanted, True))


async def _reset_prefix_cache(call: Call) -> Response:
    return json_response(PrefixCacheReset(await call.serving.llm.reset_prefix_cache()))


async def _metrics(call: Call) -> Response:
    if call.serving.observer is None:
        raise Failure(Kind.not_found, "This server was started without metrics.", code="not_found")
    return Response(metrics_text(call.serving.observer), headers={"Content-Type": CONTENT_TYPE})


def endpoints(serving: Serving) -> list[Endpoint]:
    """The routes of this file."""
    plain = NestedDialect()
    return [
        Endpoint(
            method="POST",
            path="/v1/requests/{id}/cancel",
            handler=_cancel,
            dialect=plain,
            summary="End a running request; its id is its X-Request-Id or the id in its answer",
            answer=Cancelled,
        ),
        Endpoint(
            method="POST",
            path="/reset_prefix_cache",
            handler=_reset_prefix_cache,
            dialect=plain,
            summary="Forget the cached prefixes",
            answer=PrefixCacheReset,
        ),
        Endpoint(
            method="GET",
            path="/metrics",
            handler=_metrics,
            dialect=plain,
            summary="Counters and histograms for Prometheus",
            answer="text/plain",
        ),
    ]
