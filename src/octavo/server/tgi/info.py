"""The routes that say what is served: ``/info``, and TGI's state of health at ``/``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from octavo.server.endpoints import json_response
from octavo.server.tgi.schemas import ErrorResponse, Info
from octavo.server.tgi.validation import Limits

if TYPE_CHECKING:
    from octavo.server.call import Call

__all__ = ["health", "info"]


async def info(call: Call) -> Response:
    """GET /info."""
    serving = call.serving
    limits = Limits.of(serving)
    return json_response(
        Info(
            model_id=serving.model_names[0],
            model_sha=None,
            model_pipeline_tag="text-generation",
            max_concurrent_requests=serving.options.max_concurrent_requests,
            max_best_of=limits.max_best_of,
            max_stop_sequences=limits.max_stop_sequences,
            max_input_tokens=limits.max_input_tokens,
            max_total_tokens=limits.max_total_tokens,
            validation_workers=1,
            max_client_batch_size=serving.options.max_client_batch_size,
            router="octavo",
            version=serving.version,
            sha=None,
            docker_label=None,
        )
    )


async def health(call: Call) -> Response:
    """GET / of programs: an empty 200 while the engine lives."""
    if call.serving.service.engine_alive:
        return Response(status_code=200)
    return json_response(ErrorResponse("unhealthy", "healthcheck"), 503)
