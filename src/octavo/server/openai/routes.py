"""The routes of the OpenAI dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.server.endpoints import Endpoint
from octavo.server.openai.chat import chat
from octavo.server.openai.completions import completions
from octavo.server.openai.embeddings import EmbeddingAnswer, EmbeddingRequest, embeddings
from octavo.server.openai.errors import OPENAI
from octavo.server.openai.models import ModelCard, ModelList, get_model, list_models
from octavo.server.openai.schemas_chat import ChatAnswer, ChatRequest
from octavo.server.openai.schemas_completions import CompletionAnswer, CompletionRequest
from octavo.server.openai.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    detokenize,
    tokenize,
)

if TYPE_CHECKING:
    from octavo.server.serving import Serving

__all__ = ["endpoints"]


def endpoints(serving: Serving) -> list[Endpoint]:
    """Every route of the dialect but ``POST /tokenize``, which it shares with TGI's and which theirs answers."""
    found = [
        Endpoint(
            method="POST", path="/v1/chat/completions", handler=chat, dialect=OPENAI, generates=True,
            summary="Answer a conversation, whole or as a stream of server-sent events",
            body=ChatRequest, answer=ChatAnswer,
        ),
        Endpoint(
            method="POST", path="/v1/completions", handler=completions, dialect=OPENAI, generates=True,
            summary="Continue one or several prompts, whole or as a stream of server-sent events",
            body=CompletionRequest, answer=CompletionAnswer,
        ),
        Endpoint(
            method="POST", path="/v1/embeddings", handler=embeddings, dialect=OPENAI, generates=True,
            summary="The vectors of texts, where an encoder is served", body=EmbeddingRequest, answer=EmbeddingAnswer,
        ),
        Endpoint(
            method="GET", path="/v1/models", handler=list_models, dialect=OPENAI,
            summary="The names the model is served under", answer=ModelList,
        ),
        Endpoint(
            method="GET", path="/v1/models/{id:path}", handler=get_model, dialect=OPENAI,
            summary="One of the names the model is served under", answer=ModelCard,
        ),
        Endpoint(
            method="POST", path="/v1/tokenize", handler=tokenize, dialect=OPENAI,
            summary="The token ids of a text or a conversation", body=TokenizeRequest, answer=TokenizeAnswer,
        ),
    ]  # fmt: skip
    found += [
        Endpoint(
            method="POST", path=path, handler=detokenize, dialect=OPENAI,
            summary="The text of token ids", body=DetokenizeRequest, answer=DetokenizeAnswer,
        )
        for path in ("/detokenize", "/v1/detokenize")
    ]  # fmt: skip
    return found
