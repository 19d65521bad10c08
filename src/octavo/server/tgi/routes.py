"""The routes of Text Generation Inference's own interface; what it has under /v1 is the OpenAI dialect's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.server.endpoints import Endpoint, Handler
from octavo.server.tgi import schemas
from octavo.server.tgi.dialect import TGI
from octavo.server.tgi.generate import compat_generate, generate, generate_stream
from octavo.server.tgi.info import health, info
from octavo.server.tgi.tokenize import tokenize
from octavo.server.tgi.vertex import vertex

if TYPE_CHECKING:
    from octavo.server.serving import Serving

__all__ = ["endpoints"]


def endpoints(serving: Serving) -> list[Endpoint]:
    """The routes of this dialect."""
    request, response = schemas.GenerateRequest, schemas.GenerateResponse
    return [
        _generating(
            "/",
            compat_generate,
            "Generate, answering with an array or a stream",
            request,
            list[response],
        ),
        _generating("/generate", generate, "Generate a text", request, response),
        _generating("/generate_stream", generate_stream, "Generate a stream of tokens", request, "text/event-stream"),
        _generating("/vertex", vertex, "Generate for several inputs", schemas.VertexRequest, schemas.VertexResponse),
        Endpoint(
            method="POST",
            path="/tokenize",
            handler=tokenize,
            dialect=TGI,
            summary="The tokens of a text",
            body=request,
            answer=list[schemas.SimpleToken],
        ),
        Endpoint(
            method="GET",
            path="/info",
            handler=info,
            dialect=TGI,
            summary="What is served and its limits",
            answer=schemas.Info,
        ),
        Endpoint(
            method="GET", path="/", handler=health, dialect=TGI, summary="200 while the engine lives", guarded=False
        ),
    ]


def _generating(path: str, handler: Handler, summary: str, body: Any, answer: Any) -> Endpoint:
    return Endpoint(
        method="POST",
        path=path,
        handler=handler,
        dialect=TGI,
        summary=summary,
        body=body,
        answer=answer,
        generates=True,
    )
