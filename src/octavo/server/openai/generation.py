"""What chat and text completions share around the engine: ids, labels, running one or several prompts, fingerprint."""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from octavo.backends.cpu.backend import instruction_set
from octavo.server.openai.parameters import priority_of

if TYPE_CHECKING:
    from octavo.frontend.options import EngineOptions
    from octavo.frontend.output_processor import OutputKind
    from octavo.frontend.outputs import RequestOutput
    from octavo.sampling.params import SamplingParams
    from octavo.server.call import Call
    from octavo.server.openai.prompts import EncodedPrompt
    from octavo.server.openai.schemas import GenerationRequest
    from octavo.server.serving import Serving

__all__ = ["Labels", "collect", "fingerprint", "merge", "start"]


@dataclass(frozen=True, slots=True)
class Labels:
    """What every event of an answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def of(cls, call: Call, request: GenerationRequest, model: str, prefix: str) -> Labels:
        """The id is the client's own (header, then field) behind the prefix of the kind of answer, or a fresh one."""
        given = "x-request-id" in call.request.headers
        own = call.request_id if given or request.request_id is None else request.request_id
        return cls(
            f"{prefix}-{own}", int(time.time()), model, fingerprint(call.serving.version, call.serving.options.engine)
        )


@lru_cache(maxsize=8)
def fingerprint(version: str, engine: EngineOptions) -> str:
    """Changes when answers to the same seed may: with the version, the model, its form, or the instruction set."""
    facts = (version, engine.model, engine.quantization, engine.kv_cache_dtype, instruction_set())
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:10]


def start(
    call: Call,
    request: GenerationRequest,
    prompts: Sequence[EncodedPrompt],
    params: Sequence[SamplingParams],
    labels: Labels,
    kind: OutputKind,
) -> list[AsyncGenerator[RequestOutput, None]]:
    """The generations of the prompts; nothing runs before they are read."""
    priority = priority_of(request, call.request.headers.get("x-vllm-priority"))
    base = labels.id
    if request.request_id is not None and any(one.startswith(base) for one in _running_ids(call.serving)):
        base = f"{base}-{uuid.uuid4().hex[:8]}"  # another client chose the same id: the answer has it all the same
    generations = []
    for place, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
        ids = {"prompt_token_ids": prompt.token_ids, "cache_salt": request.cache_salt}
        name = base if len(prompts) == 1 else f"{base}-{place}"
        generations.append(call.generate(ids, its_params, request_id=name, priority=priority, kind=kind))
    return generations


def _running_ids(serving: Serving) -> Iterator[str]:
    for same in serving.calls.values():
        for call in same:
            yield from call.engine_ids


async def collect(generations: Sequence[AsyncGenerator[RequestOutput, None]]) -> list[RequestOutput]:
    """The last output of each generation; when one fails or the caller leaves, all end."""
    found: list[RequestOutput | None] = [None] * len(generations)
    async for place, output in merge(generations):
        found[place] = output
    return [output for output in found if output is not None]


async def merge(
    generations: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of all generations as they come, each with its place; when one fails or the reader leaves, all end.

    At most one output of each generation is taken ahead of the reader, so a slow reader is felt by all of them.
    """
    if len(generations) == 1:
        (only,) = generations
        try:
            async for output in only:
                yield 0, output
        finally:
            await only.aclose()
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(1)

    async def read(place: int, generation: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async for output in generation:
                await queue.put((place, output))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)
        finally:
            await generation.aclose()

    tasks = [asyncio.ensure_future(read(place, generation)) for place, generation in enumerate(generations)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
