"""AsyncLLM: streams, aborts, cancellation, errors where they belong, bounded hand-over, an idle engine that sleeps."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from octavo.errors import CapacityError, EngineDeadError, GenerationError, ParameterError
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.outputs import RequestOutput
from octavo.sampling.params import SamplingParams
from tests.frontend.fakes import Script, ScriptBackend, echo, load_fake, says


@contextmanager
def running(script: Script | ScriptBackend, **options: Any) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_loaded(load_fake(script, **options))
    try:
        yield llm
    finally:
        llm.shutdown()
        assert not llm._dispatcher._thread.is_alive()


async def collect(llm: AsyncLLM, prompt: Any, request_id: str | None = None, **more: Any) -> list[RequestOutput]:
    params = SamplingParams(**{"max_tokens": 8, **more.pop("params", {})})
    return [output async for output in llm.generate(prompt, params, request_id, **more)]


class Gate:
    """Stops the back end before each step until it is let through."""

    def __init__(self, backend: ScriptBackend) -> None:
        self.semaphore = threading.Semaphore(0)
        self.open = False
        self.waiting_before = 0
        backend.before_step = self._wait

    def _wait(self, step: int) -> None:
        self.waiting_before = step
        if not self.open:
            self.semaphore.acquire()

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self.semaphore.release()

    def let_all(self) -> None:
        self.open = True
        self.semaphore.release()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def assert_clean(llm: AsyncLLM) -> None:
    engine = llm._loaded.engine
    # A stream that is aborted ends when the abort is on its way; the engine's thread reads it before its next step.
    deadline = time.monotonic() + 10
    while engine.has_work() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not engine.has_work()
    assert engine.check() == []
    assert engine.stats().referenced_blocks == 0
    assert len(llm._dispatcher.outputs) == 0
    assert llm.num_running == 0


async def test_a_stream_is_cumulative_and_ends_with_a_finished_output() -> None:
    with running(says("hello")) as llm:
        outputs = await collect(llm, "p", "mine")
        assert {output.request_id for output in outputs} == {"mine"}
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].text == "hello"
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(lengths)
        assert_clean(llm)


async def test_deltas_add_up_and_final_is_one_output() -> None:
    with running(says("hello")) as llm:
        deltas = await collect(llm, "p", output_kind="delta")
        assert "".join(output.outputs[0].text for output in deltas) == "hello"
        (final,) = await collect(llm, "p", output_kind="final")
        assert final.outputs[0].text == "hello"
        with pytest.raises(ParameterError, match="output_kind"):
            await collect(llm, "p", output_kind="whole")


async def test_many_requests_at_once_each_get_their_own() -> None:
    with running(echo) as llm:
        prompts = [f"prompt {index}" for index in range(50)]
        results = await asyncio.gather(*(collect(llm, prompt, params={"max_tokens": 12}) for prompt in prompts))
        for prompt, outputs in zip(prompts, results, strict=True):
            ids = outputs[-1].prompt_token_ids
            assert outputs[-1].prompt == prompt
            assert outputs[-1].outputs[0].token_ids == (ids * 2)[:12]
        assert_clean(llm)


async def test_a_slow_consumer_gets_fewer_outputs_and_loses_nothing() -> None:
    for kind in ("cumulative", "delta"):
        backend = ScriptBackend(says("0123456789" * 5))
        gate = Gate(backend)
        with running(backend) as llm:
            stream = llm.generate("p", SamplingParams(max_tokens=50), output_kind=kind)  # type: ignore[arg-type]
            gate.let(1)
            first = await anext(stream)
            assert first.outputs[0].text == "0"
            gate.let_all()
            await until(lambda llm=llm: llm.num_running == 0)
            rest = [output async for output in stream]
            assert len(rest) == 1
            text = rest[0].outputs[0].text
            assert text == "0123456789" * 5 if kind == "cumulative" else text == ("0123456789" * 5)[1:]


async def test_abort_gives_a_last_output_and_frees_the_request() -> None:
    backend = ScriptBackend(says("x" * 200))
    gate = Gate(backend)
    with running(backend) as llm:
        task = asyncio.create_task(collect(llm, "p", "victim", params={"max_tokens": 200}))
        gate.let(3)
        await until(lambda: gate.waiting_before == 4)
        assert await llm.abort("victim")
        gate.let_all()
        outputs = await task
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        # The step that was running when the abort came is the last one.
        assert backend.steps == 4
        assert not await llm.abort("victim")
        assert_clean(llm)


@pytest.mark.parametrize("way", ["cancel", "break"])
async def test_leaving_a_stream_aborts_its_request_within_one_step(way: str) -> None:
    backend = ScriptBackend(says("x" * 200))
    gate = Gate(backend)
    with running(backend) as llm:

        async def consume() -> None:
            async for _ in llm.generate("p", SamplingParams(max_tokens=200)):
                if way == "break":
                    break

        task = asyncio.create_task(consume())
        gate.let(1)
        if way == "cancel":
            await until(lambda: gate.waiting_before == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task
        # The abort is under way or done, also where the loop has to finalise the generator that was left.
        await until(lambda: bool(llm._dispatcher._aborted) or llm.num_running == 0)
        gate.let_all()
        await until(lambda: llm.num_running == 0)
        assert backend.steps <= 3
        assert_clean(llm)


async def test_a_request_with_the_id_of_a_running_one_is_refused_and_later_allowed() -> None:
    backend = ScriptBackend(says("x" * 20))
    gate = Gate(backend)
    with running(backend) as llm:
        first = asyncio.create_task(collect(llm, "p", "same"))
        await until(lambda: gate.waiting_before == 1)
        with pytest.raises(ParameterError, match="request_id"):
            await collect(llm, "q", "same")
        gate.let_all()
        assert (await first)[-1].finished
        assert (await collect(llm, "q", "same"))[-1].finished


async def test_a_wrong_request_fails_alone() -> None:
    backend = ScriptBackend(says("fine"), num_blocks=4)
    backend.fail_sequences = {7}
    with running(backend) as llm:
        results: list[Any] = await asyncio.gather(
            collect(llm, [8]),
            collect(llm, [7]),
            collect(llm, [9], params={"max_tokens": 200}),
            collect(llm, []),
            collect(llm, [10]),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [list, GenerationError, CapacityError, ParameterError, list]
        assert "logits are not finite" in str(results[1])
        assert results[0][-1].outputs[0].text == results[4][-1].outputs[0].text == "fine"
        assert_clean(llm)


async def test_an_error_of_the_engine_fails_all_requests_and_later_ones() -> None:
    backend = ScriptBackend(says("x" * 100))

    def explode(step: int) -> None:
        if step == 3:
            raise RuntimeError("wires crossed")

    backend.before_step = explode
    with running(backend) as llm:
        results: list[Any] = await asyncio.gather(*(collect(llm, "p") for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 3
        assert all(isinstance(result.__cause__, RuntimeError) for result in results)
        assert isinstance(llm.failure, RuntimeError)
        with pytest.raises(EngineDeadError, match="wires crossed"):
            await collect(llm, "p")
    assert backend.closed


async def test_shutdown_fails_what_runs_and_frees_the_back_end() -> None:
    backend = ScriptBackend(says("x" * 100))
    gate = Gate(backend)
    llm = AsyncLLM.from_loaded(load_fake(backend))
    task = asyncio.create_task(collect(llm, "p"))
    await until(lambda: gate.waiting_before == 1)
    closing = asyncio.create_task(asyncio.to_thread(llm.shutdown))
    await asyncio.sleep(0.01)
    gate.let_all()
    await closing
    with pytest.raises(EngineDeadError, match="closed"):
        await task
    with pytest.raises(EngineDeadError, match="closed"):
        await collect(llm, "p")
    assert backend.closed
    llm.shutdown()


async def test_the_engine_runs_in_a_thread_of_its_own_and_sleeps_when_idle() -> None:
    backend = ScriptBackend(says("x"))
    with running(backend) as llm:
        await collect(llm, "p")
        assert backend.thread is llm._dispatcher._thread
        thread_id = backend.thread.ident
        assert thread_id is not None
        clock = time.pthread_getcpuclockid(thread_id)
        await asyncio.sleep(0.01)  # let it go to sleep
        before, steps = time.clock_gettime_ns(clock), backend.steps
        await asyncio.sleep(0.2)
        assert time.clock_gettime_ns(clock) == before
        assert backend.steps == steps
        assert (await collect(llm, "p"))[-1].finished


async def test_an_unused_async_llm_is_collected_and_its_thread_ends() -> None:
    backend = ScriptBackend(says("x"))
    llm = AsyncLLM.from_loaded(load_fake(backend))
    await collect(llm, "p")
    thread, reference = llm._dispatcher._thread, weakref.ref(llm)
    del llm
    gc.collect()
    assert reference() is None
    assert not thread.is_alive()
    assert backend.closed


async def test_a_long_text_is_tokenised_outside_of_the_event_loop() -> None:
    with running(says("x")) as llm:
        threads: list[threading.Thread] = []
        encode = llm._inputs.tokenizer.encode

        def spy(text: str, add_special_tokens: bool = True) -> list[int]:
            threads.append(threading.current_thread())
            return encode(text, add_special_tokens)

        llm._inputs.tokenizer.encode = spy  # type: ignore[method-assign]
        await collect(llm, "short")
        await collect(llm, "long" * 10_000, params={"truncate_prompt_tokens": 5})
        assert threads[0] is threading.main_thread()
        assert threads[1] is not threading.main_thread()


async def test_chat_streams_the_answer_to_one_conversation() -> None:
    with running(says("hi")) as llm:
        outputs = [output async for output in llm.chat([{"role": "user", "content": "hello"}])]
        assert outputs[-1].prompt == "(user)hello(assistant)"
        assert outputs[-1].outputs[0].text == "hi"


async def test_best_of_gives_one_output_at_the_end() -> None:
    with running(says("hi")) as llm:
        outputs = await collect(llm, "p", params={"n": 1, "best_of": 3})
        assert len(outputs) == 1
        assert len(outputs[0].outputs) == 1


async def test_requests_of_an_event_loop_that_ended_are_dropped() -> None:
    backend = ScriptBackend(says("x" * 200))
    gate = Gate(backend)
    with running(backend) as llm:

        def abandoned() -> None:
            async def start() -> None:
                stream = llm.generate("p", SamplingParams(max_tokens=200))
                streams.append(stream)
                gate.let(1)
                await anext(stream)

            loop = asyncio.new_event_loop()
            loop.run_until_complete(start())
            loop.close()

        streams: list[Any] = []
        await asyncio.to_thread(abandoned)
        gate.let_all()
        await until(lambda: llm.num_running == 0)
        assert backend.steps < 200
        assert_clean(llm)


async def test_counters_are_read_and_the_prefix_cache_is_reset_between_steps() -> None:
    with running(says("x" * 40)) as llm:
        await collect(llm, [1] * 40)
        stats = await llm.stats()
        assert stats.counters.finished["length"] == 1
        assert stats.cached_blocks > 0
        assert await llm.reset_prefix_cache()
        assert (await llm.stats()).cached_blocks == 0
    with pytest.raises(EngineDeadError):
        await llm.stats()


async def test_threads_and_loops_share_one_engine() -> None:
    with running(echo) as llm:
        found: list[int] = []

        def other() -> None:
            outputs = asyncio.run(collect(llm, [1, 2, 3]))
            found.append(len(outputs[-1].outputs[0].token_ids))

        threads = [threading.Thread(target=other) for _ in range(4)]
        for thread in threads:
            thread.start()
        mine = await collect(llm, [4, 5])
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        assert found == [8] * 4
        assert mine[-1].outputs[0].token_ids == [4, 5] * 4
