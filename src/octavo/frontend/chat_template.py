"""Turns a conversation into a prompt with the model's own chat template, in a sandbox with bounded time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import TemplateSyntaxError

from octavo.errors import ModelError, ParameterError
from octavo.frontend.template_sandbox import MAX_CHARACTERS, BudgetError, TemplateEnvironment, TemplateRaisedError

__all__ = ["ChatTemplate", "plain"]

MAX_SOURCE_CHARACTERS = 1 << 17  # the longest templates in use have about 30,000
_MAX_DEPTH = 100  # of nested lists and objects in messages and tools

# Stands at the end of the message to be continued; the space shows whether the template trims messages.
_HERE = "<octavo-continues-here> "

_TAKEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


class ChatTemplate:
    """A compiled chat template. Compiling and rendering fail with ModelError or ParameterError, in bounded time."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ModelError(f"the chat template has {len(source)} characters, the limit is {MAX_SOURCE_CHARACTERS}")
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: line {error.lineno}: {_line(error)}") from error
        except (Exception, RecursionError) as error:
            raise ModelError(f"the chat template does not compile: {type(error).__name__}: {_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. ``variables`` are the special tokens and whatever else the template is to see."""
        if continue_final_message and add_generation_prompt:
            raise ParameterError(
                "continue_final_message", True, "false when add_generation_prompt is true: the two exclude each other"
            )
        chat = _conversation(messages)
        if continue_final_message:
            _mark_end(chat)
        more = {name: plain(value, name) for name, value in (variables or {}).items()}
        for name in _TAKEN & more.keys():
            raise ParameterError(name, more[name], "given as an argument of its own")
        text = self._run(
            {
                "messages": chat,
                "tools": _objects(tools, "tools"),
                "documents": _objects(documents, "documents"),
                "add_generation_prompt": bool(add_generation_prompt),
                **more,
            }
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _run(self, variables: dict[str, Any]) -> str:
        budget = _environment().start()
        parts: list[str] = []
        size = 0
        try:
            budget.weigh(variables)
            for part in self._template.generate(variables):
                budget.tick()
                parts.append(part)
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise BudgetError(f"it writes more than {MAX_CHARACTERS} characters")
        except BudgetError as error:
            raise ModelError(
                f"the chat template was stopped: {_line(error)}; use another one with chat_template"
            ) from error
        except TemplateRaisedError as error:
            raise ParameterError(
                "messages",
                variables["messages"],
                "a conversation the chat template accepts",
                f"the chat template refuses the conversation: {_line(error)}",
            ) from error
        except (Exception, RecursionError) as error:
            raise ParameterError(
                "messages",
                variables["messages"],
                "a conversation the chat template can render",
                f"the chat template fails on this conversation ({type(error).__name__}: {_line(error)}); check the "
                "form of its messages or name another template with chat_template",
            ) from error
        return "".join(parts)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def plain(value: Any, field: str, depth: int = 0) -> Any:
    """A copy made of JSON types only, so that a template meets no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > _MAX_DEPTH:
        raise ParameterError(field, "...", f"nested at most {_MAX_DEPTH} levels deep")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {plain(key, field, depth + 1): plain(item, field, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, field, depth + 1) for item in value]
    if callable(getattr(value, "model_dump", None)):
        return plain(value.model_dump(), field, depth + 1)
    raise ParameterError(field, value, "made of text, numbers, lists and objects")


def _conversation(messages: Any) -> list[dict[str, Any]]:
    chat = plain(messages, "messages")
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        raise ParameterError("messages", messages, "a list of objects with a role and a content")
    # Clients send null for what is absent, which many templates would write as "None".
    return [{key: value for key, value in message.items() if value is not None} for message in chat]


def _objects(values: Any, field: str) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    objects = plain(values, field)
    if not isinstance(objects, list) or not all(isinstance(entry, dict) for entry in objects):
        raise ParameterError(field, values, "a list of objects")
    return objects


def _mark_end(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _HERE
        return
    for block in reversed(content) if isinstance(content, list) else ():
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            block["text"] += _HERE
            return
    raise ParameterError("continue_final_message", True, "used with a final message that has a text to continue")


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_HERE.rstrip())
    if place < 0:
        raise ParameterError(
            "continue_final_message", True, "used with a chat template that writes out the final message's content"
        )
    # A template that trims messages would have trimmed this one too.
    return text[:place] if text.startswith(_HERE, place) else text[:place].rstrip()
