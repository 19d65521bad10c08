"""From the messages of a chat to the conversation that the chat template takes, and to the prompt it writes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from octavo.errors import ParameterError
from octavo.frontend.chat_template import ChatTemplate
from octavo.frontend.conversations import render_conversations
from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo.frontend.tokenizer import Tokenizer
    from octavo.server.openai.schemas_chat import Message

__all__ = ["TemplateTraits", "conversation_of", "render", "template_for", "text_of"]

_PROBE = "octavo reads parts"
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_EMPTY_FIELDS = ("refusal", "audio", "function_call", "annotations")

# What chat_template_kwargs cannot set: fields of their own, and what would change how the template is run.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "documents",
        "messages",
        "return_dict",
        "self",
        "tokenize",
        "tools",
    }
)


class TemplateTraits:
    """What a chat template can take; read from its source and one trial."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.parts = _takes_parts(source)

    def mentions(self, name: str) -> bool:
        """Whether the template looks at something of this name."""
        return name in self.source


def _takes_parts(source: str) -> bool:
    """Whether the template itself reads contents that are lists of parts."""
    try:
        text = ChatTemplate(source).render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
    except Exception:
        return False  # it wants texts
    return _PROBE in text and "'type'" not in text and '"type"' not in text


@lru_cache(maxsize=16)
def traits_of(source: str) -> TemplateTraits:
    """The traits of a template, remembered."""
    return TemplateTraits(source)


def template_for(tokenizer: Tokenizer, server: str | None, requested: str | None, *, trusted: bool) -> str:
    """The source of the template to use: the request's where that is allowed, the server's, else the model's."""
    if requested is not None:
        if not trusted:
            raise ParameterError(
                "chat_template", requested, "absent",
                "chat_template is not taken from requests unless the server runs with --trust-request-chat-template",
            )  # fmt: skip
        return tokenizer.chat_templates.get(requested, requested)
    source = server if server is not None else tokenizer.chat_template
    if source is None:
        raise Failure(
            Kind.invalid,
            "The model has no chat template, so it cannot chat: start the server with --chat-template FILE, or use "
            "/v1/completions.",
            param="messages",
            code="template",
        )
    return source


def _part_text(part: str | Mapping[str, Any], where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind is None:
        kind = "text" if "text" in part else next((key for key in part), "part")
    if kind not in _TEXT_PARTS:
        raise ParameterError(
            where, kind, "text",
            f"{where}: {str(kind)[:80]} is not supported: the model reads text only",
        )  # fmt: skip
    field = "refusal" if kind == "refusal" else "text"
    for key, value in part.items():
        if key not in ("type", field) and value not in (None, [], {}):
            raise ParameterError(f"{where}.{key}", value, "absent")
    text = part.get(field)
    if not isinstance(text, str):
        raise ParameterError(f"{where}.{field}", text, "a string")
    return text


def text_of(message: Message) -> str:
    """The text of a message, its parts joined by line ends as vLLM joins them."""
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join([_part_text(part, "messages.content") for part in content])


def conversation_of(messages: Sequence[Message], traits: TemplateTraits) -> list[dict[str, Any]]:
    """The conversation as the template takes it; what it would not show is refused rather than dropped."""
    if not messages:
        raise ParameterError("messages", [], "a list of at least one message")
    return [_plain(message, f"messages[{place}]", traits) for place, message in enumerate(messages)]


def _plain(message: Message, where: str, traits: TemplateTraits) -> dict[str, Any]:
    if not message.role:
        raise ParameterError(f"{where}.role", message.role, "a non-empty string")
    for field in _EMPTY_FIELDS:
        value = getattr(message, field)
        if value not in (None, [], {}, ""):
            raise ParameterError(f"{where}.{field}", value, "null: this server makes no such parts")
    plain: dict[str, Any] = {"role": message.role}
    content = message.content
    if isinstance(content, list):
        texts = [_part_text(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
        plain["content"] = [{"type": "text", "text": text} for text in texts] if traits.parts else "\n".join(texts)
    elif content is not None:
        plain["content"] = content
    elif not message.tool_calls:
        raise ParameterError(f"{where}.content", None, "a text or a list of parts")
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if not traits.mentions("tool_calls"):
            raise ParameterError(
                f"{where}.tool_calls", message.tool_calls, "empty",
                f"{where}.tool_calls: the model's chat template does not show tool calls",
            )  # fmt: skip
        plain["tool_calls"] = message.tool_calls
    thought = message.reasoning if message.reasoning is not None else message.reasoning_content
    if thought:
        # Templates of reasoning models leave out earlier thoughts, or show them under either name.
        plain["reasoning_content"] = plain["reasoning"] = thought
    return plain


def check_template_kwargs(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables a request gives to the template, of which none may stand for a field of its own."""
    for name in values or ():
        if name in _RESERVED or not name.isidentifier():
            raise ParameterError(
                "chat_template_kwargs", name, "variables of the chat template",
                f"chat_template_kwargs cannot set {name[:80]!r}: it holds variables of the chat template only",
            )  # fmt: skip
    return dict(values or {})


def render(
    tokenizer: Tokenizer,
    conversation: Sequence[Mapping[str, Any]],
    source: str,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """The prompt the template writes for a conversation."""
    (text,) = render_conversations(
        tokenizer,
        [conversation],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template_kwargs=variables,
    )
    return text
