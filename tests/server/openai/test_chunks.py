"""The bytes of stream events: what they hold, what is left out, and how tokens are gathered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from octavo.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.server.openai.generation import collect, merge
from octavo.server.openai.streaming import Chunks, Delta, Pending, Progress
from octavo.server.openai.usage import usage_of

CHAT = Chunks.chat("chatcmpl-1", 7, 'a "model"', "fp_1")
TEXT = Chunks.completions("cmpl-1", 7, "m", "fp_1")


def read(frame: bytes) -> dict[str, Any]:
    assert frame.startswith(b"data: ")
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n") == 2
    found: dict[str, Any] = json.loads(frame.removeprefix(b"data: "))
    return found


def test_a_text_event_of_chat() -> None:
    assert read(CHAT.text(0, 'line\n"é"')) == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": 'a "model"',
        "choices": [{"index": 0, "delta": {"content": 'line\n"é"'}, "logprobs": None, "finish_reason": None}],
    }


def test_a_text_event_of_completions() -> None:
    assert read(TEXT.text(2, "x")) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [{"index": 2, "text": "x", "logprobs": None, "finish_reason": None}],
    }


def test_any_event_has_the_shape_of_a_text_event() -> None:
    assert CHAT.choice(1, "x") == CHAT.text(1, "x")
    assert TEXT.choice(0, "x") == TEXT.text(0, "x")


def test_the_first_event_of_a_choice_names_the_role() -> None:
    event = read(CHAT.role(1, "assistant", None, {"prompt_token_ids": [1, 2]}))
    assert event["choices"] == [
        {"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert event["prompt_token_ids"] == [1, 2]
    assert read(CHAT.role(0, "assistant", usage_of(3, 0), {}))["usage"]["prompt_tokens"] == 3


def test_stop_reason_stands_beside_a_finish_reason_only() -> None:
    last = read(TEXT.choice(0, "", finish_reason="stop", stop_reason="END", last=True))
    assert last["choices"] == [
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}
    ]
    assert last["system_fingerprint"] == "fp_1"
    assert read(TEXT.choice(0, "", finish_reason="stop"))["choices"][0]["stop_reason"] is None
    assert "stop_reason" not in read(TEXT.choice(0, "x"))["choices"][0]


def test_usage_and_extras_stand_where_they_belong() -> None:
    event = read(CHAT.choice(0, "x", extras={"token_ids": [5]}, usage=usage_of(3, 1)))
    assert event["choices"][0]["token_ids"] == [5]
    assert event["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def test_the_usage_event_has_no_choices() -> None:
    event = read(CHAT.usage(usage_of(3, 4, 2)))
    assert event["choices"] == []
    assert event["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def completion(text: str, tokens: int = 1, finish: str | None = None, **more: Any) -> CompletionOutput:
    return CompletionOutput(0, text, [0] * tokens, finish_reason=finish, **more)


def test_tokens_are_gathered_but_the_first_and_the_last_wait_for_none() -> None:
    pending = Pending(3)
    sent = [pending.take(completion(text)) for text in "abcdefg"]
    assert [None if delta is None else delta.text for delta in sent] == ["a", None, None, "bcd", None, None, "efg"]
    pending.take(completion("h"))
    last = pending.take(completion("i", finish="stop"))
    assert last is not None
    assert (last.text, len(last.token_ids), last.finish_reason) == ("hi", 2, "stop")


def test_gathered_tokens_keep_their_logprobs() -> None:
    pending = Pending(2)
    pending.take(completion("a"))
    assert pending.take(completion("b", logprobs=[{0: Logprob(-1.0)}])) is None
    delta = pending.take(completion("c", logprobs=[{0: Logprob(-2.0)}]))
    assert isinstance(delta, Delta)
    assert [position[0].logprob for position in delta.logprobs or ()] == [-1.0, -2.0]


def test_progress_counts_each_choice_and_a_prompt_once() -> None:
    progress = Progress([5, 7], 2)
    progress.advance(0, completion("a", 2))
    progress.advance(3, completion("b", 4, finish="length"))
    progress.cached[1] = 3
    assert progress.of_choice(3) == usage_of(7, 4)
    assert progress.total() == usage_of(12, 6, 3)
    assert progress.running == 3


# -- several prompts at once


async def generation(
    name: str, count: int, closed: list[str], fails: bool = False, waits: bool = False
) -> AsyncGenerator[RequestOutput, None]:
    try:
        for place in range(count):
            await asyncio.sleep(0)
            yield RequestOutput(name, None, [], None, [], place == count - 1)
        if fails:
            raise ValueError(name)
        if waits:
            await asyncio.Event().wait()
    finally:
        closed.append(name)


async def test_outputs_of_all_prompts_come_in_their_own_order() -> None:
    closed: list[str] = []
    found: dict[int, int] = {0: 0, 1: 0, 2: 0}
    async for place, output in merge([generation(str(place), 3 + place, closed) for place in range(3)]):
        assert output.request_id == str(place)
        found[place] += 1
    assert found == {0: 3, 1: 4, 2: 5}
    assert sorted(closed) == ["0", "1", "2"]


async def test_the_last_outputs_are_collected_in_the_order_of_the_prompts() -> None:
    outputs = await collect([generation(str(place), 4 - place, []) for place in range(3)])
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("count", [1, 3])
async def test_when_one_prompt_fails_all_end(count: int) -> None:
    closed: list[str] = []
    others = [generation(str(place), 1, closed, waits=True) for place in range(1, count)]
    with pytest.raises(ValueError, match="0"):
        async for _ in merge([generation("0", 2, closed, fails=True), *others]):
            pass
    assert len(closed) == count


@pytest.mark.parametrize("count", [1, 3])
async def test_when_the_reader_leaves_all_end(count: int) -> None:
    closed: list[str] = []
    outputs = merge([generation(str(place), 5, closed, waits=True) for place in range(count)])
    async for _ in outputs:
        break
    await outputs.aclose()  # type: ignore[attr-defined]
    assert len(closed) == count
