"""The body of /v1/chat/completions, and the forms its answer takes."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.server.openai.schemas import GenerationRequest
from octavo.server.openai.usage import Usage

__all__ = [
    "ChatAnswer",
    "ChatChoice",
    "ChatLogprobs",
    "ChatRequest",
    "ChatTokenLogprob",
    "Message",
    "ReplyMessage",
    "TopLogprob",
]


class Message(Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation. ``content`` is a text or a list of parts, of which text can be read."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    # Parts of answers that clients send back, where they are empty.
    refusal: str | None = None
    audio: Any = None
    function_call: Any = None
    annotations: Any = None


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    # How the conversation becomes a prompt.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    return_prompt_text: bool | None = None

    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    # Not built.
    tools: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    include_reasoning: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    return_assistant_tokens_mask: Any = None


class TopLogprob(Struct):
    """One of the most probable tokens at a position; ``bytes`` are those of its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct):
    """A generated token, and the most probable ones at its position."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """The log-probabilities of a choice, one entry a token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ReplyMessage(Struct):
    """The message a choice consists of."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(Struct, kw_only=True):
    """One answer; ``stop_reason`` is the stop string or token id that ended it, null for an end-of-sequence token."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct, kw_only=True):
    """The answer of ``/v1/chat/completions`` without ``stream``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
