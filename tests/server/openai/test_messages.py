"""From messages to the conversation a template takes: parts, roles, what is refused, whose template is used."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.errors import ParameterError
from octavo.server.failures import Failure
from octavo.server.openai.messages import (
    TemplateTraits,
    check_template_kwargs,
    conversation_of,
    template_for,
    text_of,
    traits_of,
)
from octavo.server.openai.schemas_chat import Message
from tests.frontend.fakes import CHAT_TEMPLATE, byte_tokenizer

PARTS_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
TOOLS_TEMPLATE = CHAT_TEMPLATE + "{{ messages[-1].tool_calls }}"


def message(**fields: Any) -> Message:
    return msgspec.convert({"role": "user", **fields}, Message)


def conversation(*messages: Message, template: str = CHAT_TEMPLATE) -> list[dict[str, Any]]:
    return conversation_of(messages, TemplateTraits(template))


def test_parts_of_text_are_joined_by_line_ends() -> None:
    parts = [{"type": "text", "text": "one"}, "two", {"text": "three"}, {"type": "input_text", "text": "four"}]
    assert conversation(message(content=parts)) == [{"role": "user", "content": "one\ntwo\nthree\nfour"}]
    assert text_of(message(content=parts)) == "one\ntwo\nthree\nfour"


def test_parts_reach_a_template_that_reads_parts() -> None:
    assert traits_of(PARTS_TEMPLATE).parts
    assert not traits_of(CHAT_TEMPLATE).parts
    found = conversation(message(content=["one", {"type": "text", "text": "two"}]), template=PARTS_TEMPLATE)
    assert found[0]["content"] == [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_a_part_that_is_not_text_is_refused_by_its_place(kind: str) -> None:
    with pytest.raises(ParameterError, match=f"{kind} is not supported: the model reads text only") as caught:
        conversation(message(content="a"), message(content=["b", {"type": kind, kind: {"url": "x"}}]))
    assert caught.value.field == "messages[1].content[1]"


def test_a_part_of_text_takes_nothing_else() -> None:
    with pytest.raises(ParameterError, match="cache_control"):
        conversation(message(content=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]))
    with pytest.raises(ParameterError, match=r"content\[0\].text"):
        conversation(message(content=[{"type": "text"}]))


def test_an_answer_can_be_sent_back_as_clients_have_it() -> None:
    answer = message(
        role="assistant", content="hello", refusal=None, annotations=[], audio=None, function_call=None, tool_calls=[]
    )
    assert conversation(answer) == [{"role": "assistant", "content": "hello"}]


def test_content_may_only_be_absent_beside_tool_calls() -> None:
    with pytest.raises(ParameterError, match=r"messages\[0\].content"):
        conversation(message())
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    found = conversation(message(role="assistant", tool_calls=calls), template=TOOLS_TEMPLATE)
    assert found == [{"role": "assistant", "tool_calls": calls}]


def test_tool_calls_a_template_would_drop_are_refused() -> None:
    with pytest.raises(ParameterError, match="does not show tool calls"):
        conversation(message(role="assistant", tool_calls=[{"id": "1"}]))


def test_a_conversation_has_one_message_at_least() -> None:
    with pytest.raises(ParameterError, match="messages must be a list of at least one message"):
        conversation()
    with pytest.raises(ParameterError, match=r"messages\[0\].role"):
        conversation(message(role="", content="a"))


def test_the_template_is_the_requests_where_trusted_then_the_servers_then_the_models() -> None:
    tokenizer = byte_tokenizer()
    assert template_for(tokenizer, None, None, trusted=False) == CHAT_TEMPLATE
    assert template_for(tokenizer, "{{ 1 }}", None, trusted=False) == "{{ 1 }}"
    assert template_for(tokenizer, "{{ 1 }}", "{{ 2 }}", trusted=True) == "{{ 2 }}"
    with pytest.raises(ParameterError, match="--trust-request-chat-template"):
        template_for(tokenizer, None, "{{ 2 }}", trusted=False)


def test_a_model_without_a_template_cannot_chat_and_the_error_names_the_flag() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_templates.clear()
    with pytest.raises(Failure, match="--chat-template") as caught:
        template_for(tokenizer, None, None, trusted=False)
    assert (caught.value.status, caught.value.code) == (400, "template")


@pytest.mark.parametrize("name", ["messages", "chat_template", "self", "tools", "add_generation_prompt", "not a name"])
def test_template_variables_cannot_stand_for_fields(name: str) -> None:
    with pytest.raises(ParameterError, match="chat_template_kwargs cannot set"):
        check_template_kwargs({name: 1})
    assert check_template_kwargs({"enable_thinking": False}) == {"enable_thinking": False}
    assert check_template_kwargs(None) == {}
