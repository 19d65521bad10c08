"""``/vertex``: several inputs in one request, in the shape of Google's Vertex AI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.server.endpoints import json_response
from octavo.server.tgi.dialect import invalid
from octavo.server.tgi.generate import generate_whole, prepare, together
from octavo.server.tgi.schemas import GenerateRequest, Parameters, VertexRequest, VertexResponse

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.server.call import Call

__all__ = ["vertex"]


async def vertex(call: Call) -> Response:
    """POST /vertex: the text generated for each instance. All are valid or none is begun."""
    request = await call.read(VertexRequest)
    most = call.serving.options.max_client_batch_size
    if not 0 < len(request.instances) <= most:
        raise invalid(f"`instances` must have from 1 to {most} items. Given: {len(request.instances)}", "instances")
    prepared = [
        await prepare(call, GenerateRequest(inputs=instance.inputs, parameters=_sampling(instance.parameters)))
        for instance in request.instances
    ]
    answers = await call.until_gone(together([generate_whole(call, item) for item in prepared]))
    return json_response(VertexResponse([response.generated_text for response, _ in answers]))


def _sampling(parameters: Parameters | None) -> Parameters | None:
    """The parameters of an instance: here TGI samples also when some are given, unless told not to."""
    if parameters is not None and parameters.do_sample is None:
        parameters.do_sample = True
    return parameters
