"""The routes that only tokenise: ``/tokenize``, which TGI and vLLM both have, and ``/chat_tokenize``."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from octavo.server.endpoints import json_response
from octavo.server.tgi.schemas import GenerateRequest, SimpleToken
from octavo.server.tgi.validation import Limits, validate

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.frontend.tokenizer import Tokenizer
    from octavo.server.call import Call

__all__ = ["simple_tokens", "tokenize"]


async def tokenize(call: Call) -> Response:
    """POST /tokenize: the tokens of the input, of which ``truncate`` keeps the last."""
    request = await call.read(GenerateRequest)
    asked = validate(request, Limits.of(call.serving))
    tokens = simple_tokens(call.serving.llm.get_tokenizer(), asked.inputs)
    return json_response(tokens if asked.truncate is None else tokens[-asked.truncate :])


def simple_tokens(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[SimpleToken]:
    """The tokens of a text and where each lies in its UTF-8 bytes. A token the tokenizer adds lies at 0 to 0."""
    found = tokenizer.encode_with_offsets(text, add_special_tokens)
    if text.isascii():
        return [SimpleToken(token, text[start:stop], start, stop) for token, start, stop in found]
    places = [0, *accumulate(len(character.encode()) for character in text)]
    return [SimpleToken(token, text[start:stop], places[start], places[stop]) for token, start, stop in found]
