"""A generation as the server reads it: to its end, failed from outside, closed in the middle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.generation import Generation
from octavo.sampling.params import SamplingParams
from tests.frontend.fakes import ScriptBackend, load_fake, says


class _Expired(Exception):
    pass


class _Held:
    """An engine that makes one token and then waits to be let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        backend = ScriptBackend(says("hello"))
        backend.before_step = lambda step: step > 1 and self.let_go.wait(60)
        self.llm = AsyncLLM.from_loaded(load_fake(backend))

    def run(self, work: Callable[[_Held], Awaitable[None]]) -> None:
        async def main() -> None:
            await work(self)

        try:
            asyncio.run(main())
        finally:
            self.let_go.set()
            self.llm.shutdown()

    async def open(self) -> Generation:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        return await self.llm.open("Q", params, "name", output_kind="delta")

    async def first(self) -> Generation:
        """A generation of which the first token was read, and no more comes."""
        generation = await self.open()
        output = await generation.next()
        assert output is not None
        assert len(output.outputs[0].token_ids) == 1
        return generation

    async def ends_early(self) -> None:
        """Let the engine go: the request has left it with its memory before its last token."""
        self.let_go.set()
        while self.llm.num_running:
            await asyncio.sleep(0.001)
        stats = await self.llm.stats()
        assert (stats.running, stats.waiting, stats.referenced_blocks) == (0, 0, 0)
        assert stats.counters.finished["abort"] == 1


def test_it_is_read_to_its_end_and_stays_ended() -> None:
    async def work(held: _Held) -> None:
        held.let_go.set()
        generation = await held.open()
        tokens = 0
        while (output := await generation.next()) is not None:
            tokens += len(output.outputs[0].token_ids)
            finished = output.finished
        assert (tokens, finished) == (5, True)
        assert await generation.next() is None
        generation.close()  # which changes nothing any more
        assert (await held.llm.stats()).counters.finished["length"] == 1

    _Held().run(work)


def test_a_reader_that_waits_gets_the_failure_and_the_request_leaves_the_engine() -> None:
    async def work(held: _Held) -> None:
        generation = await held.first()
        reader = asyncio.ensure_future(generation.next())
        await asyncio.sleep(0)
        generation.fail(_Expired())
        with pytest.raises(_Expired):
            await reader
        await held.ends_early()

    _Held().run(work)


def test_a_reader_that_is_elsewhere_gets_the_failure_when_it_reads_on() -> None:
    async def work(held: _Held) -> None:
        generation = await held.first()
        generation.fail(_Expired())
        await held.ends_early()
        with pytest.raises(_Expired):
            await generation.next()

    _Held().run(work)


def test_a_closed_one_leaves_the_engine() -> None:
    async def work(held: _Held) -> None:
        (await held.first()).close()
        await held.ends_early()

    _Held().run(work)
