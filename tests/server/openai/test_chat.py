"""/v1/chat/completions: shapes, streams, choices, templates, through plain HTTP and OpenAI's own client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from octavo.server.openai.messages import render
from octavo.server.openai.prompts import LONG_TEXT
from tests.server.openai.scripted import CONTEXT, events, refusal, scripted_server
from tests.server.running import RunningServer

PATH = "/v1/chat/completions"


def ask(http: httpx.Client, content: Any = "say:hello", **fields: Any) -> httpx.Response:
    return http.post(PATH, json={"messages": [{"role": "user", "content": content}], **fields})


def answer(http: httpx.Client, content: Any = "say:hello", **fields: Any) -> dict[str, Any]:
    response = ask(http, content, **fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def stream(http: httpx.Client, content: Any = "say:hello", **fields: Any) -> list[dict[str, Any]]:
    return events(ask(http, content, stream=True, **fields))


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in found for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


# -- one answer


def test_an_answer_has_openais_shape(http: httpx.Client) -> None:
    found = answer(http)
    assert found["id"].startswith("chatcmpl-")
    assert found["object"] == "chat.completion"
    assert isinstance(found["created"], int)
    assert found["model"] == "scripted"
    assert found["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = len("(user)say:hello(assistant)")
    assert found["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,  # the end token counts
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": found["usage"]["prompt_tokens_details"]["cached_tokens"]},
    }
    assert found["system_fingerprint"].startswith("fp_")


def test_the_openai_client_reads_an_answer(client: OpenAI) -> None:
    found = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "say:hello"}], logprobs=True, top_logprobs=2
    )
    (choice,) = found.choices
    assert choice.message.content == "hello"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [token.token for token in choice.logprobs.content] == [*"hello", "<eos>"]
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 6
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None


def test_a_repeated_prompt_is_told_to_be_cached(http: httpx.Client) -> None:
    content = "say:" + "a long answer that fills several blocks of the cache " * 2
    answer(http, content, max_tokens=1)
    usage = answer(http, content, max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 16


def test_max_completion_tokens_wins_over_max_tokens(http: httpx.Client) -> None:
    found = answer(http, max_tokens=1, max_completion_tokens=3)["choices"][0]
    assert (found["message"]["content"], found["finish_reason"]) == ("hel", "length")


def test_without_max_tokens_an_answer_may_fill_the_context(http: httpx.Client) -> None:
    usage = answer(http, "go")["usage"]
    assert usage["total_tokens"] == CONTEXT


def test_stop_strings_are_left_out_and_reported(http: httpx.Client) -> None:
    choice = answer(http, "say:one, two, three", stop=[", th"])["choices"][0]
    assert choice["message"]["content"] == "one, two"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ", th")
    choice = answer(http, "say:one, two, three", stop=", th", include_stop_str_in_output=True)["choices"][0]
    assert choice["message"]["content"] == "one, two, th"


def test_a_stop_token_is_reported_by_its_id(http: httpx.Client) -> None:
    choice = answer(http, "say:abc", stop_token_ids=[ord("c")])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", ord("c"))


def test_ignored_end_tokens_do_not_end_an_answer(http: httpx.Client) -> None:
    choice = answer(http, "say:ab", ignore_eos=True, max_tokens=5)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "length")
    shown = answer(http, "say:ab", ignore_eos=True, max_tokens=4, skip_special_tokens=False)["choices"][0]
    assert shown["message"]["content"] == "ab<eos><eos>"


def test_logprobs_can_name_tokens_by_id_and_ids_can_come_along(http: httpx.Client) -> None:
    found = answer(http, "say:ab", logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)
    (choice,) = found["choices"]
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["token_id:97", "token_id:98", "token_id:256"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []
    assert choice["token_ids"] == [97, 98, 256]
    assert bytes(found["prompt_token_ids"]) == b"(user)say:ab(assistant)"


def test_prompt_logprobs_stand_beside_the_choices(http: httpx.Client) -> None:
    found = answer(http, "say:ab", prompt_logprobs=1, max_tokens=1)
    positions = found["prompt_logprobs"]
    assert len(positions) == found["usage"]["prompt_tokens"]
    assert positions[0] is None
    assert positions[1]["117"] == {"logprob": -0.5, "rank": 1, "decoded_token": "u"}
    assert positions[-1][str(ord(")"))]["rank"] == 1


def test_the_rendered_prompt_can_be_seen(http: httpx.Client) -> None:
    assert answer(http, return_prompt_text=True)["prompt_text"] == "(user)say:hello(assistant)"
    assert stream(http, return_prompt_text=True)[0]["prompt_text"] == "(user)say:hello(assistant)"


# -- ids and headers


def test_the_id_is_the_clients_own_where_it_gives_one(http: httpx.Client) -> None:
    assert answer(http, request_id="mine")["id"] == "chatcmpl-mine"
    response = http.post(
        PATH, json={"messages": [{"role": "user", "content": "say:a"}]}, headers={"X-Request-Id": "from-a-proxy"}
    )
    assert response.json()["id"] == "chatcmpl-from-a-proxy"
    assert response.headers["x-request-id"] == "from-a-proxy"


def test_two_requests_of_one_id_both_get_their_answers(scripted: RunningServer, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 40, "request_id": "twin"}
    with http.stream("POST", PATH, json={**body, "stream": True}) as first:
        lines = first.iter_lines()
        next(lines)
        second = httpx.post(f"{scripted.url}{PATH}", json=body)
        assert second.json()["choices"][0]["finish_reason"] == "length"
        assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_a_stream_cancelled_by_the_id_of_its_answer_is_aborted(scripted: RunningServer, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "go"}], "stream": True, "request_id": "unwanted"}
    with http.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert httpx.post(f"{scripted.url}/v1/requests/chatcmpl-unwanted/cancel").status_code == 200
        rest = [line for line in lines if line]
    assert '"finish_reason":"abort"' in rest[-2]
    assert rest[-1] == "data: [DONE]"


@pytest.mark.parametrize("header", ["soon", "1.5", str(1 << 70)])
def test_a_priority_header_that_is_none_is_refused(http: httpx.Client, header: str) -> None:
    response = http.post(
        PATH, json={"messages": [{"role": "user", "content": "a"}]}, headers={"X-Vllm-Priority": header}
    )
    assert refusal(response)["param"] == "X-Vllm-Priority"


def test_priorities_are_taken_from_field_and_header_where_the_policy_is() -> None:
    with scripted_server(engine={"scheduling_policy": "priority"}) as server, server.client() as http:
        assert answer(http, priority=-3)["choices"][0]["message"]["content"] == "hello"
        body = {"messages": [{"role": "user", "content": "say:hello"}]}
        assert http.post(PATH, json=body, headers={"X-Vllm-Priority": "7"}).status_code == 200


# -- streams


def test_a_stream_begins_with_the_role_ends_with_the_reason_and_leaves_out_what_is_unset(http: httpx.Client) -> None:
    found = stream(http)
    assert len({event["id"] for event in found}) == 1
    assert len({event["created"] for event in found}) == 1
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    first = found[0]["choices"][0]
    assert first == {
        "index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None,
    }  # fmt: skip
    assert text_of(found) == "hello"
    *middle, last = [event["choices"][0] for event in found[1:]]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", None)
    for choice in middle:
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason"}
        assert choice["finish_reason"] is None
        assert choice["delta"]["content"]  # no empty events
        assert set(choice["delta"]) == {"content"}
    assert all(set(event) == {"id", "object", "created", "model", "choices"} for event in found[:-1])
    assert found[-1]["system_fingerprint"].startswith("fp_")


def test_the_role_comes_with_the_first_token_and_not_before() -> None:
    """A role sent ahead would make a benchmark's time to first token a lie."""
    with scripted_server(step=0.2) as server, server.client() as http:
        body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 2, "stream": True}
        with http.stream("POST", PATH, json=body) as response:
            pieces = list(response.iter_raw())
        role = next(piece for piece in pieces if b'"role"' in piece)
        assert b'"content":"a"' in role


