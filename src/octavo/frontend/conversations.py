"""Checks conversations and puts them into text with the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.errors import ParameterError

if TYPE_CHECKING:
    from octavo.frontend.tokenizer import Tokenizer

__all__ = ["Conversation", "render_conversations"]

Conversation: TypeAlias = "Sequence[Mapping[str, Any]]"


def render_conversations(
    tokenizer: Tokenizer,
    messages: Conversation | Sequence[Conversation],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """The text of one conversation or of each of a list of them."""
    if add_generation_prompt and continue_final_message:
        raise ParameterError(
            "continue_final_message",
            True,
            "False with add_generation_prompt",
            "continue_final_message goes on with the last message and add_generation_prompt begins a new one: "
            "set add_generation_prompt=False",
        )
    more = dict(chat_template_kwargs or {})
    if chat_template is not None:
        more["chat_template"] = chat_template
    return [
        tokenizer.apply_chat_template(
            [dict(message) for message in conversation],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=None if tools is None else [dict(tool) for tool in tools],
            **more,
        )
        for conversation in _conversations(messages)
    ]


def _conversations(messages: object) -> list[Sequence[Mapping[str, Any]]]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise ParameterError("messages", messages, "a list of messages or a list of such lists")
    conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
    for conversation in conversations:
        if not isinstance(conversation, Sequence) or isinstance(conversation, (str, bytes)) or not conversation:
            raise ParameterError("messages", conversation, "a list of at least one message, or a list of such lists")
        for message in conversation:
            _check(message)
    return conversations


def _check(message: object) -> None:
    if not isinstance(message, Mapping):
        raise ParameterError("messages", message, "a list of dictionaries with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ParameterError("role", role, "a non-empty string in every message")
    if message.get("content") is None and not message.get("tool_calls"):
        raise ParameterError("content", message.get("content"), "set in every message that has no tool_calls")
