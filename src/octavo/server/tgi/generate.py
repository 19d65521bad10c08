"""The routes that generate: ``/generate``, ``/generate_stream`` and ``/``, answering at the end or token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import Response

from octavo.server.endpoints import json_response
from octavo.server.failures import Failure, Kind
from octavo.server.openai.prompts import LONG_TEXT
from octavo.server.sse import sse_response
from octavo.server.tgi.answers import (
    EventWriter,
    Generated,
    answer,
    best_first,
    compute_headers,
    timing_headers,
)
from octavo.server.tgi.dialect import error_event, invalid
from octavo.server.tgi.schemas import GenerateRequest, GenerateResponse
from octavo.server.tgi.validation import Asked, Limits, validate

if TYPE_CHECKING:
    from octavo.server.call import Call

__all__ = [
    "Prepared",
    "compat_generate",
    "generate",
    "generate_stream",
    "generate_whole",
    "prepare",
    "together",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is valid: its prompt as tokens, and how many tokens it may generate."""

    asked: Asked
    token_ids: list[int]
    max_new: int


async def prepare(
    call: Call, request: GenerateRequest, *, streaming: bool = False, return_full_text: bool = False
) -> Prepared:
    """Validate a request and tokenise its input; what is wrong is a Failure in TGI's words."""
    limits = Limits.of(call.serving)
    asked = validate(request, limits, streaming=streaming, return_full_text=return_full_text)
    tokenizer = call.serving.llm.get_tokenizer()
    encode = tokenizer.encode
    least = tokenizer.least_tokens(asked.inputs)
    if least and asked.truncate is None:
        asked.check_length(least, limits)  # before it costs the time to encode
    if len(asked.inputs) > LONG_TEXT:
        token_ids = await asyncio.to_thread(encode, asked.inputs)
    else:
        token_ids = encode(asked.inputs)
    return Prepared(asked, *asked.fit(token_ids, limits))


async def generate(call: Call) -> Response:
    """POST /generate: one object."""
    request = await call.read(GenerateRequest)
    if request.stream:
        raise invalid("`stream` is for POST / and not for /generate: use /generate_stream", "stream")
    prepared = await prepare(call, request)
    response, headers = await generate_whole(call, prepared)
    return json_response(response, headers=headers)


async def generate_stream(call: Call) -> Response:
    """POST /generate_stream: server-sent events."""
    request = await call.read(GenerateRequest)
    if request.stream is False:
        raise invalid("`stream` cannot be false for /generate_stream: use /generate", "stream")
    return await _stream(call, await prepare(call, request, streaming=True))


async def compat_generate(call: Call) -> Response:
    """POST /: an array of one object, or server-sent events with ``stream``; the prompt is part of the text."""
    request = await call.read(GenerateRequest)
    if request.stream:
        return await _stream(call, await prepare(call, request, streaming=True, return_full_text=True))
    prepared = await prepare(call, request, return_full_text=True)
    response, headers = await generate_whole(call, prepared)
    return json_response([response], headers=headers)


async def generate_whole(call: Call, prepared: Prepared) -> tuple[GenerateResponse, dict[str, str]]:
    """The answer and its headers, when everything is generated."""
    asked = prepared.asked
    if asked.best_of == 1:
        sequences = [await _run(call, prepared)]
    else:
        # Requests of their own, as in TGI: the seed reported for each gives its text again.
        sequences = best_first(await together([_run(call, prepared) for _ in range(asked.best_of)]))
    best = sequences[0]
    metrics = best.output.metrics
    assert metrics is not None
    headers = timing_headers(asked, best, metrics, arrival=call.arrival, now=time.monotonic())
    return answer(asked, sequences, call.serving.llm.get_tokenizer()), headers


async def _run(call: Call, prepared: Prepared) -> Generated:
    """Generate one sequence to its end."""
    asked = prepared.asked
    seed = asked.draw_seed()
    params = asked.sampling_params(prepared.max_new, seed, logprobs=asked.details or asked.best_of > 1)
    generated: Generated | None = None
    async for output in call.generate({"prompt_token_ids": prepared.token_ids}, params, kind="final"):
        generated = Generated(output, prepared.max_new, seed)
    if generated is None:
        raise Failure(Kind.internal, "the generation ended without an answer")
    return generated


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Do all at once; when one fails or the caller is cancelled, none goes on."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _stream(call: Call, prepared: Prepared) -> Response:
    return await sse_response(
        call, _events(call, prepared), on_failure=error_event, headers=compute_headers(prepared.asked)
    )


async def _events(call: Call, prepared: Prepared) -> AsyncIterator[bytes]:
    asked = prepared.asked
    seed = asked.draw_seed()
    params = asked.sampling_params(prepared.max_new, seed, logprobs=True)
    tokenizer = call.serving.llm.get_tokenizer()
    writer = EventWriter(asked, tokenizer, prepared.token_ids, prepared.max_new, seed)
    async with aclosing(call.generate({"prompt_token_ids": prepared.token_ids}, params)) as outputs:
        async for output in outputs:
            events = writer.events(output.outputs[0])
            if events:
                yield events
    if not writer.ended:
        raise Failure(Kind.internal, "the generation ended before its last token", code="aborted")
