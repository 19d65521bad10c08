"""The faults users report of other servers, asked of this one with the real model; the marks are the reference's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.server.openai.scripted import events, refusal
from tests.server.running import RunningServer

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
STORY = "Once upon a time"


def complete(real: httpx.Client, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = real.post(TEXT, json={"prompt": prompt, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def deltas(real: httpx.Client, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    found = events(real.post(TEXT, json={"prompt": prompt, "temperature": 0, "stream": True, **fields}))
    return [choice for event in found for choice in event["choices"]]


def together(server: RunningServer, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers of requests sent at once."""

    async def run() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            answers = await asyncio.gather(*[http.post(TEXT, json=body) for body in bodies])
            return [answer.json() for answer in answers]

    return asyncio.run(run())


def gauge(real: httpx.Client, name: str) -> float:
    """The value of a metric, summed over its series."""
    lines = [line for line in real.get("/metrics").text.splitlines() if line.startswith(name)]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


# -- CPU-1 (vllm 3574, 3572; 11089): stop strings


@pytest.fixture(scope="module")
def story(real: httpx.Client) -> tuple[str, list[str]]:
    """What the model says greedily, and the texts of its tokens."""
    choice = complete(real, STORY, max_tokens=40, logprobs=0)
    tokens = choice["logprobs"]["tokens"]
    assert "".join(tokens) == choice["text"]
    return choice["text"], tokens


def stop_strings(tokens: list[str]) -> dict[str, str]:
    """One from the middle of a token to the middle of the next, one inside a token, one that is a token."""
    for place in range(8, len(tokens) - 1):
        first, second = tokens[place], tokens[place + 1]
        before = "".join(tokens[:place])
        spans, inside = first[-2:] + second[:3], first[1:-1]
        if len(first) > 4 and len(second) > 3 and spans not in before and inside not in before:
            return {"spans": spans, "inside": inside, "whole": first}
    raise AssertionError("the story has no such tokens")


@pytest.mark.parametrize("kind", ["spans", "inside", "whole"])
@pytest.mark.parametrize("include", [False, True])
def test_cpu_1_a_stop_string_cuts_at_the_exact_character_in_streams_too(
    real: httpx.Client, story: tuple[str, list[str]], kind: str, include: bool
) -> None:
    text, tokens = story
    stop = stop_strings(tokens)[kind]
    end = text.index(stop)
    cut = text[: end + len(stop)] if include else text[:end]
    fields: dict[str, Any] = {"max_tokens": 40, "stop": [stop], "include_stop_str_in_output": include}
    whole = complete(real, STORY, **fields)
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (cut, "stop", stop)
    found = deltas(real, STORY, **fields)
    sent = ""
    for choice in found:
        sent += choice["text"]
        assert cut.startswith(sent)
    assert sent == cut
    assert (found[-1]["finish_reason"], found[-1]["stop_reason"]) == ("stop", stop)


def test_a_long_stop_string_holds_back_only_what_may_begin_it(real: httpx.Client, story: tuple[str, list[str]]) -> None:
    text, tokens = story
    found = deltas(real, STORY, max_tokens=40, stop=["Z" * 50])
    assert "".join(choice["text"] for choice in found) == text
    assert all(choice["text"] for choice in found[:-1])  # no empty events
    assert len(found) >= len(tokens) - 5  # tokens are sent as they come, not cut in two or heaped


# -- CPU-2 (vllm 8627): characters of several tokens


@pytest.mark.parametrize("prompt", ["Emoji list: 😀 😃 😄 😁 🎉 🚀", "日本語の文章です。今日は", "Русский текст: при"])
def test_cpu_2_a_streamed_character_is_never_half(real: httpx.Client, prompt: str) -> None:
    whole = complete(real, prompt, max_tokens=32)["text"]
    parts = [choice["text"] for choice in deltas(real, prompt, max_tokens=32)]
    assert "".join(parts) == whole
    assert "\ufffd" not in "".join(parts[:-1])  # the last one may end in what the limit cut off


# -- CPU-3 (vllm 51226): seeds


def test_cpu_3_a_seeded_request_is_the_same_alone_and_beside_unseeded_ones(
    server: RunningServer, real: httpx.Client
) -> None:
    body = {"prompt": STORY, "temperature": 1.0, "seed": 11, "max_tokens": 8}
    alone = real.post(TEXT, json=body).json()["choices"][0]["text"]
    for _ in range(5):
        others = [{"prompt": f"{STORY} in the year {year}", "max_tokens": 8} for year in range(7)]
        found = together(server, [body, *others])
        assert found[0]["choices"][0]["text"] == alone


def test_greedy_answers_do_not_change_with_load(server: RunningServer, real: httpx.Client) -> None:
    alone = complete(real, STORY, max_tokens=24, logprobs=2)
    bodies: list[dict[str, Any]] = [{"prompt": STORY, "temperature": 0, "max_tokens": 24, "logprobs": 2}]
    bodies += [{"prompt": f"{number} apples and", "max_tokens": 24, "temperature": 0.8} for number in range(8)]
    assert together(server, bodies)[0]["choices"][0] == alone


