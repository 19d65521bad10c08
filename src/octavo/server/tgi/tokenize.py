"""The routes that only tokenise: ``/tokenize``, which TGI and vLLM both have, and ``/chat_tokenize``."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import TYPE_CHECKING

from octavo.errors import OctavoError
from octavo.server.endpoints import long_json_response
from octavo.server.failures import ClientGone
from octavo.server.openai.chat import chat_prompt
from octavo.server.openai.errors import OPENAI
from octavo.server.openai.prompts import LONG_TEXT
from octavo.server.openai.schemas_chat import ChatRequest
from octavo.server.openai.tokenize import tokenize as vllm_tokenize
from octavo.server.tgi.dialect import template_failure
from octavo.server.tgi.schemas import ChatTokenizeResponse, GenerateRequest, SimpleToken
from octavo.server.tgi.shapes import Shape, shape_of
from octavo.server.tgi.validation import Limits, validate

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.frontend.tokenizer import Tokenizer
    from octavo.server.call import Call

__all__ = ["chat_tokenize", "simple_tokens", "tokenize"]


async def tokenize(call: Call) -> Response:
    """POST /tokenize: a body with ``inputs`` is TGI's; any other is vLLM's and answered as vLLM does, errors too."""
    if shape_of(await call.body()) is Shape.generate:
        return await _tokenize(call)
    try:
        return await vllm_tokenize(call)
    except ClientGone:
        raise
    except Exception as error:
        return OPENAI.failure_response(call.failed(error), call)


async def _tokenize(call: Call) -> Response:
    """The tokens of the input, of which ``truncate`` keeps the last."""
    request = await call.read(GenerateRequest)
    asked = validate(request, Limits.of(call.serving))
    tokens = await _simple_tokens(call.serving.llm.get_tokenizer(), asked.inputs)
    kept = tokens if asked.truncate is None else tokens[-asked.truncate :]
    return await long_json_response(lambda: kept, len(kept))


async def chat_tokenize(call: Call) -> Response:
    """POST /chat_tokenize: the prompt that ``/v1/chat/completions`` would make of the same body, and its tokens."""
    request = await call.read(ChatRequest)
    call.serving.check_model(request.model)
    try:
        text, _ = await chat_prompt(call.serving, request, fits=False)
    except OctavoError as error:
        raise template_failure(str(error)) from error
    tokenizer = call.serving.llm.get_tokenizer()
    tokens = await _simple_tokens(tokenizer, text, add_special_tokens=bool(request.add_special_tokens))
    return await long_json_response(lambda: ChatTokenizeResponse(tokens, text), len(tokens))


async def _simple_tokens(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[SimpleToken]:
    """The tokens of a text, read in a worker thread when it is long, so that the event loop goes on serving others."""
    if len(text) > LONG_TEXT:
        return await asyncio.to_thread(simple_tokens, tokenizer, text, add_special_tokens=add_special_tokens)
    return simple_tokens(tokenizer, text, add_special_tokens=add_special_tokens)


def simple_tokens(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[SimpleToken]:
    """The tokens of a text and where each lies in its UTF-8 bytes. A token the tokenizer adds lies at 0 to 0."""
    found = tokenizer.encode_with_offsets(text, add_special_tokens)
    if text.isascii():
        return [SimpleToken(token, text[start:stop], start, stop) for token, start, stop in found]
    places = [0, *accumulate(len(character.encode()) for character in text)]
    return [SimpleToken(token, text[start:stop], places[start], places[stop]) for token, start, stop in found]
