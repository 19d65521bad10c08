"""``/vertex``: several inputs or conversations in one request, in the shape of Google's Vertex AI."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo.server.endpoints import json_response
from octavo.server.openai.chat import prepare as prepare_chat
from octavo.server.openai.generation import collect, start
from octavo.server.openai.schemas_chat import ChatRequest
from octavo.server.tgi.dialect import invalid
from octavo.server.tgi.generate import generate_whole, prepare, together
from octavo.server.tgi.schemas import GenerateRequest, VertexInstance, VertexRequest, VertexResponse
from octavo.server.tgi.shapes import Shape, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from starlette.responses import Response

    from octavo.server.call import Call

__all__ = ["vertex"]


async def vertex(call: Call) -> Response:
    """POST /vertex: the text generated for each instance. All are valid or none is begun."""
    request = await call.read(VertexRequest)
    most = call.serving.options.max_client_batch_size
    if not 0 < len(request.instances) <= most:
        raise invalid(f"`instances` must have from 1 to {most} items. Given: {len(request.instances)}", "instances")
    works = [await _prepare(call, bytes(instance)) for instance in request.instances]
    return json_response(VertexResponse(await together([work() for work in works])))


async def _prepare(call: Call, instance: bytes) -> Callable[[], Coroutine[Any, Any, str]]:
    """Check one instance; gives what generates its text."""
    if shape_of(instance) is Shape.chat:
        chat = msgspec.json.decode(instance, type=ChatRequest)
        if chat.stream:
            raise invalid("`stream` is not for /vertex", "stream")
        plan = await prepare_chat(call, chat)

        async def answer_chat() -> str:
            (output,) = await collect(start(call, chat, [plan.prompt], [plan.params], plan.labels, "final"))
            return output.outputs[0].text

        return answer_chat
    prepared = await prepare(call, _sampling(msgspec.json.decode(instance, type=VertexInstance)))

    async def answer() -> str:
        response, _ = await generate_whole(call, prepared)
        return response.generated_text

    return answer


def _sampling(instance: VertexInstance) -> GenerateRequest:
    """An instance as a request: here TGI samples also when parameters are given, unless told not to."""
    parameters = instance.parameters
    if parameters is not None and parameters.do_sample is None:
        parameters.do_sample = True
    return GenerateRequest(inputs=instance.inputs, parameters=parameters)