# -- CPU-4 (vllm 22545, 29928, 31503, 54947): clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_cpu_4_when_all_clients_leave_the_engine_is_empty_at_once(
    server: RunningServer, real: httpx.Client, stream: bool
) -> None:
    aborted = gauge(real, 'vllm:request_success_total{model_name="smollm2-135m",engine="0",finished_reason="abort"}')
    body = {"prompt": STORY, "max_tokens": 1500, "ignore_eos": True, "stream": stream}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            tasks = [asyncio.ensure_future(http.post(TEXT, json=body)) for _ in range(16)]
            while server.serving.llm.num_running < 16:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    deadline = time.monotonic() + 10
    while server.serving.llm.num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.serving.llm.num_running == 0
    stats = server.call(server.serving.llm.stats)
    assert (stats.running, stats.waiting) == (0, 0)
    assert gauge(real, "vllm:num_requests_running") == 0
    assert gauge(real, "vllm:num_requests_waiting{") == 0
    assert gauge(real, "vllm:kv_cache_usage_perc") == 0
    now = gauge(real, 'vllm:request_success_total{model_name="smollm2-135m",engine="0",finished_reason="abort"}')
    assert now == aborted + 16


# -- CPU-5 (vllm 5543, 8268, 42019): the prefix cache


def test_cpu_5_a_warm_prefix_cache_changes_nothing(server: RunningServer, real: httpx.Client) -> None:
    prompt = "A list of many things that are blue: the sky, the sea, some birds, old jeans, a vein, the flag, ink, and"
    fields: dict[str, Any] = {"max_tokens": 12, "logprobs": 2, "cache_salt": "cold"}
    cold = complete(real, prompt, **fields)
    together(server, [{"prompt": prompt, "stop": ["e"], "temperature": 0, "cache_salt": "cold"} for _ in range(4)])
    assert complete(real, prompt, **fields) == cold


@pytest.mark.parametrize("tokens", [32, 33])
def test_cpu_5_prompt_logprobs_are_full_and_equal_with_a_warm_cache(real: httpx.Client, tokens: int) -> None:
    prompt = list(range(1000, 1000 + tokens))
    first = complete(real, prompt, prompt_logprobs=1, max_tokens=1)
    second = complete(real, prompt, prompt_logprobs=1, max_tokens=1)
    assert len(first["prompt_logprobs"]) == tokens
    assert first["prompt_logprobs"][0] is None
    for token, position in zip(prompt[1:], first["prompt_logprobs"][1:], strict=True):
        assert str(token) in position
    assert second == first
    echoed = complete(real, prompt, echo=True, logprobs=1, max_tokens=1)["logprobs"]
    own = [position[str(token)] for token, position in zip(prompt[1:], first["prompt_logprobs"][1:], strict=True)]
    assert echoed["token_logprobs"][1:tokens] == [entry["logprob"] for entry in own]


# -- CPU-8 (vllm 54195, 16529, 9634): ids outside the vocabulary


@pytest.mark.parametrize("wrong", [49152, -1, 10**9])
def test_cpu_8_ids_outside_the_vocabulary_hurt_nobody(server: RunningServer, real: httpx.Client, wrong: int) -> None:
    neighbour = {"prompt": STORY, "temperature": 0, "max_tokens": 24}
    alone = real.post(TEXT, json=neighbour).json()["choices"][0]["text"]
    bad: list[dict[str, Any]] = [
        {"prompt": "a", "logit_bias": {str(wrong): 5}},
        {"prompt": "a", "stop_token_ids": [wrong], "min_tokens": 2},
        {"prompt": "a", "allowed_token_ids": [wrong]},
        {"prompt": [1, wrong]},
    ]
    found = together(server, [neighbour, *bad, neighbour])
    assert [answer["choices"][0]["text"] for answer in (found[0], found[-1])] == [alone, alone]
    params = [answer["error"]["param"] for answer in found[1:-1]]
    assert params == ["logit_bias", "stop_token_ids", "allowed_token_ids", "prompt"]
    assert all(answer["error"]["code"] == 400 for answer in found[1:-1])


# -- CPU-9 (vllm 11898, 10852): several choices


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_cpu_9_choices_of_a_seed_are_distinct_repeatable_and_numbered(real: httpx.Client, path: str) -> None:
    prompt: dict[str, Any] = (
        {"prompt": STORY} if path == TEXT else {"messages": [{"role": "user", "content": "Tell a story."}]}
    )
    body = {**prompt, "n": 4, "seed": 7, "temperature": 1, "max_tokens": 8}

    def texts() -> list[str]:
        choices = real.post(path, json=body).json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        return [choice["text"] if path == TEXT else choice["message"]["content"] for choice in choices]

    first = texts()
    assert len(set(first)) == 4
    assert texts() == first
    streamed = ["", "", "", ""]
    for event in events(real.post(path, json={**body, "stream": True})):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"] if path == TEXT else choice["delta"]["content"]
    assert streamed == first
    other = real.post(path, json={**body, "seed": 8}).json()["choices"]
    shown = [choice["text"] if path == TEXT else choice["message"]["content"] for choice in other]
    assert not set(shown) & set(first)  # choice 0 of seed 8 is not choice 1 of seed 7


