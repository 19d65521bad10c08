"""/v1/chat/completions: a conversation in, the next message out, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from octavo.errors import ParameterError
from octavo.server.endpoints import json_response
from octavo.server.failures import Failure, Kind
from octavo.server.openai.errors import error_events, read_body
from octavo.server.openai.generation import Labels, collect, start
from octavo.server.openai.logprobs import LogprobWriter, prompt_logprobs_json
from octavo.server.openai.messages import (
    TemplateTraits,
    check_template_kwargs,
    conversation_of,
    render,
    template_for,
    text_of,
    traits_of,
)
from octavo.server.openai.parameters import (
    check_common,
    check_logprobs,
    number_of_choices,
    requested_tokens,
    sampling_params,
)
from octavo.server.openai.prompts import LONG_TEXT, EncodedPrompt, check_length, fit_context
from octavo.server.openai.schemas import refuse_not_built
from octavo.server.openai.schemas_chat import ChatAnswer, ChatChoice, ChatRequest, ReplyMessage
from octavo.server.openai.streaming import DONE, Chunks, Pending, Progress
from octavo.server.openai.usage import usage_of
from octavo.server.sse import sse_response

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.frontend.output_processor import OutputKind
    from octavo.frontend.outputs import RequestOutput
    from octavo.sampling.params import SamplingParams
    from octavo.server.call import Call
    from octavo.server.openai.schemas_chat import Message
    from octavo.server.serving import Serving

__all__ = ["chat", "chat_prompt", "prepare"]

_encountered: set[str] = set()  # templates of models that have been compiled and tried


@dataclass(slots=True)
class _Plan:
    """A request that has been checked and whose prompt is ready."""

    request: ChatRequest
    labels: Labels
    prompt: EncodedPrompt
    rendered: str
    params: SamplingParams
    n: int
    role: str
    echo: str
    writer: LogprobWriter | None


async def chat(call: Call) -> Response:
    """The handler of ``/v1/chat/completions``."""
    request = await read_body(call, ChatRequest)
    plan = await prepare(call, request)
    kind: OutputKind = "delta" if request.stream else "final"
    (generation,) = start(call, request, [plan.prompt], [plan.params], plan.labels, kind)
    if request.stream:
        return await sse_response(call, _events(plan, generation), on_failure=error_events)
    (output,) = await call.until_gone(collect([generation]))
    return json_response(_answer(plan, output))


# -- from the body to what the engine runs


async def prepare(call: Call, request: ChatRequest) -> _Plan:
    """Check a request and make ready what the engine runs; anything wrong with it is a failure."""
    serving = call.serving
    model = call.record.model = serving.check_model(request.model)
    max_logprobs = serving.options.engine.max_logprobs
    refuse_not_built(request)
    _check_tools(request)
    check_common(request, max_logprobs=max_logprobs)
    n = number_of_choices(request)
    logprobs = _top_logprobs(request, max_logprobs)
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    requested = requested_tokens(field, getattr(request, field))
    rendered, token_ids = await chat_prompt(serving, request, requested)
    prompt = EncodedPrompt(token_ids, rendered)
    fit_context(prompt, request, requested, serving.llm.max_model_len)
    params = sampling_params(
        request,
        serving.llm.get_default_sampling_params(),
        n=n,
        max_tokens=_max_tokens(serving, requested, len(prompt.token_ids)),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )
    begins = _begins_answer(request)
    role = serving.options.response_role if begins else request.messages[-1].role
    last = request.messages[-1]
    tokenizer = serving.llm.get_tokenizer()
    return _Plan(
        request=request,
        labels=Labels.of(call, request, model, "chatcmpl"),
        prompt=prompt,
        rendered=rendered,
        params=params,
        n=n,
        role=role,
        echo=text_of(last) if request.echo and last.role == role else "",
        writer=None
        if logprobs is None
        else LogprobWriter(tokenizer, logprobs, as_ids=bool(request.return_tokens_as_token_ids)),
    )


def _max_tokens(serving: Serving, requested: int | None, prompt_tokens: int) -> int:
    """The length asked for, else the model's own default, else what is left of the context."""
    if requested is not None:
        return requested
    left = serving.llm.max_model_len - prompt_tokens
    default = serving.llm.generation_config.get("max_new_tokens")
    return min(left, default) if isinstance(default, int) and default > 0 else left


def _top_logprobs(request: ChatRequest, max_logprobs: int) -> int | None:
    top = request.top_logprobs
    if not request.logprobs:
        if top:
            raise Failure(
                Kind.invalid, "when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs"
            )  # fmt: skip
        return None
    return 0 if top is None else check_logprobs("top_logprobs", top, max_logprobs)


def _check_tools(request: ChatRequest) -> None:
    """What vLLM refuses of tools that are none; any others have been refused already."""
    if request.tools == []:
        message = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
        raise Failure(Kind.invalid, message, param="tools")
    if request.tool_choice not in (None, "none"):
        raise Failure(Kind.invalid, "When using `tool_choice`, `tools` must be set.", param="tool_choice")


def _begins_answer(request: ChatRequest) -> bool:
    """Whether a new message is begun, rather than the last one continued."""
    if request.continue_final_message and request.add_generation_prompt:
        message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise Failure(Kind.invalid, message, param="continue_final_message")
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    return request.add_generation_prompt


