"""Throws malformed, oversized, slow and cut connections at a server while others use it: does it live, and leak?

    python benchmarks/malformed.py [--connections 10000] [--concurrency 64] [--seed 1]

Meanwhile some clients ask questions whose answers are known. The run fails when the server dies or stops answering
/health, when one of those answers is wrong, when a bad connection gets a 5xx, hangs or gets an error without a type,
or when the front end's own memory grows by more than --growth-mib after the first fifth of the connections.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from bad_requests import bad_requests, send
from http_client import Address, call
from known_answers import Expected, Question, ask, expected_answers, questions, wrong
from recording import RESULTS, about_model, dashed, provenance, write
from server_process import ServerProcess, anonymous_bytes

_MEBIBYTE = 1 << 20
_SHOWN = 20
_ASKERS = 8


class Run:
    """One run: what was sent, what came back, and what was wrong."""

    def __init__(self, server: ServerProcess, options: argparse.Namespace) -> None:
        self.server = server
        self.address: Address = server.address
        self.options = options
        self.statuses: collections.Counter[int] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.memory: list[dict[str, float]] = []
        self.answers = 0
        self.finished = 0
        self.health_ms: list[float] = []
        self._stopped = asyncio.Event()

    async def run(self, asked: list[Question], expected: list[Expected]) -> None:
        """Everything at once, until all bad connections are done."""
        helpers = [asyncio.create_task(self._ask(asked, expected, number)) for number in range(_ASKERS)]
        helpers.append(asyncio.create_task(self._watch()))
        makers = list(bad_requests(self.options.seed))
        chance = random.Random(self.options.seed)
        order: list[Any] = []
        while len(order) < self.options.connections:
            order += chance.sample(makers, len(makers))
        pending = iter(order[: self.options.connections])

        async def client() -> None:
            for make in pending:
                outcome = await send(self.address, make())
                self.statuses[outcome.status] += 1
                self.finished += 1
                if outcome.wrong is not None:
                    self.faults[f"{outcome.name}: {outcome.wrong}"] += 1

        await asyncio.gather(*(client() for _ in range(self.options.concurrency)))
        self._stopped.set()
        await asyncio.gather(*helpers)
        self._measure()

    async def _ask(self, asked: list[Question], expected: list[Expected], first: int) -> None:
        number = first
        while not self._stopped.is_set():
            question = asked[number % len(asked)]
            problem = wrong(question, expected[question.number], await ask(self.address, question, self.server.model))
            self.answers += 1
            if problem is not None:
                self.faults[f"question {question.number} ({question.form}): {problem}"] += 1
            number += _ASKERS

    async def _watch(self) -> None:
        while not self._stopped.is_set():
            self._measure()
            began = time.perf_counter()
            try:
                status = (await call(self.address, "GET", "/health", timeout=10)).status
            except (OSError, ValueError) as error:
                status, what = 0, repr(error)
            else:
                what = f"status {status}"
            self.health_ms.append((time.perf_counter() - began) * 1000)
            if status != 200:
                self.faults[f"/health: {what}"] += 1
            await asyncio.sleep(1.0)

    def _measure(self) -> None:
        engine = self.server.engine()
        self.memory.append(
            {
                "connections": self.finished,
                "front_end_bytes": anonymous_bytes(self.server.pid) or 0,
                "engine_bytes": (anonymous_bytes(engine.pid) if engine is not None else None) or 0,
            }
        )

    def growth(self, name: str) -> float:
        """Bytes gained from the first fifth of the connections to the end."""
        early = next((at[name] for at in self.memory if at["connections"] >= self.options.connections / 5), 0.0)
        return self.memory[-1][name] - early


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--growth-mib", type=float, default=16.0, help="most the front end may grow")
    parser.add_argument("--json", type=Path, help="file to write; else one in benchmarks/results")
    options = parser.parse_args()
    record = {"what": "bad connections", **provenance(["uvicorn", "starlette", "httptools"])}
    asked = questions(60, options.seed)
    expected = expected_answers(options.model, asked, max_model_len=2048)
    with ServerProcess.octavo("--max-model-len", "2048", model=options.model) as server:
        run = Run(server, options)
        began = time.monotonic()
        uvloop.run(run.run(asked, expected))
        seconds = time.monotonic() - began
        if not server.running():
            run.faults["the server ended"] += 1
    grown = {name: run.growth(name) for name in ("front_end_bytes", "engine_bytes")}
    if grown["front_end_bytes"] > options.growth_mib * _MEBIBYTE:
        run.faults[f"the front end grew by {grown['front_end_bytes'] / _MEBIBYTE:.1f} MiB"] += 1
    record |= {
        "connections": options.connections,
        "concurrency": options.concurrency,
        "seconds": seconds,
        "statuses": {str(status): count for status, count in sorted(run.statuses.items())},
        "answers_compared": run.answers,
        "health_ms_max": max(run.health_ms),
        "growth_after_first_fifth_bytes": grown,
        "faults": dict(run.faults.most_common()),
        "memory": run.memory,
    }
    record |= about_model(options.model)
    path = options.json or RESULTS / dashed(f"malformed {record['date'][:10]}.json")
    write(record, path)
    print(f"{options.connections} connections in {seconds:.0f} s; answers by status: {record['statuses']} (0: none)")
    print(f"{run.answers} answers of others compared; /health at most {record['health_ms_max']:.0f} ms")
    print(", ".join(f"{name[:-6]} {value / _MEBIBYTE:+.1f} MiB" for name, value in grown.items()))
    for fault, count in run.faults.most_common(_SHOWN):
        print(f"{count:6} x {fault}")
    print(f"written to {path}")
    sys.exit(1 if run.faults else 0)


if __name__ == "__main__":
    main()
