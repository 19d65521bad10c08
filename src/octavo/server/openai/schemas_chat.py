"""The body of /v1/chat/completions, and the forms its answer takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.server.about import NotBuilt, about
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

    role: Annotated[str, about("who speaks: system, user, assistant or what the chat template knows")]
    content: Annotated[str | list[str | dict[str, Any]] | None, about("a text, or parts of type text")] = None
    name: Annotated[str | None, about("given to the chat template")] = None
    tool_calls: Annotated[list[dict[str, Any]] | None, about("given to the chat template")] = None
    tool_call_id: Annotated[str | None, about("given to the chat template")] = None
    reasoning: Annotated[str | None, about("given to the chat template")] = None
    reasoning_content: Annotated[str | None, about("given to the chat template")] = None
    # Parts of answers that clients send back, where they are empty.
    refusal: Annotated[str | None, about("a part of answers that clients send back")] = None
    audio: NotBuilt = None
    function_call: NotBuilt = None
    annotations: NotBuilt = None


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], about("the conversation so far")]
    max_completion_tokens: Annotated[int | None, about("the same as ``max_tokens``, over which it wins", minimum=1)] = (
        None
    )
    logprobs: Annotated[bool | None, about("report the log-probability of each token", "false")] = None
    top_logprobs: Annotated[
        int | None, about("report so many likeliest tokens with each, up to --max-logprobs (20)", "0", minimum=-1)
    ] = None

    # How the conversation becomes a prompt.
    add_generation_prompt: Annotated[bool | None, about("end the prompt where an answer begins", "true")] = None
    continue_final_message: Annotated[
        bool | None, about("go on with the last message instead of answering it", "false")
    ] = None
    chat_template: Annotated[
        str | None, about("a Jinja template; needs --trust-request-chat-template", "the server's or the model's")
    ] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("variables of the chat template")] = None
    documents: Annotated[list[dict[str, Any]] | None, about("given to chat templates that look at them")] = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        about("given to chat templates that look at it"),
    ] = None
    return_prompt_text: Annotated[bool | None, about("report the prompt that the template made", "false")] = None

    tool_choice: Annotated[str | dict[str, Any] | None, about("null or none, as there are no tool calls")] = None
    parallel_tool_calls: Annotated[bool | None, about("without effect, as there are no tool calls")] = None

    # Not built.
    tools: NotBuilt = None
    functions: NotBuilt = None
    function_call: NotBuilt = None
    audio: NotBuilt = None
    modalities: NotBuilt = None
    moderation: NotBuilt = None
    prediction: NotBuilt = None
    verbosity: NotBuilt = None
    web_search_options: NotBuilt = None
    include_reasoning: NotBuilt = None
    media_io_kwargs: NotBuilt = None
    mm_processor_kwargs: NotBuilt = None
    return_assistant_tokens_mask: NotBuilt = None


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
