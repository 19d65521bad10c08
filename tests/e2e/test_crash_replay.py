"""The engine's process is killed, faulted or stopped under 32 streams of the real model: all end as undisturbed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import EngineDeadError, ModelError, OctavoError
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.outputs import RequestOutput
from octavo.sampling.params import SamplingParams

TALE = "the river remembers every stone it has moved and tells the sea about them at night"


def requests() -> list[tuple[str, SamplingParams]]:
    """32 requests: greedy and seeded, long and short prompts, n = 2, stop strings, log-probabilities, penalties."""
    made = []
    words = TALE.split()
    for index in range(32):
        length = (3, 40, 150, 9)[index % 4]
        prompt = " ".join(words[(index + place) % len(words)] for place in range(length))
        more: dict[str, Any] = {"max_tokens": 24 + index, "ignore_eos": index % 3 == 0}
        if index % 2:
            more |= {"temperature": 0.9, "seed": index, "n": 2 if index % 8 == 1 else 1}
        else:
            more |= {"temperature": 0.0, "logprobs": 2 if index % 4 == 0 else None}
        if index % 5 == 0:
            more["stop"] = ["stone", " sea"]
        if index % 7 == 0:
            more["repetition_penalty"] = 1.2
        made.append((prompt, SamplingParams(**more)))
    return made


async def run(llm: AsyncLLM, progress: list[int] | None = None) -> list[Any]:
    async def one(prompt: str, params: SamplingParams) -> Any:
        text: dict[int, str] = {}
        last: RequestOutput | None = None
        logprobs: list[Any] = []
        async for output in llm.generate(prompt, params, output_kind="delta"):
            for each in output.outputs:
                text[each.index] = text.get(each.index, "") + each.text
                logprobs.extend(each.logprobs or [])
            if progress is not None:
                progress[0] += 1
            last = output
        assert last is not None
        return sorted(text.items()), logprobs, len(last.prompt_token_ids)

    return await asyncio.gather(*(one(prompt, params) for prompt, params in requests()))


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    with_engine = AsyncLLM()
    try:
        return asyncio.run(run(with_engine))
    finally:
        with_engine.shutdown()


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    # 150 blocks hold about half of the requests, so that some are preempted when the engine is lost.
    made = AsyncLLM(separate_process=True, engine_timeout=1.5, num_gpu_blocks_override=150, max_num_batched_tokens=256)
    yield made
    pid = made.engine_info.pid
    made.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    gc.collect()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP])
@pytest.mark.parametrize("after", [1, 300])
async def test_no_stream_sees_the_engine_die(
    llm: AsyncLLM, undisturbed: list[Any], blow: signal.Signals, after: int
) -> None:
    restarts = llm.engine_restarts
    await llm.reset_prefix_cache()
    progress = [0]
    running = asyncio.create_task(run(llm, progress))
    while progress[0] < after:
        await asyncio.sleep(0.001)
    info = llm.engine_info
    os.kill(info.pid, blow)
    assert await running == undisturbed
    assert llm.engine_restarts == restarts + 1
    assert llm.engine_alive
    assert llm.num_running == 0
    assert await llm.check() == []
    stats = await llm.stats()
    assert (stats.running, stats.waiting, stats.referenced_blocks) == (0, 0, 0)


async def test_two_blows_in_one_run_are_survived_too(llm: AsyncLLM, undisturbed: list[Any]) -> None:
    restarts = llm.engine_restarts
    progress = [0]
    running = asyncio.create_task(run(llm, progress))
    for after in (50, 500):
        while progress[0] < after:
            await asyncio.sleep(0.001)
        os.kill(llm.engine_info.pid, signal.SIGKILL)
    assert await running == undisturbed
    assert llm.engine_restarts == restarts + 2


async def test_a_stopped_engine_is_not_alive_before_it_is_replaced(llm: AsyncLLM) -> None:
    assert llm.engine_alive
    info = llm.engine_info
    os.kill(info.pid, signal.SIGSTOP)
    async with asyncio.timeout(30):
        while llm.engine_alive:
            await asyncio.sleep(0.01)
        while not llm.engine_alive:
            await asyncio.sleep(0.01)
    assert llm.engine_info.pid != info.pid


ORPHAN = """
import asyncio, os, signal
from octavo import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM(separate_process=True)
    async for output in llm.generate([5] * 6000, SamplingParams(max_tokens=2000, ignore_eos=True)):
        print(llm.engine_info.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_the_engine_ends_with_a_front_end_that_is_killed() -> None:
    ended = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pid = int(ended.stdout.split()[0])
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline, "the engine's process outlives its front end"
        time.sleep(0.05)


def test_errors_of_the_start_are_raised_here_as_they_are(tmp_path: Any) -> None:
    with pytest.raises(OctavoError, match="no such model"):
        AsyncLLM(str(tmp_path / "no such model"), separate_process=True)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelError):
        AsyncLLM(str(tmp_path / "broken.gguf"), separate_process=True)
    with pytest.raises(OctavoError, match="threads"):
        AsyncLLM(separate_process=True, threads=0)


async def test_a_closed_llm_refuses_and_leaves_no_process() -> None:
    llm = AsyncLLM(separate_process=True)
    info = llm.engine_info
    stream = llm.generate("once", SamplingParams(max_tokens=500, ignore_eos=True))
    await anext(stream)
    await asyncio.to_thread(llm.shutdown)
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        await anext(llm.generate("again"))
    with pytest.raises(ProcessLookupError):
        os.kill(info.pid, 0)
