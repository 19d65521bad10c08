"""The pace of a client: when the engine is stopped and set going, and where outputs are cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.detokenizer import IncrementalDetokenizer
from octavo.frontend.loading import load_tokenizer
from octavo.frontend.outputs import CompletionOutput
from octavo.frontend.tokenizer import Tokenizer
from octavo.server.failures import Failure, Kind
from octavo.server.pacing import MAX_CREDITS, Cutter, Pace


class Engine:
    """Notes what it is told, and has tokens to read."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.ready = asyncio.Event()
        self.pace = Pace(lambda: self.told.append("pause"), lambda: self.told.append("resume"))

    async def outputs(self) -> AsyncIterator[int]:
        number = 0
        while True:
            await self.ready.wait()
            number += 1
            yield number


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_credits_nothing_is_counted() -> None:
    engine = Engine()
    engine.pace.spend(1000, finished=False)
    engine.pace.add(5)
    assert engine.pace.open
    assert engine.told == []


async def test_the_engine_is_paused_when_the_credits_are_spent_and_resumed_when_more_is_read() -> None:
    engine = Engine()
    pace = engine.pace
    pace.credits = 3
    pace.spend(2, finished=False)
    assert engine.told == []
    pace.spend(1, finished=False)
    assert engine.told == ["pause"]
    pace.add(2)
    assert engine.told == ["pause"]  # there may be tokens that are made already
    engine.ready.set()
    assert await pace.read(engine.outputs(), 60) == 1
    assert engine.told == ["pause", "resume"]


async def test_a_finished_request_is_not_paused() -> None:
    engine = Engine()
    engine.pace.credits = 1
    engine.pace.spend(1, finished=True)
    assert engine.told == []


async def test_a_request_held_while_its_tokens_are_waited_for_goes_on_at_once() -> None:
    engine = Engine()
    reading = asyncio.ensure_future(engine.pace.read(engine.outputs(), 60))
    await settle()
    engine.pace.hold()
    engine.pace.hold()
    assert engine.told == ["pause"]
    engine.pace.release()
    assert engine.told == ["pause", "resume"]
    engine.ready.set()
    assert await reading == 1


async def test_a_held_request_goes_on_only_when_it_is_released_and_has_credits() -> None:
    engine = Engine()
    pace = engine.pace
    engine.ready.set()
    pace.credits = 1
    pace.hold()
    pace.spend(1, finished=False)
    reading = asyncio.ensure_future(pace.read(engine.outputs(), 60))
    await settle()
    pace.add(5)
    await settle()
    assert not reading.done()
    pace.release()
    assert await reading == 1
    assert engine.told == ["pause", "resume"]


async def test_what_is_no_token_waits_for_no_credits() -> None:
    pace = Engine().pace
    pace.credits = 0
    await pace.wait(60, tokens=0)
    pace.hold()
    waiting = asyncio.ensure_future(pace.wait(60, tokens=0))
    await settle()
    assert not waiting.done()
    pace.release()
    await waiting


async def test_a_client_has_a_time_to_go_on() -> None:
    pace = Engine().pace
    pace.credits = 0
    with pytest.raises(Failure) as failed:
        await pace.wait(0.01)
    assert failed.value.kind is Kind.timeout


async def test_a_request_that_was_ended_waits_no_more_and_leaves_the_engine_alone() -> None:
    engine = Engine()
    engine.ready.set()
    pace = engine.pace
    pace.credits = 1
    pace.spend(1, finished=False)
    waiting = asyncio.ensure_future(pace.wait(60))
    await settle()
    pace.end()
    await waiting
    assert await pace.read(engine.outputs(), 60) == 1
    assert engine.told == ["pause"]


async def test_credits_do_not_grow_without_end() -> None:
    pace = Engine().pace
    pace.credits = 1
    pace.add(MAX_CREDITS)
    assert pace.credits == MAX_CREDITS


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(max_size=40),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=40),
    credits_=st.lists(st.integers(1, 4), min_size=1, max_size=40),
    held_back=st.integers(0, 8),
)
def test_the_parts_of_outputs_join_to_the_whole(
    tokenizer: Tokenizer, text: str, sizes: list[int], credits_: list[int], held_back: int
) -> None:
    """Outputs of any sizes, texts held back as for stop strings, cut to any credits."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    reader = IncrementalDetokenizer(tokenizer, [], True)
    whole = "".join(reader.push(token) for token in ids) + reader.finish()
    outputs, at, given_text = [], 0, 0
    reader = IncrementalDetokenizer(tokenizer, [], True)
    read = ""
    for number in range(len(ids) + 1):
        size = sizes[number % len(sizes)]
        part = ids[at : at + size]
        at += len(part)
        read += "".join(reader.push(token) for token in part)
        end = len(whole) if at >= len(ids) else max(given_text, len(read) - held_back)
        outputs.append(CompletionOutput(0, whole[given_text:end], part, logprobs=[{token: None} for token in part]))  # type: ignore[dict-item]
        given_text = end
        if at >= len(ids):
            outputs[-1].finish_reason = "stop"
            break
    cutter = Cutter(tokenizer, [], True)
    parts: list[CompletionOutput] = []
    for output in outputs:
        rest: CompletionOutput | None = output
        while rest is not None:
            part_, rest = cutter.cut(rest, credits_[len(parts) % len(credits_)])
            parts.append(part_)
    assert "".join(part.text for part in parts) == whole
    assert [token for part in parts for token in part.token_ids] == ids
    assert [token for part in parts for position in part.logprobs or () for token in position] == ids
    assert all(len(part.token_ids) <= credits_[number % len(credits_)] for number, part in enumerate(parts))
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["stop"]
