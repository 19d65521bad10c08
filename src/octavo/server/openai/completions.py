"""/v1/completions: texts or token ids in, what follows them out, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from octavo.errors import ParameterError
from octavo.server.endpoints import json_response
from octavo.server.failures import Failure, Kind
from octavo.server.openai.errors import error_events, read_body
from octavo.server.openai.generation import Labels, collect, merge, start
from octavo.server.openai.logprobs import LogprobWriter, prompt_logprobs_json
from octavo.server.openai.parameters import (
    check_common,
    check_logprobs,
    number_of_choices,
    requested_tokens,
    sampling_params,
)
from octavo.server.openai.prompts import EncodedPrompt, as_prompts, check_length, encode_prompts, fit_context
from octavo.server.openai.schemas import refuse_not_built
from octavo.server.openai.schemas_completions import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from octavo.server.openai.streaming import DONE, Chunks, Delta, Pending, Progress
from octavo.server.openai.usage import usage_of
from octavo.server.sse import sse_response

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.frontend.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.sampling.params import SamplingParams
    from octavo.server.call import Call

__all__ = ["completions", "prepare"]

DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class _Plan:
    """A request that has been checked and whose prompts are ready.

    ``echoes`` holds the texts of the prompts with ``echo``, else nothing in their places. With ``generates`` false
    (``max_tokens`` 0 with ``echo``) the one token the engine makes is dropped.
    """

    request: CompletionRequest
    labels: Labels
    prompts: list[EncodedPrompt]
    echoes: list[str]
    params: list[SamplingParams]
    n: int
    generates: bool
    writer: LogprobWriter | None


async def completions(call: Call) -> Response:
    """The handler of ``/v1/completions``."""
    request = await read_body(call, CompletionRequest)
    plan = await prepare(call, request)
    if request.stream:
        generations = start(call, request, plan.prompts, plan.params, plan.labels, "delta")
        return await sse_response(call, _events(plan, generations), on_failure=error_events)
    generations = start(call, request, plan.prompts, plan.params, plan.labels, "final")
    outputs = await call.until_gone(collect(generations))
    return json_response(_answer(plan, outputs))


# -- from the body to what the engine runs


async def prepare(call: Call, request: CompletionRequest) -> _Plan:
    """Check a request and make ready what the engine runs; anything wrong with it is a failure."""
    serving = call.serving
    llm, options = serving.llm, serving.options
    model = call.record.model = serving.check_model(request.model)
    refuse_not_built(request)
    check_common(request, max_logprobs=options.engine.max_logprobs)
    texts = as_prompts(request.prompt)
    if len(texts) > options.max_client_batch_size:
        raise ParameterError("prompt", len(texts), f"at most {options.max_client_batch_size} prompts")
    n = number_of_choices(request, prompts=len(texts), best_of=request.best_of)
    best_of = request.best_of if request.best_of != n else None
    if best_of is not None and request.stream:
        raise Failure(Kind.invalid, f"best_of must equal n ({n}) when `stream=True`.", param="best_of")
    logprobs = request.logprobs
    if logprobs is not None:
        check_logprobs("logprobs", logprobs, options.engine.max_logprobs)
    requested = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    requested_tokens("max_tokens", requested, least=0 if request.echo else 1)
    tokenizer = llm.get_tokenizer()
    for text in texts:
        if isinstance(text, str):
            check_length(tokenizer, text, request, requested, llm.max_model_len)
    prompts = await encode_prompts(
        tokenizer, texts, add_special_tokens=request.add_special_tokens is not False, vocab_size=llm.vocab_size
    )
    for prompt in prompts:
        fit_context(prompt, request, requested, llm.max_model_len)
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is None and request.echo:
        prompt_logprobs = logprobs
    params = sampling_params(
        request,
        llm.get_default_sampling_params(),
        n=n,
        best_of=best_of,
        max_tokens=max(1, requested),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    shows_special = request.skip_special_tokens is False
    return _Plan(
        request=request,
        labels=Labels.of(call, request, model, "cmpl"),
        prompts=prompts,
        echoes=[prompt.read(tokenizer, not shows_special) if request.echo else "" for prompt in prompts],
        params=[params] * len(prompts),
        n=n,
        generates=requested > 0,
        writer=None
        if logprobs is None
        else LogprobWriter(tokenizer, logprobs, as_ids=bool(request.return_tokens_as_token_ids)),
    )


# -- from what the engine made to the answer


class _Choice:
    """One choice: puts the prompt before its text and its log-probabilities where that is asked for."""

    __slots__ = ("_echo", "_generates", "_offset", "_prompt", "_writer", "begun")

    def __init__(self, plan: _Plan, prompt: int) -> None:
        self.begun = False
        self._echo = plan.echoes[prompt]
        self._prompt = plan.prompts[prompt] if plan.request.echo else None
        self._generates = plan.generates
        self._writer = plan.writer
        self._offset = 0

    def read(
        self, delta: Delta, prompt_logprobs: Sequence[dict[int, Logprob] | None] | None
    ) -> tuple[str, CompletionLogprobs | None]:
        """The text to send, and its log-probabilities."""
        text, token_ids, positions = delta.text, delta.token_ids, delta.logprobs
        if not self._generates:
            text, token_ids, positions = "", (), ()
        first, self.begun = not self.begun, True
        if first and self._prompt is not None:
            text = self._echo + text
            token_ids = [*self._prompt.token_ids, *token_ids]
            positions = [*(prompt_logprobs or ()), *(positions or ())]  # type: ignore[list-item]
        if self._writer is None:
            return text, None
        found, self._offset = self._writer.completion(token_ids, positions or (), self._offset)
        return text, found


def _drop(output: CompletionOutput) -> CompletionOutput:
    """The output without the token that was made only because the engine makes one at least."""
    output.text, output.token_ids = "", []
    output.logprobs = None if output.logprobs is None else []
    if output.finish_reason is not None:
        output.finish_reason, output.stop_reason = "length", None
    return output


def _answer(plan: _Plan, outputs: Sequence[RequestOutput]) -> CompletionAnswer:
    request, labels = plan.request, plan.labels
    choices: list[CompletionChoice] = []
    generated = cached = 0
    for place, output in enumerate(outputs):
        cached += output.num_cached_tokens
        for completion in output.outputs:
            if not plan.generates:
                completion = _drop(completion)
            generated += len(completion.token_ids)
            text, logprobs = _Choice(plan, place).read(Delta(completion), output.prompt_logprobs)
            choices.append(
                CompletionChoice(
                    index=len(choices),
                    text=text,
                    logprobs=logprobs,
                    finish_reason=completion.finish_reason or "stop",
                    stop_reason=completion.stop_reason,
                    token_ids=completion.token_ids if request.return_token_ids else UNSET,
                    prompt_token_ids=plan.prompts[place].token_ids if request.return_token_ids else UNSET,
                    prompt_logprobs=UNSET
                    if request.prompt_logprobs is None
                    else prompt_logprobs_json(output.prompt_logprobs),
                )
            )
    return CompletionAnswer(
        id=labels.id,
        created=labels.created,
        model=labels.model,
        choices=choices,
        usage=usage_of(sum(len(prompt.token_ids) for prompt in plan.prompts), generated, cached),
        system_fingerprint=labels.fingerprint,
    )


async def _events(plan: _Plan, generations: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncIterator[bytes]:
    """The events of a stream: those of all prompts and choices as they come."""
    writer = _EventWriter(plan)
    if len(generations) == 1:
        async with aclosing(generations[0]) as only:
            async for output in only:
                events = writer.events(0, output)
                if events:
                    yield events
    else:
        async with aclosing(merge(generations)) as outputs:  # type: ignore[type-var]
            async for place, output in outputs:
                events = writer.events(place, output)
                if events:
                    yield events
    yield writer.end()


class _EventWriter:
    """Turns outputs into the events of one stream."""

    def __init__(self, plan: _Plan) -> None:
        request, labels, n = plan.request, plan.labels, plan.n
        self._plan = plan
        self._chunks = Chunks.completions(labels.id, labels.created, labels.model, labels.fingerprint)
        options = request.stream_options
        self._with_usage = options is not None and options.usage
        self._continuous = options is not None and options.continuous
        self._with_ids = bool(request.return_token_ids)
        self._textual = plan.writer is None and not self._with_ids  # tokens without text make no event
        interval = request.stream_interval or 1
        # Choices whose events hold the new text and nothing else, once the first has been written.
        self._plain = self._textual and not self._continuous and interval == 1 and plan.generates
        self._progress = Progress([len(prompt.token_ids) for prompt in plan.prompts], n)
        self._choices = [_Choice(plan, place) for place in range(len(plan.prompts)) for _ in range(n)]
        self._pending = [Pending(interval) for _ in self._choices]
        self._prompt_logprobs: list[Any] = [None] * len(plan.prompts)

    def events(self, place: int, output: RequestOutput) -> bytes:
        """The events an output makes, often one, sometimes none."""
        frames = []
        progress = self._progress
        progress.cached[place] = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[place] = output.prompt_logprobs  # told once, needed by every choice
        for completion in output.outputs:
            index = place * self._plan.n + completion.index
            if self._plain and completion.finish_reason is None and self._choices[index].begun:
                progress.tokens[index] += len(completion.token_ids)
                if completion.text:
                    frames.append(self._chunks.text(index, completion.text))
                continue
            event = self._event(place, index, completion)
            if event:
                frames.append(event)
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _event(self, place: int, index: int, completion: CompletionOutput) -> bytes:
        plan, progress, choice = self._plan, self._progress, self._choices[index]
        if not plan.generates:
            completion = _drop(completion)
        progress.advance(index, completion)
        delta = self._pending[index].take(completion)
        if delta is None:
            return b""
        first = not choice.begun
        text, logprobs = choice.read(delta, self._prompt_logprobs[place])
        if delta.finish_reason is None and self._textual:
            if not text:
                return b""  # half a character, or what may become a stop string
            if not self._continuous:
                return self._chunks.text(index, text)
        extras: dict[str, Any] = {}
        if self._with_ids:
            if first:
                extras["prompt_token_ids"] = plan.prompts[place].token_ids
            extras["token_ids"] = delta.token_ids
        return self._chunks.choice(
            index,
            text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            extras=extras,
            usage=progress.of_choice(index) if self._continuous else None,
            last=progress.running == 0 and not self._with_usage,
        )

    def end(self) -> bytes:
        """What ends the stream."""
        return self._chunks.usage(self._progress.total()) + DONE if self._with_usage else DONE
