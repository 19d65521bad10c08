"""The dispatcher: replay after crashes at any point, requests that are given up, slow readers, what observers hear."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.messages import EngineInfo, StepStats
from octavo.errors import EngineCrashedError, EngineDeadError, ParameterError
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.observer import Observer
from octavo.frontend.output_processor import Processed, RequestState
from octavo.frontend.outputs import RequestOutput
from octavo.sampling.params import SamplingParams
from tests.frontend.crashing import CrashingLink
from tests.frontend.fakes import ScriptBackend, load_fake


class Journalist(Observer):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.last: StepStats | None = None
        self.first_tokens = 0
        self.reasons: Counter[str] = Counter()

    def accepted(self, state: RequestState) -> None:
        self.events["accepted"] += 1

    def stepped(self, stats: StepStats, processed: Processed) -> None:
        self.last = stats
        self.first_tokens += len(processed.first_tokens)

    def finished(self, state: RequestState) -> None:
        self.events["finished"] += 1
        self.reasons.update(str(reason) for reason in state.finish_reasons)

    def paused(self, state: RequestState) -> None:
        self.events["paused"] += 1

    def resumed(self, state: RequestState) -> None:
        self.events["resumed"] += 1

    def engine_started(self, info: EngineInfo) -> None:
        self.events["started"] += 1

    def engine_lost(self, reason: str, replayed: int, failed: int) -> None:
        self.events["lost"] += 1
        self.events["replayed"] += replayed
        self.events["failed"] += failed


def next_token(known: Any, prompt: int) -> int:
    """Depends on everything so far, so that one wrong or lost token changes all that follow."""
    value = 17
    for token in known:
        value = (value * 31 + token) % 9973
    return 97 + value % 26


@asynccontextmanager
async def serving(
    *, most_unread: int | None = None, observer: Observer | None = None, blocks: int = 64, **options: Any
) -> AsyncIterator[tuple[AsyncLLM, CrashingLink]]:
    link = CrashingLink(lambda: load_fake(ScriptBackend(next_token, num_blocks=blocks), **options))
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.options = link.loaded.options
    llm._start(link.loaded, link, observer, most_unread)
    try:
        yield llm, link
        assert llm.num_running == 0
        assert await llm.check() == []
    finally:
        llm.shutdown()


async def collect(llm: AsyncLLM, prompt: str, request_id: str | None = None, **params: Any) -> list[Any]:
    last: RequestOutput | None = None
    async for output in llm.generate(prompt, SamplingParams(**{"max_tokens": 20, **params}), request_id):
        last = output
    assert last is not None
    return [(each.index, each.text, each.token_ids, each.logprobs, each.finish_reason) for each in last.outputs]


REQUESTS: list[dict[str, Any]] = [
    {"prompt": "plain"},
    {"prompt": "long " * 30, "max_tokens": 40},
    {"prompt": "two", "n": 2, "temperature": 1.0, "seed": 5},
    {"prompt": "logprobs", "logprobs": 1, "prompt_logprobs": 1},
    {"prompt": "stops", "stop": ["a", "e"], "max_tokens": 60},
    {"prompt": "plain", "max_tokens": 1},
    {"prompt": "the same beginning of two", "repetition_penalty": 1.5},
    {"prompt": "the same beginning of them", "min_tokens": 5, "stop_token_ids": [100, 101, 102]},
]


async def run_all(llm: AsyncLLM) -> list[Any]:
    return await asyncio.gather(*(collect(llm, **request) for request in REQUESTS))


async def test_requests_end_the_same_whenever_the_engine_crashes() -> None:
    async with serving() as (llm, _):
        undisturbed = await run_all(llm)
    for crash_at in range(1, 30, 3):
        async with serving(blocks=20) as (llm, link):
            frames = 0

            def crash(frame: Any, crash_at: int = crash_at) -> bool:
                nonlocal frames
                frames += 1
                return frames in (crash_at, crash_at + 7)

            link.crash = crash
            assert await run_all(llm) == undisturbed
            # The last crash may come after the last answer: then the engine is still being replaced.
            async with asyncio.timeout(30):
                while link.starts != llm.engine_restarts + 1:
                    await asyncio.sleep(0.001)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_any_pattern_of_crashes_below_the_limit_changes_nothing(seed: int) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        async with serving() as (llm, _):
            undisturbed = await run_all(llm)
        moments = set(rng.sample(range(1, 60), 2))
        async with serving(blocks=rng.choice([12, 20, 64]), max_num_batched_tokens=rng.choice([8, 64, 512])) as (
            llm,
            link,
        ):
            frames = 0

            def crash(frame: Any) -> bool:
                nonlocal frames
                frames += 1
                return frames in moments

            link.crash = crash
            assert await run_all(llm) == undisturbed

    asyncio.run(run())


async def test_a_request_that_ran_at_three_crashes_is_given_up_and_a_later_one_is_not() -> None:
    journalist = Journalist()
    async with serving(observer=journalist, max_num_seqs=1) as (llm, link):
        victim_running = True

        def crash(frame: Any) -> bool:
            return victim_running and any(output.request_id == "victim" for output in frame.outputs)

        link.crash = crash
        victim = asyncio.create_task(collect(llm, "victim", "victim"))
        await asyncio.sleep(0.01)
        bystander = asyncio.create_task(collect(llm, "bystander"))
        with pytest.raises(EngineCrashedError, match="3 crashes"):
            await victim
        victim_running = False
        assert (await bystander)[0][-1] == "length"
        assert llm.engine_restarts == 3
        assert llm.engine_alive
    assert journalist.events["lost"] == 3
    assert journalist.events["failed"] == 1
    assert journalist.events["accepted"] == journalist.events["finished"] == 2
    assert journalist.reasons == {"error": 1, "length": 1}


async def test_a_request_that_crashes_the_engine_after_some_tokens_is_given_up_too() -> None:
    async with serving() as (llm, link):
        victim_running = True

        def crash(frame: Any) -> bool:
            stream = llm._dispatcher._streams.get("victim")
            return victim_running and stream is not None and stream.state.num_tokens >= 3 and bool(frame.outputs)

        link.crash = crash
        async with asyncio.timeout(20):
            with pytest.raises(EngineCrashedError, match="3 crashes"):
                await collect(llm, "victim", "victim")
        victim_running = False
        assert llm.engine_restarts <= 3
        assert (await collect(llm, "after"))[0][-1] == "length"


async def test_an_engine_that_cannot_be_started_again_fails_every_request_and_says_why() -> None:
    async with serving() as (llm, _):
        pass
    link = CrashingLink(lambda: load_fake(ScriptBackend(next_token)))
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.options = link.loaded.options
    llm._start(link.loaded, link, None, None)
    link.crash = lambda frame: True
    link.failing_starts = 100
    with pytest.raises(EngineDeadError, match="does not start in a test"):
        await collect(llm, "one")
    with pytest.raises(EngineDeadError):
        await collect(llm, "two")
    assert not llm.engine_alive
    assert llm.failure is not None
    llm.shutdown()


async def test_requests_aborted_or_sent_while_the_engine_is_replaced_are_neither_lost_nor_doubled() -> None:
    async with serving() as (llm, _):
        expected = await collect(llm, "late")
    async with serving() as (llm, link):
        crashed = asyncio.Event()
        loop = asyncio.get_running_loop()
        release = asyncio.Event()
        frames = 0

        def crash(frame: Any) -> bool:
            nonlocal frames
            frames += 1
            return frames == 3

        restart = link.restart

        def slow_restart() -> EngineInfo:
            loop.call_soon_threadsafe(crashed.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
            return restart()

        link.crash = crash
        link.restart = slow_restart  # type: ignore[method-assign]
        gone = asyncio.create_task(collect(llm, "gone", "gone", max_tokens=200))
        await crashed.wait()
        assert not llm.engine_alive
        late = asyncio.create_task(collect(llm, "late"))
        await asyncio.sleep(0.01)
        assert await llm.abort("gone")
        query = asyncio.create_task(llm.stats())
        await asyncio.sleep(0.01)
        release.set()
        assert await late == expected
        assert (await gone)[0][-1] == "abort"
        assert (await query).num_blocks == 64


async def test_a_slow_reader_is_paused_and_gets_the_same_text_while_others_go_on() -> None:
    async with serving() as (llm, _):
        expected = await collect(llm, "slow", max_tokens=200)
    journalist = Journalist()
    async with serving(most_unread=10, observer=journalist) as (llm, _):
        stream = llm.generate("slow", SamplingParams(max_tokens=200), "slow", output_kind="delta")
        first = await anext(stream)
        async with asyncio.timeout(10):
            while not journalist.events["paused"]:
                await asyncio.sleep(0.001)
        await collect(llm, "other", max_tokens=100)
        state = llm._dispatcher._streams["slow"].state
        # The limit, the token that exceeded it, and what was on its way when the engine was told.
        given = len(first.outputs[0].token_ids)
        assert given + 10 < state.num_tokens <= given + 13
        stats = await llm.stats()
        assert (stats.running, stats.paused) == (0, 1)
        assert stats.referenced_blocks == 0
        text = first.outputs[0].text
        async for output in stream:
            text += output.outputs[0].text
            await asyncio.sleep(0.001)
        assert text == expected[0][1]
        assert journalist.events["resumed"] == journalist.events["paused"] > 0


async def test_a_paused_request_survives_a_crash_and_can_be_aborted() -> None:
    async with serving() as (llm, _):
        expected = await collect(llm, "kept", max_tokens=60)
    async with serving(most_unread=5) as (llm, link):
        kept = llm.generate("kept", SamplingParams(max_tokens=60), "kept", output_kind="delta")
        dropped = llm.generate("dropped", SamplingParams(max_tokens=60), "dropped", output_kind="delta")
        text = (await anext(kept)).outputs[0].text
        await anext(dropped)
        async with asyncio.timeout(10):
            while (await llm.stats()).paused < 2:
                await asyncio.sleep(0.001)
        once = [True]
        link.crash = lambda frame: bool(once and once.pop())
        await collect(llm, "other")
        assert llm.engine_restarts == 1
        assert (await llm.stats()).paused == 2
        await dropped.aclose()
        async for output in kept:
            text += output.outputs[0].text
        assert text == expected[0][1]


async def test_pause_and_resume_by_the_caller() -> None:
    async with serving() as (llm, _):
        expected = await collect(llm, "p", max_tokens=100)
        task = asyncio.create_task(collect(llm, "p", "p", max_tokens=100))
        async with asyncio.timeout(10):
            while not llm.pause("p"):
                await asyncio.sleep(0)
            assert (await llm.stats()).paused == 1
        assert llm.resume("p")
        assert await task == expected
        assert not llm.pause("p")
        assert not llm.resume("p")


async def test_observers_hear_of_each_request_once_and_may_fail() -> None:
    class Broken(Journalist):
        def stepped(self, stats: StepStats, processed: Processed) -> None:
            super().stepped(stats, processed)
            raise RuntimeError("a fault in the metrics")

    journalist = Broken()
    async with serving(observer=journalist) as (llm, _):
        await run_all(llm)
        task = asyncio.create_task(collect(llm, "aborted", "aborted", max_tokens=200))
        async with asyncio.timeout(10):
            while not await llm.abort("aborted"):
                await asyncio.sleep(0)
        await task
        with pytest.raises(ParameterError):
            await collect(llm, [9999])  # type: ignore[arg-type]
    count = len(REQUESTS) + 1
    assert journalist.events["accepted"] == journalist.events["finished"] == count
    assert journalist.reasons["abort"] == 1
    assert journalist.last is not None
    assert (journalist.last.running, journalist.last.waiting, journalist.last.referenced_blocks) == (0, 0, 0)


async def test_a_request_knows_when_it_was_first_scheduled() -> None:
    async with serving() as (llm, _):
        last = [output async for output in llm.generate("p", SamplingParams(max_tokens=3))][-1]
        times = last.metrics
        assert times is not None
        assert times.scheduled_time is not None
        assert times.first_token_time is not None
        assert times.last_token_time is not None
        assert times.finished_time is not None
        assert times.arrival_time <= times.scheduled_time <= times.first_token_time
        assert times.first_token_time <= times.last_token_time <= times.finished_time