# -- CPU-10 (vllm 39734, 31731): prompts that do not fit


@pytest.fixture(scope="module")
def tight() -> Iterator[RunningServer]:
    """A server with few blocks: 24 of 16 tokens."""
    with RunningServer(num_gpu_blocks_override=24, max_model_len=2048, max_num_seqs=8) as server:
        yield server


def test_cpu_10_a_prompt_larger_than_the_pool_is_refused_and_holds_up_nobody(tight: RunningServer) -> None:
    huge = {"prompt": [1000] * 600, "max_tokens": 4}
    short = {"prompt": "The sky is", "max_tokens": 4, "temperature": 0}
    found = together(tight, [huge, *[short] * 6])
    assert found[0]["error"]["code"] == 400
    assert "600" in found[0]["error"]["message"] or "blocks" in found[0]["error"]["message"]
    assert len({answer["choices"][0]["text"] for answer in found[1:]}) == 1


def test_cpu_10_a_prompt_that_fits_only_alone_ends_as_do_the_short_ones(tight: RunningServer) -> None:
    large = {"prompt": [1000] * 330, "max_tokens": 4, "temperature": 0}
    short = {"prompt": "The sky is", "max_tokens": 16, "temperature": 0}
    found = together(tight, [*[short] * 3, large, *[short] * 3])
    assert all(answer["choices"][0]["finish_reason"] in ("stop", "length") for answer in found)
    stats = tight.call(tight.serving.llm.stats)
    assert (stats.running, stats.waiting) == (0, 0)


# -- what the sampler does with the fields it is given


def test_banned_and_allowed_tokens_work(real: httpx.Client) -> None:
    free = complete(real, "The sky is", max_tokens=1, return_token_ids=True)
    first = free["token_ids"][0]
    banned = complete(real, "The sky is", max_tokens=1, return_token_ids=True, logit_bias={str(first): -100})
    assert banned["token_ids"][0] != first
    word = free["text"].strip()
    assert word not in complete(real, "The sky is", max_tokens=8, bad_words=[word])["text"].split()
    only = complete(real, "The sky is", max_tokens=4, return_token_ids=True, allowed_token_ids=[1000, 1001])
    assert set(only["token_ids"]) <= {1000, 1001}


def test_an_answer_ends_no_sooner_than_told(real: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "What is 2+2?"}], "temperature": 0, "max_tokens": 24}
    short = real.post(CHAT, json=body).json()["usage"]["completion_tokens"]
    longer = real.post(CHAT, json={**body, "min_tokens": short + 3}).json()["usage"]["completion_tokens"]
    assert longer >= short + 3


def test_a_continued_message_goes_on_where_it_stood(real: httpx.Client) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    body = {"messages": messages, "continue_final_message": True, "temperature": 0, "max_tokens": 8}
    found = real.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    assert found.startswith(" Paris")


def test_an_overlong_chat_is_refused_and_the_next_is_answered(real: httpx.Client) -> None:
    error = refusal(real.post(CHAT, json={"messages": [{"role": "user", "content": "word " * 3000}]}))
    assert "This model's maximum context length is 2048 tokens" in error["message"]
    cut = {"messages": [{"role": "user", "content": "word " * 3000}], "truncate_prompt_tokens": 90, "max_tokens": 4}
    assert real.post(CHAT, json=cut).json()["usage"]["prompt_tokens"] == 90
    assert complete(real, "The sky is", max_tokens=2)["text"]


def test_the_openai_client_chats_and_streams_with_the_real_model(client_real: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is 2+2?"}]
    whole = client_real.chat.completions.create(model="smollm2-135m", messages=messages, temperature=0, max_tokens=16)
    parts = client_real.chat.completions.create(
        model="smollm2-135m", messages=messages, temperature=0, max_tokens=16, stream=True,
        extra_body={"repetition_penalty": 1.0, "ignore_eos": False},
    )  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == whole.choices[0].message.content


def test_requests_of_vllms_benchmark_are_served(real: httpx.Client) -> None:
    """Its bodies, as far as they are known: a role sent early or usage inside a content event would falsify it."""
    text = {
        "model": "smollm2-135m", "prompt": "The sky is", "temperature": 0.0, "repetition_penalty": 1.0,
        "max_tokens": 6, "logprobs": None, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    found = events(real.post(TEXT, json=text, headers={"x-request-id": "benchmark-0"}))
    assert found[0]["choices"]
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 6
    assert {event["id"] for event in found} == {"cmpl-benchmark-0"}
    chat = {
        "model": "smollm2-135m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "temperature": 0.0, "max_completion_tokens": 6, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert events(real.post(CHAT, json=chat))[-1]["usage"]["completion_tokens"] == 6
