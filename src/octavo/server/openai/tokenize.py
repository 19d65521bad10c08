"""/tokenize and /detokenize as vLLM has them: text or a conversation to token ids, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from octavo.server.endpoints import long_json_response
from octavo.server.failures import Failure, Kind
from octavo.server.openai.chat import chat_prompt
from octavo.server.openai.errors import read_body
from octavo.server.openai.prompts import check_ids, encode_prompts
from octavo.server.openai.schemas import refuse_not_built
from octavo.server.openai.schemas_chat import ChatRequest, Message

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.server.call import Call

__all__ = ["DetokenizeAnswer", "DetokenizeRequest", "TokenizeAnswer", "TokenizeRequest", "detokenize", "tokenize"]


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/tokenize``: ``prompt`` or ``messages``, the latter with the fields that shape a chat's prompt.

    ``add_special_tokens`` is true by default for a prompt and false for messages, whose template writes them.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Not built.
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    tools: Any = None


class TokenizeAnswer(Struct):
    """The answer of ``/tokenize``; ``token_strs`` are the tokens as the vocabulary spells them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/detokenize``."""

    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(Struct):
    """The answer of ``/detokenize``."""

    prompt: str


_CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")


async def tokenize(call: Call) -> Response:
    """The handler of ``/tokenize``."""
    request = await read_body(call, TokenizeRequest)
    serving = call.serving
    serving.check_model(request.model)
    refuse_not_built(request)
    if (request.prompt is None) == (request.messages is None):
        raise Failure(Kind.invalid, "Either prompt or messages must be provided, and not both.", param="prompt")
    tokenizer = serving.service.get_tokenizer()
    if request.messages is None:
        for field in _CHAT_FIELDS:
            if getattr(request, field):
                raise Failure(Kind.invalid, f"{field} belongs to messages, and there are none", param=field)
        assert request.prompt is not None
        (prompt,) = await encode_prompts(
            tokenizer,
            [request.prompt],
            add_special_tokens=request.add_special_tokens is not False,
            vocab_size=serving.service.vocab_size,
        )
        tokens = prompt.token_ids
    else:
        _, tokens = await chat_prompt(
            serving,
            ChatRequest(
                messages=request.messages,
                add_special_tokens=request.add_special_tokens,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                chat_template=request.chat_template,
                chat_template_kwargs=request.chat_template_kwargs,
            ),
            fits=False,
        )

    def answer() -> TokenizeAnswer:
        spelled = [tokenizer.id_to_token(token) for token in tokens] if request.return_token_strs else None
        return TokenizeAnswer(len(tokens), serving.service.max_model_len, tokens, spelled)

    return await long_json_response(answer, len(tokens))


async def detokenize(call: Call) -> Response:
    """The handler of ``/detokenize``."""
    request = await read_body(call, DetokenizeRequest)
    serving = call.serving
    serving.check_model(request.model)

    def answer() -> DetokenizeAnswer:
        check_ids(request.tokens, serving.service.vocab_size, "tokens")
        return DetokenizeAnswer(serving.service.get_tokenizer().decode(request.tokens, skip_special_tokens=False))

    return await long_json_response(answer, len(request.tokens))