def test_the_openai_client_reads_a_stream(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "say:hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "hello"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_usage_is_an_event_of_its_own_without_choices(http: httpx.Client) -> None:
    found = stream(http, stream_options={"include_usage": True})
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 6
    assert found[-1]["usage"]["prompt_tokens_details"] == {
        "cached_tokens": found[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    }
    assert all("usage" not in event for event in found[:-1])
    assert "usage" not in stream(http, stream_options={"include_usage": False})[-1]


def test_usage_can_be_told_in_every_event(http: httpx.Client) -> None:
    found = stream(http, stream_options={"include_usage": True, "continuous_usage_stats": True})
    told = [event["usage"]["completion_tokens"] for event in found]
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0, 6)
    for event in found:
        usage = event["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "stop": ["ll"]}
    whole = answer(http, **fields)
    found = stream(http, **fields)
    choice = whole["choices"][0]
    assert text_of(found) == choice["message"]["content"] == "he"
    logprobs = [event["choices"][0]["logprobs"] for event in found]
    streamed = [entry for part in logprobs if part is not None for entry in part["content"]]
    assert streamed == choice["logprobs"]["content"]
    ids = [token for event in found for token in event["choices"][0].get("token_ids", [])]
    assert ids == choice["token_ids"]
    assert found[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in found[1:])
    assert found[-1]["choices"][0]["stop_reason"] == "ll"


def test_a_character_of_several_tokens_is_sent_whole(http: httpx.Client) -> None:
    found = stream(http, "say:aé😀漢")
    deltas = [event["choices"][0]["delta"]["content"] for event in found[1:]]
    assert "".join(deltas) == "aé😀漢"
    assert not any("\ufffd" in delta for delta in deltas)


def test_no_part_of_a_stop_string_is_sent(http: httpx.Client) -> None:
    found = stream(http, "say:one two three", stop=["two!", " three"])
    deltas = [event["choices"][0]["delta"]["content"] for event in found]
    assert "".join(deltas) == "one two"
    assert found[-1]["choices"][0]["stop_reason"] == " three"


def test_events_can_hold_several_tokens(http: httpx.Client) -> None:
    found = stream(http, "say:abcdefghij", stream_interval=4, return_token_ids=True)
    counts = [len(event["choices"][0].get("token_ids", [])) for event in found[1:]]
    assert text_of(found) == "abcdefghij"
    assert all(count >= 4 for count in counts[1:-1])
    assert sum(counts) == 11


# -- several choices


def test_choices_are_numbered_and_streamed_side_by_side(http: httpx.Client) -> None:
    whole = answer(http, n=3, seed=1)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 18
    found = stream(http, n=3, seed=1)
    for index in range(3):
        own = [event["choices"][0] for event in found if event["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["finish_reason"] == "stop"
        assert text_of(found, index) == "hello"
    assert sum("system_fingerprint" in event for event in found) == 1


# -- how the prompt is made


def test_echo_puts_the_continued_message_before_the_answer(http: httpx.Client) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "say:!"}, {"role": "assistant", "content": "Well"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "max_tokens": 3,
        "return_prompt_text": True,
    }
    plain = http.post(PATH, json=body).json()
    assert plain["prompt_text"] == "(user)say:!(assistant)Well"
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": "!", "refusal": None}
    echoed = http.post(PATH, json={**body, "echo": True}).json()
    assert echoed["choices"][0]["message"]["content"] == "Well!"
    found = events(http.post(PATH, json={**body, "echo": True, "stream": True}))
    assert text_of(found) == "Well!"
    assert found[1]["choices"][0]["delta"] == {"content": "Well"}


def test_continuing_and_beginning_a_message_exclude_each_other(http: httpx.Client) -> None:
    error = refusal(ask(http, continue_final_message=True, add_generation_prompt=True))
    assert error["message"] == "Cannot set both `continue_final_message` and `add_generation_prompt` to True."


def test_without_a_generation_prompt_the_role_is_that_of_the_last_message(http: httpx.Client) -> None:
    found = answer(http, "say:x", add_generation_prompt=False, return_prompt_text=True)
    assert found["prompt_text"] == "(user)say:x"
    assert found["choices"][0]["message"]["role"] == "user"
    assert answer(http, "say:x", continue_final_message=True, return_prompt_text=True)["prompt_text"] == "(user)say:x"


def test_template_variables_and_parts_reach_the_template(http: httpx.Client) -> None:
    found = answer(
        http, [{"type": "text", "text": "a"}, {"type": "text", "text": "say:b"}],
        chat_template_kwargs={"mood": "merry"}, return_prompt_text=True,
    )  # fmt: skip
    assert found["prompt_text"] == "(user)a\nsay:b[merry](assistant)"


def test_variables_cannot_bring_a_template(http: httpx.Client) -> None:
    error = refusal(ask(http, chat_template_kwargs={"chat_template": "{{ 1 }}"}))
    assert error["param"] == "chat_template_kwargs"


def test_a_requests_own_template_needs_the_flag(http: httpx.Client) -> None:
    template = "{% for message in messages %}{{ message.content }}!{% endfor %}"
    error = refusal(ask(http, chat_template=template))
    assert "--trust-request-chat-template" in error["message"]
    with scripted_server(trust_request_chat_template=True) as server, server.client() as trusting:
        found = answer(trusting, chat_template=template, return_prompt_text=True)
        assert found["prompt_text"] == "say:hello!"
        assert refusal(ask(trusting, chat_template="{% if %}"))["param"] == "chat_template"


def test_a_prompt_can_be_cut_from_either_side(http: httpx.Client) -> None:
    tail = answer(http, truncate_prompt_tokens=21, return_token_ids=True)
    assert bytes(tail["prompt_token_ids"]) == b"say:hello(assistant)"[-21:].rjust(21, b")")
    head = answer(http, truncate_prompt_tokens=4, truncation_side="right", return_token_ids=True, max_tokens=1)
    assert bytes(head["prompt_token_ids"]) == b"(use"


@pytest.fixture(scope="module")
def silent() -> Iterator[httpx.Client]:
    """A model without a chat template."""
    with scripted_server(template=False) as server, server.client() as http:
        yield http


def test_without_a_template_the_error_names_the_flag(silent: httpx.Client) -> None:
    error = refusal(ask(silent))
    assert "--chat-template" in error["message"]
    assert silent.post("/v1/completions", json={"prompt": "say:x"}).json()["choices"][0]["text"] == "x"


def test_the_servers_own_template_and_role_are_used() -> None:
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    with (
        scripted_server(template=False, chat_template=template, response_role="oracle") as server,
        server.client() as http,
    ):
        found = answer(http, return_prompt_text=True)
        assert found["prompt_text"] == "<user>say:hello"
        assert found["choices"][0]["message"]["role"] == "oracle"
        assert stream(http)[0]["choices"][0]["delta"]["role"] == "oracle"


def test_long_conversations_are_rendered_off_the_event_loop(
    scripted: RunningServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def watched(*arguments: Any, **fields: Any) -> str:
        threads.append(threading.current_thread())
        return render(*arguments, **fields)

    async def loop_thread() -> threading.Thread:
        return threading.current_thread()

    monkeypatch.setattr("octavo.server.openai.chat.render", watched)
    answer(http, "say:a")  # the first of a template may go elsewhere, as it is compiled
    answer(http, "say:a")
    ask(http, "long " * LONG_TEXT)
    loop = scripted.call(loop_thread)
    assert threads[-2] is loop
    assert threads[-1] is not loop


def test_a_template_that_refuses_the_conversation_is_a_bad_request() -> None:
    template = "{{ raise_exception('no system role here') }}"
    with scripted_server(trust_request_chat_template=True) as server, server.client() as http:
        error = refusal(ask(http, chat_template=template))
        assert "no system role here" in error["message"]
        assert error["param"] == "messages"


def test_many_clients_at_once_get_their_own_answers(scripted: RunningServer) -> None:
    async def one(http: httpx.AsyncClient, number: int) -> str:
        body = {"messages": [{"role": "user", "content": f"say:number {number}"}], "stream": number % 2 == 0}
        response = await http.post(PATH, json=body)
        if number % 2:
            return str(response.json()["choices"][0]["message"]["content"])
        return text_of(events(response))

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=scripted.url, timeout=60) as http:
            return await asyncio.gather(*[one(http, number) for number in range(40)])

    assert asyncio.run(run()) == [f"number {number}" for number in range(40)]
