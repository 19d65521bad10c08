"""What a server is sent and how its answer is read, one dialect for each protocol: OpenAI's two and TGI's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from octavo.benchmarking.answers import Answer, Mark
from octavo.benchmarking.client import Exchange
from octavo.benchmarking.datasets import Work
from octavo.benchmarking.sse import events
from octavo.errors import ConfigError

__all__ = ["BACKENDS", "Asking", "Dialect", "dialect_of"]


@dataclass(frozen=True, slots=True)
class Asking:
    """What every request asks for beside its prompt and length. None leaves a field out: the server's default."""

    ignore_eos: bool = False
    logprobs: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    continuous_usage: bool = False


class Dialect(Protocol):
    """A protocol. ``role_counts``: a chat event that only names the role is the first token, as vLLM has it."""

    name: str
    endpoint: str

    def body(self, work: Work, model: str, asking: Asking) -> bytes: ...

    def read(self, exchange: Exchange, *, role_counts: bool = False) -> Answer: ...


# --- what servers send ------------------------------------------------------------------------------------------------


class _Lists(msgspec.Struct):
    tokens: list[Any] | None = None
    content: list[Any] | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    logprobs: _Lists | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Token(msgspec.Struct):
    text: str = ""


class _Details(msgspec.Struct):
    generated_tokens: int | None = None
    input_length: int | None = None


class _TgiEvent(msgspec.Struct):
    token: _Token | None = None
    details: _Details | None = None
    error: Any = None


_openai_event = msgspec.json.Decoder(_Event).decode
_tgi_event = msgspec.json.Decoder(_TgiEvent).decode


def _blank(exchange: Exchange) -> Answer:
    """An answer with no more than its times, and its fault when it has one."""
    answer = Answer(sent=exchange.sent, ended=exchange.ended, error=exchange.fault())
    if answer.error is None and "event-stream" not in exchange.headers.get("content-type", "event-stream"):
        answer.error = f"the answer is {exchange.headers['content-type']}, not a stream of events"
    return answer


def _error_text(error: Any) -> str:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])[:300]
    return str(error)[:300]


# --- OpenAI -----------------------------------------------------------------------------------------------------------


class _OpenAI:
    """What the two dialects of OpenAI share."""

    name = ""
    endpoint = ""
    _limit = ""

    def _prompt(self, work: Work) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, count: int) -> dict[str, Any]:
        raise NotImplementedError

    def body(self, work: Work, model: str, asking: Asking) -> bytes:
        options: dict[str, Any] = {"include_usage": True}
        if asking.continuous_usage:
            options["continuous_usage_stats"] = True
        whole: dict[str, Any] = {"model": model, **self._prompt(work), self._limit: work.output_tokens}
        whole |= {name: value for name, value in asking.sampling.items() if value is not None}
        whole |= {"stream": True, "stream_options": options}
        if asking.ignore_eos:
            whole["ignore_eos"] = True
        if asking.logprobs is not None:
            whole |= self._logprobs(asking.logprobs)
        return json.dumps(whole | dict(asking.extra_body) | dict(work.extra_body)).encode()

    def read(self, exchange: Exchange, *, role_counts: bool = False) -> Answer:
        answer = _blank(exchange)
        if answer.error is not None:
            return answer
        ended = 0.0
        counted = 0
        for time, data in events(exchange.pieces):
            if data == b"[DONE]":
                break
            try:
                event = _openai_event(data)
            except msgspec.MsgspecError as error:
                answer.error = f"an event that cannot be read: {error}"
                break
            if event.error is not None:
                answer.error = _error_text(event.error)
                break
            mark = None
            if event.choices:
                ended = time
                mark = self._mark(time, event.choices[0], begun=role_counts or bool(answer.marks))
                if mark is not None:
                    answer.marks.append(mark)
            if event.usage is not None:
                counted = _take_usage(answer, event.usage, mark, counted)
                if self._usage_ends:
                    ended = time
        if answer.error is None and not answer.marks:
            answer.error = "the stream ended without a token"
        answer.ended = ended or exchange.ended
        return answer

    _usage_ends = False

    def _mark(self, time: float, choice: _Choice, *, begun: bool) -> Mark | None:
        raise NotImplementedError


def _take_usage(answer: Answer, usage: _Usage, mark: Mark | None, counted: int) -> int:
    """Take over what the server says of lengths; ``mark`` is the event's own. The output tokens it has counted so far.

    Where every event brings the numbers, what they grow by is the tokens of the event.
    """
    answer.server_input_tokens = usage.prompt_tokens or answer.server_input_tokens
    if usage.prompt_tokens_details is not None:
        answer.cached_tokens = usage.prompt_tokens_details.cached_tokens
    if usage.completion_tokens is None:
        return counted
    answer.output_tokens = usage.completion_tokens
    if mark is not None and mark.tokens is None:
        mark.tokens = max(0, usage.completion_tokens - counted)
    return usage.completion_tokens