async def chat_prompt(
    serving: Serving, request: ChatRequest, requested: int | None = None, *, fits: bool = True
) -> tuple[str, list[int]]:
    """The text the chat template makes of the conversation, and its tokens; off the event loop where it takes long.

    What cannot fit the context beside ``requested`` tokens is refused before it is tokenised, unless ``fits`` is false.
    """
    tokenizer = serving.llm.get_tokenizer()
    source = template_for(
        tokenizer,
        serving.chat_template,
        request.chat_template,
        trusted=serving.options.trust_request_chat_template,
    )
    begins = _begins_answer(request)
    variables = check_template_kwargs(request.chat_template_kwargs)

    def work() -> tuple[str, list[int]]:
        traits = traits_of(source)
        if request.chat_template is None:
            _encountered.add(source)
        text = render(
            tokenizer,
            conversation_of(request.messages, traits),
            source,
            add_generation_prompt=begins,
            continue_final_message=bool(request.continue_final_message),
            variables=_variables(request, traits, variables),
        )
        if fits:
            check_length(tokenizer, text, request, requested, serving.llm.max_model_len)
        return text, tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))

    short = sum(_length(message) for message in request.messages) < LONG_TEXT
    if short and source in _encountered and request.chat_template is None and not variables:
        return work()
    return await asyncio.to_thread(work)


def _length(message: Message) -> int:
    content = message.content
    if content is None or isinstance(content, str):
        return 100 + len(content or "")
    return 100 + sum(100 + len(part if isinstance(part, str) else str(part.get("text", ""))) for part in content)


def _variables(request: ChatRequest, traits: TemplateTraits, variables: dict[str, Any]) -> dict[str, Any]:
    """What the template sees beside the messages; fields it does not look at are refused, as they would do nothing."""
    given = dict(variables)
    if request.documents:
        if not traits.mentions("documents"):
            message = "documents: the model's chat template does not show documents"
            raise ParameterError("documents", request.documents, "null", message)
        given["documents"] = request.documents
    effort = request.reasoning_effort
    if effort is not None:
        if traits.mentions("enable_thinking"):
            given.setdefault("enable_thinking", effort != "none")
        elif not traits.mentions("reasoning_effort") and effort != "none":
            message = "reasoning_effort: the model's chat template has no such control"
            raise ParameterError("reasoning_effort", effort, "null", message)
        given.setdefault("reasoning_effort", effort)
    return given


# -- from what the engine made to the answer


def _answer(plan: _Plan, output: RequestOutput) -> ChatAnswer:
    request, labels = plan.request, plan.labels
    choices = []
    for completion in output.outputs:
        logprobs = None
        if plan.writer is not None:
            logprobs = plan.writer.chat(completion.token_ids, completion.logprobs or ())
        choices.append(
            ChatChoice(
                index=completion.index,
                message=ReplyMessage(plan.role, plan.echo + completion.text),
                logprobs=logprobs,
                finish_reason=completion.finish_reason or "stop",
                stop_reason=completion.stop_reason,
                token_ids=completion.token_ids if request.return_token_ids else UNSET,
            )
        )
    generated = sum(len(completion.token_ids) for completion in output.outputs)
    return ChatAnswer(
        id=labels.id,
        created=labels.created,
        model=labels.model,
        choices=choices,
        usage=usage_of(len(plan.prompt.token_ids), generated, output.num_cached_tokens),
        system_fingerprint=labels.fingerprint,
        prompt_logprobs=UNSET if request.prompt_logprobs is None else prompt_logprobs_json(output.prompt_logprobs),
        prompt_token_ids=plan.prompt.token_ids if request.return_token_ids else UNSET,
        prompt_text=plan.rendered if request.return_prompt_text else UNSET,
    )


async def _events(plan: _Plan, generation: AsyncGenerator[RequestOutput, None]) -> AsyncIterator[bytes]:
    """The events of a stream: a choice's role comes together with its first token, and unset fields are left out."""
    request, labels = plan.request, plan.labels
    chunks = Chunks.chat(labels.id, labels.created, labels.model, labels.fingerprint)
    options = request.stream_options
    with_usage = options is not None and options.usage
    continuous = options is not None and options.continuous
    writer, with_ids = plan.writer, bool(request.return_token_ids)
    textual = writer is None and not with_ids  # tokens without text make no event
    progress = Progress([len(plan.prompt.token_ids)], plan.n)
    pending = [Pending(request.stream_interval or 1) for _ in range(plan.n)]
    begun = [False] * plan.n
    extras: dict[str, Any] = {}
    if with_ids:
        extras["prompt_token_ids"] = plan.prompt.token_ids
    if request.return_prompt_text:
        extras["prompt_text"] = plan.rendered
    async with aclosing(generation) as outputs:
        async for output in outputs:
            frames = []
            progress.cached[0] = output.num_cached_tokens
            for completion in output.outputs:
                index = completion.index
                if not begun[index]:
                    begun[index] = True
                    usage = progress.of_choice(index) if continuous else None
                    frames.append(chunks.role(index, plan.role, usage, extras))
                    extras = {}
                    if plan.echo:
                        frames.append(chunks.choice(index, plan.echo, usage=usage))
                progress.advance(index, completion)
                delta = pending[index].take(completion)
                if delta is None:
                    continue
                if delta.finish_reason is None and textual:
                    if not delta.text:
                        continue  # half a character, or what may become a stop string
                    if not continuous:
                        frames.append(chunks.text(index, delta.text))
                        continue
                frames.append(
                    chunks.choice(
                        index,
                        delta.text,
                        logprobs=None if writer is None else writer.chat(delta.token_ids, delta.logprobs or ()),
                        finish_reason=delta.finish_reason,
                        stop_reason=delta.stop_reason,
                        extras={"token_ids": delta.token_ids} if with_ids else None,
                        usage=progress.of_choice(index) if continuous else None,
                        last=progress.running == 0 and not with_usage,
                    )
                )
            if frames:
                yield b"".join(frames)
    yield chunks.usage(progress.total()) + DONE if with_usage else DONE
