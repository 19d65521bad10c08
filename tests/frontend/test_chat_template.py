"""Chat templates: equal to transformers' on the usual shapes, and hostile ones stopped in bounded time and memory."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from octavo.errors import ModelError, ParameterError
from octavo.frontend.chat_template import MAX_SOURCE_CHARACTERS, ChatTemplate
from octavo.frontend.template_sandbox import MAX_CHARACTERS, MAX_STEPS

CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

HEADERS = """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set ns.system = message.content | trim %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- if ns.system or tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
    {%- if tools is not none %}
        {{- 'Environment: ipython\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson(indent=4) }}
            {{- '\\n\\n' }}
        {%- endfor %}
    {%- endif %}
    {{- ns.system + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ message.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

TOOLS = """\
{%- macro text(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'text' %}{{- part.text }}{% else %}{{- '<' ~ part.type ~ '>' }}{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == 'user' and not (message.content is string and message.content.startswith('<tool')) %}
        {%- set ns.last_query = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' }}{{- text(message.content) }}{{- '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}
        {%- set content = text(message.content) %}
        {%- if '</think>' in content and loop.index0 < ns.last_query %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '\\n' + content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {%- if call.function %}{% set call = call.function %}{% endif %}
        {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}{{- call.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

ALTERNATING = """\
{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{% else %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}
"""

SHAPES = {"chatml": CHATML, "headers": HEADERS, "tools": TOOLS, "alternating": ALTERNATING}

FUNCTION = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says the weather <now> & "here" – ünïcödé',
        "parameters": {"type": "object", "properties": {"town": {"type": "string", "default": None}}},
    },
}

TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi!"}],
    "several": [
        {"role": "user", "content": "  What is 2 < 3 && 'x'?  \n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes\n"},
        {"role": "user", "content": "Größe 中文 🎉"},
    ],
}
SYSTEM = [{"role": "system", "content": " Speak softly. "}, *TALKS["several"]]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "image"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"town": "Köln", "n": 1.0}}}],
    },
    {"role": "tool", "content": "rain"},
    {"role": "tool", "content": "and <wind>"},
    {"role": "assistant", "content": "It rains."},
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """A transformers tokenizer, for its ``apply_chat_template``."""
    import transformers

    backend = Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, []))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def render(source: str, messages: Any = None, **options: Any) -> str:
    variables = {"bos_token": "<s>", "eos_token": "</s>", **options.pop("variables", {})}
    return ChatTemplate(source).render(TALKS["one"] if messages is None else messages, variables=variables, **options)


def both(theirs: Any, source: str, messages: list[dict[str, Any]], **options: Any) -> tuple[str, str]:
    options = {"add_generation_prompt": False, **options}
    known = ("tools", "documents", "add_generation_prompt", "continue_final_message")
    split = {name: options[name] for name in options if name in known}
    ours = render(source, messages, variables={k: v for k, v in options.items() if k not in known}, **split)
    return ours, theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options)


# -- equal to transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_usual_templates_render_as_in_transformers(theirs: Any, shape: str, talk: str, generate: bool) -> None:
    ours, expected = both(theirs, SHAPES[shape], TALKS[talk], add_generation_prompt=generate)
    assert ours == expected
    assert TALKS[talk][-1]["content"].strip() in ours


@pytest.mark.parametrize("shape", ["chatml", "headers", "tools"])
def test_system_messages_and_tools_render_as_in_transformers(theirs: Any, shape: str) -> None:
    ours, expected = both(theirs, SHAPES[shape], SYSTEM, tools=[FUNCTION], add_generation_prompt=True)
    assert ours == expected


@pytest.mark.parametrize("thinking", [True, False])
def test_tool_calls_and_extra_arguments_render_as_in_transformers(theirs: Any, thinking: bool) -> None:
    ours, expected = both(theirs, TOOLS, CALLS, tools=[FUNCTION], add_generation_prompt=True, enable_thinking=thinking)
    assert ours == expected
    assert ("</think>" in ours) is not thinking


@pytest.mark.parametrize("content", ["The answer is", " The answer is ", "a", "The answer is\n\n"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_continued_message_ends_where_it_ends_in_transformers(theirs: Any, shape: str, content: str) -> None:
    talk = [*TALKS["one"], {"role": "assistant", "content": content}]
    ours, expected = both(theirs, SHAPES[shape], talk, continue_final_message=True)
    assert ours == expected
    assert ours.endswith(content.strip()) or ours.endswith(content)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true, separators=(',', ':')) }}",
        "{{ 'é' | tojson(ensure_ascii=true) }}",
        "{{ documents | length }}{{ documents[0].title }}",
        "  {% if true %}\n  x\n  {% endif %}\n  y\n",
        "{% for i in range(6) %}{% if i is odd %}{% continue %}{% elif i > 4 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}",
        "{{ ['a', 'b'] | join(', ') }}{{ ', '.join(['c', 'd']) }}{{ '%s-%03d' % ('x', 7) }}{{ '{:>4}'.format(1) }}",
        "{{ 'a' ~ 1 ~ none ~ true ~ [1.5] }}{{ undefined_name }}{{ messages[0].missing }}",
        "{% set x, y = 1, [2, 3] %}{{ x + y[0] * 2 ** 3 }}{{ y[::-1] }}{{ 7 // 2 }}{{ 7 % 4 }}{{ -x }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0] | dictsort }}",
        "{{ messages[0].content | upper | replace('H', 'J') | indent(2, true) | trim | length }}",
        "{% macro m(a, b='z') %}[{{ a }}{{ b }}{{ caller() if caller else '' }}]{% endmacro %}{{ m(1) }}"
        "{% call m(2, b=3) %}in{% endcall %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}"
        "{{ ns.n }}",
        "{% set block %}a{{ 1 }}b{% endset %}{{ block }}{% filter upper %}x{% endfilter %}",
        "{{ 'x</t>y'.split('</t>')[-1].strip() }}{{ ' a '.lstrip() }}{{ 'abc'[1:] }}{{ 'abc' is string }}",
        "{{ [3, 1, 2] | sort | first }}{{ [1, 2.5] | sum }}{{ 2.567 | round(1) }}{{ '12' | int + 1 }}{{ 'é' in 'né' }}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{{ dict(a=1).a }}{{ {'k': none}.get('k', 2) }}{{ [[1, 2]] | map('last') | list }}{{ 'aB' | capitalize }}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}|{{ range(3) | list }}{{ (1, 2) }}{{ 1e3 }}",
    ],
)
def test_the_language_means_what_it_means_in_transformers(theirs: Any, source: str) -> None:
    documents = [{"title": "T", "text": "x"}]
    ours, expected = both(theirs, source, TALKS["several"], documents=documents)
    assert ours == expected


def test_the_date_is_todays() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


# -- what callers get wrong -------------------------------------------------------------------------------------------


def test_a_template_can_refuse_the_conversation() -> None:
    with pytest.raises(ParameterError, match="roles must alternate") as caught:
        render(ALTERNATING, [*TALKS["one"], *TALKS["one"]])
    assert caught.value.field == "messages"


def test_a_conversation_the_template_cannot_render_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"fails on this conversation \(TypeError"):
        render("{{ 'a' + messages[0].content }}", [{"role": "user", "content": 5}])
    with pytest.raises(ParameterError, match=r"fails on this conversation \(UndefinedError"):
        render("{{ messages[0].name.first }}")


@pytest.mark.parametrize(
    "messages",
    ["hello", 5, [5], ["user"], [{"role": "user", "content": object()}], [{"role": {1, 2}}], {"role": "user"}],
)
def test_messages_of_the_wrong_form_are_refused(messages: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        render(CHATML, messages)
    assert caught.value.field == "messages"


def test_endlessly_nested_messages_are_refused() -> None:
    content: list[Any] = []
    content.append(content)
    with pytest.raises(ParameterError, match="nested at most"):
        render(CHATML, [{"role": "user", "content": content}])


def test_tools_and_arguments_of_the_wrong_form_are_refused() -> None:
    with pytest.raises(ParameterError, match="tools must be a list of objects"):
        render(TOOLS, tools=["weather"])
    with pytest.raises(ParameterError, match="given as an argument of its own"):
        render(TOOLS, variables={"messages": []})
    with pytest.raises(ParameterError, match="made of text, numbers, lists and objects"):
        render(TOOLS, variables={"model": object()})


def test_continuing_excludes_a_generation_prompt_and_needs_a_text() -> None:
    with pytest.raises(ParameterError, match="exclude each other"):
        render(CHATML, add_generation_prompt=True, continue_final_message=True)
    for messages in ([], [{"role": "assistant"}], [{"role": "assistant", "content": [{"type": "image"}]}]):
        with pytest.raises(ParameterError, match="final message that has a text"):
            render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(ParameterError, match="writes out the final message"):
        render("{{ messages|length }}", add_generation_prompt=False, continue_final_message=True)


def test_the_last_text_of_a_message_in_parts_is_continued() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]
    text = render(TOOLS, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant\nAB")
    assert messages[0]["content"][1]["text"] == "B"  # the caller's messages are left alone


def test_objects_with_model_dump_and_absent_fields_are_accepted() -> None:
    class Message:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "user", "content": "hi", "name": None}

    assert json.loads(render("{{ messages | tojson }}", [Message()])) == [{"role": "user", "content": "hi"}]


# -- hostile templates ------------------------------------------------------------------------------------------------

GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(80) %%}{%% set ns.x = %s %%}{%% endfor %%}"

HOSTILE = {
    "nested loops": "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "silent loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "string times number": "{{ 'x' * 10000000000 }}",
    "number times string": "{{ 10000000000 * 'x' }}",
    "list times number": "{{ [1] * 10000000000 }}",
    "doubling by ~": GROW % ("'ab'", "ns.x ~ ns.x"),
    "doubling by +": GROW % ("'ab'", "ns.x + ns.x"),
    "doubling a list by +": GROW % ("[1]", "ns.x + ns.x"),
    "doubling a list": GROW % ("1", "[ns.x, ns.x]"),
    "doubling an object": GROW % ("1", "{'a': ns.x, 'b': ns.x}"),
    "doubling by dict": GROW % ("1", "dict(a=ns.x, b=ns.x)"),
    "doubling without a loop": "{% set a0 = 'aaaa' %}"
    + "".join(f"{{% set a{i + 1} = a{i} ~ a{i} %}}" for i in range(80)),
    "output of a macro": "{% macro m() %}{% for i in range(99999) %}"
    + "y" * 9999
    + "{% endfor %}{% endmacro %}{{ m() }}",
    "a set block": "{% set x %}{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}{% endset %}",
    "plain output": "{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}",
    "center": "{{ 'a' | center(10000000000) }}",
    "str.center": "{{ 'a'.center(10000000000) }}",
    "str.zfill": "{{ 'a'.zfill(10000000000) }}",
    "str.ljust by name": "{{ 'a'.ljust(width=10000000000) }}",
    "str.expandtabs": "{{ '\t'.expandtabs(10000000000) }}",
    "replace": "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
    "str.replace": "{% set x = 'a' * 1000000 %}{{ x.replace('', x) }}",
    "join": "{% set x = 'a' * 1000000 %}{{ range(100000) | join(x) }}",
    "str.join": "{% set x = 'a' * 1000000 %}{{ x.join(range(100000) | map('string')) }}",
    "indent": "{{ ('\n' * 1000000) | indent(1000) }}",
    "indent width": "{{ 'a' | indent(1000000000, true) }}",
    "tojson indent": "{{ [1] | tojson(indent=1000000000) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "str.format": "{{ '{:1000000000}'.format(1) }}",
    "str.format by attr": "{{ ('{:1000000000}' | attr('format'))(1) }}",
    "many small lists": "{% for i in range(99999) %}{% set x = [[i], [i]] %}{% endfor %}" * 9,
    "str.format of much": "{% set x = 'a' * 100000 %}{{ ('{0}' * 100000).format(x) }}",
    "a power": "{{ 10 ** 1000000000 }}",
    "squaring": GROW % ("3", "ns.x * ns.x"),
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000, 'x') | list }}",
    "round": "{{ 1.5 | round(1000000000) }}",
    "map": "{{ range(100000) | map('center', 100000) | list }}",
    "slices": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "filters": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x | upper %}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fewer steps than in use, so that the tests are quick; the test of an honest conversation has them all.
    monkeypatch.setattr("octavo.frontend.template_sandbox.MAX_STEPS", 200_000)
    with pytest.raises(ModelError, match="the chat template was stopped: it") as caught:
        render(HOSTILE[name])
    assert len(str(caught.value).splitlines()) == 1


def test_a_template_that_reads_large_texts_forever_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.template_sandbox.MAX_SECONDS", 0.05)
    source = (
        "{% set x = 'a' * 2000000 %}{% for i in range(99999) %}" + "{% if 'b' in x %}{% endif %}" * 200 + "{% endfor %}"
    )
    with pytest.raises(ModelError, match=r"it takes more than 0\.05 seconds"):
        render(source)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ ''.__class__ }}{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ self.__init__.__globals__ }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({'a': 1}) }}", "unsafe"),
        ("{{ (1).to_bytes(1000000000, 'big') }}", "unsafe"),
        ("{{ 'a'.translate({97: 'b' }) }}", "unsafe"),
        ("{{ 'a'.encode().hex() }}", "unsafe"),
        ("{{ '{a}'.format_map({'a': 1}) }}", "format_map is not available"),
        ("{{ '{:{}}'.format(1, 1000000000) }}", "computed widths"),
        ("{{ '%*d' % (1000000000, 1) }}", "computed widths"),
        ("{{ ('a' | e).striptags() }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}", "namespace cannot be written"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "RecursionError"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{{ lipsum(n=100000000) }}", "'lipsum' is undefined"),
        ("{{ [[1]] | sum(start=[]) }}", "sum adds numbers only"),
        ("{% include 'x' %}", "no loader"),
        ("{% extends 'x' %}", "no loader"),
        ("{% import 'x' as y %}", "no loader"),
    ],
)
def test_templates_reach_nothing_outside(source: str, says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ x",
        "{% for %}{% endfor %}",
        "{% debug %}",
        "{{ 'a' | no_such_filter }}",
        "{{ 'a' | striptags }}",
        "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
        "{{ " + "+".join(["1"] * 20000) + " }}",
        "{{ a" + "|e" * 20000 + " }}",
        "{% if a %}" * 5000,
        "{% for a in b %}" * 100 + "{% endfor %}" * 100,
        "{{ " + "9" * 20000 + " }}",
        "x" * (MAX_SOURCE_CHARACTERS + 1),
    ],
)
def test_templates_that_do_not_compile_are_refused(source: str) -> None:
    with pytest.raises(ModelError, match="the chat template ") as caught:
        ChatTemplate(source)
    assert len(str(caught.value)) < 500


def test_an_honest_long_conversation_is_far_below_the_limits() -> None:
    talk = [{"role": role, "content": "word " * 200} for role in ("user", "assistant")] * 500
    for source in SHAPES.values():
        assert len(render(source, talk)) > 1_000_000
    assert MAX_STEPS >= 1_000_000
    assert MAX_CHARACTERS >= 8_000_000