class Completions(_OpenAI):
    """/v1/completions."""

    name = "openai"
    endpoint = "/v1/completions"
    _limit = "max_tokens"

    def _prompt(self, work: Work) -> dict[str, Any]:
        return {"prompt": work.prompt}

    def _logprobs(self, count: int) -> dict[str, Any]:
        return {"logprobs": count}

    def _mark(self, time: float, choice: _Choice, *, begun: bool) -> Mark | None:
        lists = choice.logprobs.tokens if choice.logprobs is not None else None
        return Mark(time, choice.text or "", None if lists is None else len(lists))


class Chat(_OpenAI):
    """/v1/chat/completions."""

    name = "openai-chat"
    endpoint = "/v1/chat/completions"
    _limit = "max_completion_tokens"
    _usage_ends = True

    def _prompt(self, work: Work) -> dict[str, Any]:
        if work.messages:
            return {"messages": list(work.messages)}
        return {"messages": [{"role": "user", "content": work.prompt}]}

    def _logprobs(self, count: int) -> dict[str, Any]:
        return {"logprobs": True, "top_logprobs": count}

    def _mark(self, time: float, choice: _Choice, *, begun: bool) -> Mark | None:
        delta = choice.delta or _Delta()
        lists = choice.logprobs.content if choice.logprobs is not None else None
        text = (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")
        only_role = not (text or delta.tool_calls or lists or choice.finish_reason)
        if only_role and not begun:
            return None
        return Mark(time, text, None if lists is None else len(lists))


# --- TGI --------------------------------------------------------------------------------------------------------------


class Tgi:
    """/generate_stream of Text Generation Inference: one event a token."""

    name = "tgi"
    endpoint = "/generate_stream"
    _names = ("temperature", "top_p", "top_k", "frequency_penalty", "repetition_penalty", "seed")

    def body(self, work: Work, model: str, asking: Asking) -> bytes:
        if work.messages:
            raise ConfigError("backend 'tgi' takes prompts, not messages: use backend openai-chat for this data set")
        parameters: dict[str, Any] = {"max_new_tokens": work.output_tokens, "details": True}
        if asking.ignore_eos:
            raise ConfigError("TGI's protocol has no ignore_eos: use backend openai, or leave --ignore-eos out")
        if asking.logprobs:
            parameters["top_n_tokens"] = asking.logprobs
        given = {name: value for name, value in asking.sampling.items() if value is not None}
        unknown = sorted(set(given) - set(self._names))
        if unknown:
            raise ConfigError(f"TGI's protocol has no {unknown[0]}: use backend openai")
        greedy = given.get("temperature") == 0
        # To TGI, greedy is what it does unasked: a temperature of 0 or a top_p of 1 it refuses.
        parameters |= {name: v for name, v in given.items() if (name, v) not in (("temperature", 0), ("top_p", 1))}
        if not greedy and "temperature" in given:
            parameters["do_sample"] = True
        parameters |= asking.extra_body.get("parameters", {}) | work.extra_body.get("parameters", {})
        rest = {name: value for name, value in asking.extra_body.items() if name != "parameters"}
        return json.dumps({"inputs": work.prompt, "parameters": parameters, **rest}).encode()

    def read(self, exchange: Exchange, *, role_counts: bool = False) -> Answer:
        answer = _blank(exchange)
        if answer.error is not None:
            return answer
        ended = 0.0
        for time, data in events(exchange.pieces):
            try:
                event = _tgi_event(data)
            except msgspec.MsgspecError as error:
                answer.error = f"an event that cannot be read: {error}"
                break
            if event.error is not None:
                answer.error = _error_text(event.error)
                break
            ended = time
            if event.token is not None:
                answer.marks.append(Mark(time, event.token.text, 1))
            if event.details is not None:
                answer.output_tokens = event.details.generated_tokens
                answer.server_input_tokens = event.details.input_length
        if answer.error is None and not answer.marks:
            answer.error = "the stream ended without a token"
        answer.ended = ended or exchange.ended
        return answer


BACKENDS: dict[str, type[Completions] | type[Chat] | type[Tgi]] = {
    "openai": Completions,
    "vllm": Completions,
    "openai-chat": Chat,
    "tgi": Tgi,
}


def dialect_of(name: str) -> Dialect:
    """The dialect a ``--backend`` stands for."""
    if name not in BACKENDS:
        raise ConfigError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]()
