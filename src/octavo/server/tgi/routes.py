"""The routes of Text Generation Inference's own interface; what it has under /v1 is the OpenAI dialect's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.server.endpoints import Endpoint, Handler
from octavo.server.openai.schemas_chat import ChatAnswer, ChatRequest
from octavo.server.openai.schemas_completions import CompletionAnswer, CompletionRequest
from octavo.server.openai.tokenize import TokenizeAnswer, TokenizeRequest
from octavo.server.tgi import schemas
from octavo.server.tgi.dialect import TGI
from octavo.server.tgi.generate import compat_generate, generate, generate_stream
from octavo.server.tgi.info import health, info
from octavo.server.tgi.sagemaker import invocations
from octavo.server.tgi.tokenize import chat_tokenize, tokenize
from octavo.server.tgi.vertex import vertex

if TYPE_CHECKING:
    from octavo.server.serving import Serving

__all__ = ["endpoints"]

STREAM = "text/event-stream"


def endpoints(serving: Serving) -> list[Endpoint]:
    """The routes of this dialect."""
    request = schemas.GenerateRequest
    return [
        _generating(
            "/",
            compat_generate,
            "Generate an array of one text, or a stream",
            request,
            (list[schemas.GenerateResponse], STREAM),
        ),
        _generating("/generate", generate, "Generate a text", request, schemas.GenerateResponse),
        _generating("/generate_stream", generate_stream, "Generate a stream of tokens", request, STREAM),
        _generating(
            "/invocations",
            invocations,
            "Generate, chat or complete, whichever the body asks for",
            (request, ChatRequest, CompletionRequest),
            (list[schemas.GenerateResponse], ChatAnswer, CompletionAnswer, STREAM),
        ),
        _generating("/vertex", vertex, "Generate for several inputs", schemas.VertexRequest, schemas.VertexResponse),
        Endpoint(
            method="POST",
            path="/tokenize",
            handler=tokenize,
            dialect=TGI,
            summary="The tokens of a text, as TGI (`inputs`) or as vLLM (`prompt` or `messages`)",
            body=(request, TokenizeRequest),
            answer=(list[schemas.SimpleToken], TokenizeAnswer),
        ),
        Endpoint(
            method="POST",
            path="/chat_tokenize",
            handler=chat_tokenize,
            dialect=TGI,
            summary="The prompt of a conversation and its tokens",
            body=ChatRequest,
            answer=schemas.ChatTokenizeResponse,
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
